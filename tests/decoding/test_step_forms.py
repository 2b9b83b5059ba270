"""How forms of a step are timed: by turns, each replayed; what does not fit takes for ever."""

import math

import pytest
import torch

from twellctl.decoding import step_forms


class Graph:
    """Stands for a captured run; the turns of its replays are those in `times`."""

    def __init__(self, name: str, times: list[float]):
        self.name, self._left = name, iter(times)

    def replay(self) -> float:
        return next(self._left)


@pytest.fixture
def play(monkeypatch):
    """`play(times)` measures forms by name; an empty list does not fit into memory."""
    replayed = []

    def measure(times: dict[str, list[float]]) -> dict[str, float]:
        def captured(run, pool, stream) -> Graph:
            if not times[run]:
                raise torch.OutOfMemoryError("too large")
            return Graph(run, times[run])

        monkeypatch.setattr(step_forms, "_captured", captured)
        return step_forms.graph_ms({name: name for name in times})

    def timed_ms(replay, *, ahead: bool) -> float:
        assert ahead  # the host's time does not count
        replayed.append(replay.__self__.name)
        return replay()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(step_forms, "timed_ms", timed_ms)
    measure.replayed = replayed
    return measure


def test_forms_take_turns_and_their_medians_count(play):
    noisy, steady = [90, 80, 1, 2, 3, 4, 5, 6, 70], [50, 50] + [4.5] * 7
    assert play({"noisy": noisy, "steady": steady}) == {"noisy": 4, "steady": 4.5}
    assert play.replayed == ["noisy", "steady"] * 9


def test_what_does_not_fit_takes_for_ever(play):
    assert play({"large": [], "small": [1.0] * 9}) == {"large": math.inf, "small": 1.0}
    assert play.replayed == ["small"] * 9
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        play({"large": [], "larger": []})
