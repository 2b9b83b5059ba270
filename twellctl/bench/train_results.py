"""What bench train found: the points of any bench, and what TwELL is worth in speed and memory."""

from dataclasses import dataclass

from twellctl.bench.results import Bench, Candidate, Point


@dataclass(frozen=True)
class TrainBench(Bench):
    """A whole run of bench train; each group is one point."""

    @property
    def sentences(self) -> list[str]:
        """A sentence a point: speed and memory against the fastest dense candidate."""
        place = "CPU" if self.facts["device"] == "CPU" else "GPU"
        return [
            train_sentence(what, point, place) for what, points in self.groups for point in points
        ]


def train_sentence(what: str, point: Point, place: str = "GPU") -> str:
    """Like "on this GPU a training step is 1.26x faster over TwELL and takes 29 % less memory...".

    Both over the fastest dense candidate. On the CPU memory is left out.
    """
    ratio = point.over_dense(point.twell)
    speed = f"{ratio:.2f}x {'faster' if round(ratio, 2) > 1 else 'as fast'} over TwELL"
    memory = _memory(point.twell, point.fastest_dense)
    percent = float(f"{100 * point.about['density']:.2g}")
    return f"on this {place} {what} is {speed}{memory} at {percent:g} % density"


def _memory(twell: Candidate, dense: Candidate) -> str:
    if "peak_mib" not in twell.also:
        return ""
    more = 100 * (twell.also["peak_mib"] / dense.also["peak_mib"] - 1)
    return f" and takes {abs(more):.0f} % {'more' if round(more) > 0 else 'less'} memory"
