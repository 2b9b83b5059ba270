"""Tokens one by one as text and bytes, with tokenizers of both kinds."""

from twellctl.serving.token_spelling import TokenSpelling


def test_byte_level_tokens_make_up_the_text(tokenizer):
    spelling = TokenSpelling(tokenizer)
    for text in ("for x in y:\n", "日本語 🏳️‍🌈 naïve ∑", " é", "\x00\x7f\u07ff\u0800\U0010ffff"):
        spelled = [spelling(token) for token in tokenizer.encode(text)]
        assert b"".join(one.bytes for one in spelled).decode() == text
        assert all(one.is_whole == ("\N{REPLACEMENT CHARACTER}" not in one.text) for one in spelled)


def test_special_tokens_have_their_name(tokenizer):
    assert TokenSpelling(tokenizer)(0).text == "<|endoftext|>"


def test_bytes_that_no_text_has_are_none(tokenizer):
    spelling = TokenSpelling(tokenizer)
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    unknown = [names[token] for token in range(512) if spelling(token).bytes is None]
    assert len(unknown) == 13  # c0, c1 and f5 to ff
    assert all(len(name) == 1 for name in unknown)


def test_sentencepiece_tokens_keep_their_space(sentencepiece):
    spelling = TokenSpelling(sentencepiece)
    vocab = sentencepiece.get_vocab()
    assert spelling(vocab["▁a"]).text == " a"
    assert spelling(vocab["b"]).text == "b"
    part = spelling(vocab["<0xC3>"])
    assert (part.bytes, part.escaped(), part.is_whole) == (b"\xc3", "\\xc3", False)
    whole = spelling(vocab["<0x41>"])
    assert (whole.text, whole.bytes, whole.is_whole) == ("A", b"A", True)
