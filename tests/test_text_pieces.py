"""Tokens to text, piece by piece: never half a character, never a stop string."""

import pytest

from twellctl.text.tokens import Detokenizer, StopStrings

UNDECODED = "\N{REPLACEMENT CHARACTER}"
TEXT = "import sys  # 日本語, ελληνικά, 🏳️‍🌈 and 👩🏽‍💻!\n\n\tdone  "


def pieces(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.add(token) for token in tokens], detokenizer.rest()


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
def test_pieces_join_to_the_text_and_hold_no_half_character(request, kind):
    tokenizer = request.getfixturevalue(kind)
    text = TEXT if kind == "tokenizer" else "a b 日本 🏳️‍🌈 a"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    got, rest = pieces(tokenizer, tokens)
    assert "".join(got) == text
    assert rest == ""
    assert UNDECODED not in "".join(got)
    assert "" in got  # something was held back


def test_text_goes_out_as_soon_as_it_is_certain(tokenizer):
    snake = "🐍"
    assert len(tokenizer.encode(snake)) == 4
    got, _ = pieces(tokenizer, [*tokenizer.encode("a"), *tokenizer.encode(snake)])
    assert got == ["a", "", "", "", snake]


def test_bytes_that_are_no_text_come_out_once_that_is_certain(tokenizer):
    broken = tokenizer.encode("é")[:1]
    assert tokenizer.decode(broken) == UNDECODED
    after = tokenizer.encode("x")
    assert pieces(tokenizer, broken * 3 + after) == (["", "", "", UNDECODED * 3 + "x"], "")
    assert pieces(tokenizer, after + broken) == (["x", ""], UNDECODED)
    assert pieces(tokenizer, after + broken + after) == (["x", "", UNDECODED + "x"], "")


def test_special_tokens_are_no_text(sentencepiece):
    a, space_b = 257, 261
    assert pieces(sentencepiece, [a, 300, space_b]) == (["a", "", " b"], "")


def test_a_prompt_decides_about_the_first_space(sentencepiece):
    space_a, space_b = 260, 261
    assert pieces(sentencepiece, [space_b, space_a]) == (["b", " a"], "")
    assert pieces(sentencepiece, [space_b, space_a], [space_a] * 20) == ([" b", " a"], "")


def test_a_prompt_that_ends_within_a_character_is_gone_on_from(tokenizer):
    tokens = tokenizer.encode("é")
    assert len(tokens) == 2
    assert pieces(tokenizer, tokens[1:], tokens[:1]) == (["é"], "")


@pytest.mark.parametrize("prompt", ["aሰላም", "a🦄🦄🦄日", "a🦄🦄🦄b"])
def test_a_prompt_of_bytes_is_gone_on_from(sentencepiece, prompt):
    """Its last eight tokens may begin within a character."""
    tokens = sentencepiece.encode(prompt + "日a", add_special_tokens=False)
    got, rest = pieces(sentencepiece, tokens[-4:], tokens[:-4])
    assert (got, rest) == (["", "", "日", "a"], "")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", False)),
        (["b"], "abc", ("a", True)),
        (["abc", "b"], "abc", ("a", True)),  # "b" is complete first
        (["bc", "abc"], "abc", ("", True)),  # both at once: nothing of either is left
        (["\n\n"], "a\nb\n\nc", ("a\nb", True)),
        (["aab"], "aaaab", ("aa", True)),
        (["cd"], "abc", ("abc", False)),
        (["日本"], "a日日本", ("a日", True)),
    ],
)
def test_stop_strings_cut_alike_wherever_the_pieces_break(stops, text, expected):
    for breaks in range(2 ** (len(text) - 1)):
        cut, stopped, piece = StopStrings(stops), False, ""
        out = ""
        for i, character in enumerate(text):
            piece += character
            if breaks >> i & 1 or i == len(text) - 1:
                sent, stopped = cut.add(piece)
                out, piece = out + sent, ""
                if stopped:
                    break
        assert (out + ("" if stopped else cut.rest()), stopped) == expected


def test_only_what_may_begin_a_stop_string_is_held_back():
    cut = StopStrings(["\nUser:"])
    assert cut.add("Hello\nU") == ("Hello", False)
    assert cut.add("nit") == ("\nUnit", False)
    assert cut.rest() == ""


def test_bytes_that_never_become_text_are_not_held_without_end(tokenizer):
    broken = tokenizer.encode("é")[1:]
    detokenizer = Detokenizer(tokenizer)
    longest, text = 0, ""
    for token in broken * 1000:
        text += detokenizer.add(token)
        longest = max(longest, len(detokenizer._window))
    assert longest < 200
    assert text + detokenizer.rest() == UNDECODED * 1000
