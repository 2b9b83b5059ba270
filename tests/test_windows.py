"""Windows of text: where they begin, what is in them, and which of them a fit holds out."""

import numpy as np
import pytest

from twellctl.errors import TwellError
from twellctl.fitting.folder import windows_of
from twellctl.fitting.settings import Fit, windows_held_out
from twellctl.text.blocks import apart, spread_windows, windows_from_starts


def test_windows_of_more_tokens_than_a_float_tells_apart():
    last = 2**24 + 3
    ids = np.zeros(last + 256, np.int32)
    ids[-256:] = 1
    windows = spread_windows([ids], 8, 256)
    assert windows.shape == (8, 256)
    assert windows[-1].float().mean() == 1


END, EOT = 7, 0


def numbered(*sizes):
    """Texts of so many tokens, each after the end-of-text id, which end with END."""
    texts = [[*range(100 * n + 10, 100 * n + 9 + size), END] for n, size in enumerate(sizes, 1)]
    return [np.array([EOT, *text], np.int32) for text in texts]


@pytest.mark.parametrize(
    ("sizes", "begin_with", "ends"),
    [
        ((8, 8), [110, 210], 2),
        ((11,), [110, 117], 1),  # the end, with some before it; the first window fills it up
        ((11, 3, 8), [110, 210, 310], 3),  # its end goes to another text, with some before it
        ((8, 3, 8), [110, 210, 310], 3),
        ((24,), [110, 118, 126], 1),
        ((3, 3, 8), [110, 310], 3),  # two in a window, a separator between them
        ((5, 8, 2), [110, 210], 3),  # the third fills the first window
        ((5, 5, 8), [110, 210, 310], 3),  # what is left takes the beginning of the next
        ((5, 5), [110, 210], 2),
        ((5,), [], 0),
    ],
)
def test_windows_begin_where_texts_begin_and_lose_no_end(sizes, begin_with, ends):
    windows = list(windows_from_starts(numbered(*sizes), 8, EOT))
    assert [len(window) for window in windows] == [8] * len(begin_with)
    assert [window[0] for window in windows] == begin_with
    assert sum((window == END).sum() for window in windows) == ends


def test_chats_longer_than_a_window_keep_the_ends_of_their_answers():
    """60 of 673 tokens in windows of 512: all ends are there, and little is read twice."""
    random = np.random.default_rng(0)
    texts = [np.array([EOT, *random.integers(10, 500, 672), END]) for _ in range(60)]
    windows = list(windows_from_starts(texts, 512, EOT))
    assert 60 <= (np.concatenate(windows) == END).sum() <= 63
    assert 79 <= len(windows) <= 92
    whole = b"".join(window.tobytes() for window in windows)
    assert all(text[-160:].tobytes() in whole for text in texts)  # not without what is before


def test_short_texts_are_whole_in_some_window():
    random = np.random.default_rng(0)
    texts = [
        np.array([EOT, *random.integers(10, 500, size), END], np.int32)
        for size in random.integers(20, 300, 400)
    ]
    windows = list(windows_from_starts(texts, 512, EOT))
    whole = b"".join(window.tobytes() for window in windows)
    lost = [len(text) for text in texts if text[1:].tobytes() not in whole]
    assert sum(lost) < 512  # the last window is not full
    assert len(windows) * 512 < 1.1 * sum(map(len, texts))  # little is read twice


def test_little_text_is_fitted_on_before_it_is_held_out():
    for tokens in (512, 40_000, 2_000_000):
        fit = Fit(tokens=tokens)
        held = windows_held_out(fit)
        assert windows_held_out(fit, tokens // 512 + held + 1) == held <= 32
    assert [windows_held_out(Fit(), count) for count in (2, 90, 9000)] == [1, 10, 32]
    assert windows_held_out(Fit(eval_windows=7), 90) == 7


def test_what_is_held_out_is_of_other_texts(tmp_path):
    """Evenly spread, and as many tokens as are asked for."""
    texts = [np.full(size, number) for number, size in enumerate([30, 5, 10, 50] * 50)]
    fitted, held = ({int(text[0]) for text in part} for part in apart(texts, 0.1))
    assert fitted | held == set(range(200))
    assert not fitted & held
    assert sum(len(texts[number]) for number in held) == pytest.approx(0.1 * 4750, abs=50)
    assert min(held) < 10
    assert max(held) > 170
    np.arange(8, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    (tmp_path / "held-out.bin").touch()
    with pytest.raises(TwellError, match="1 windows of 8 tokens to fit on, and 0 to hold"):
        windows_of(tmp_path, Fit(seq_len=8))
