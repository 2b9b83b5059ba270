"""What bench exact found: how fast each engine answers at each batch size, JSON, the sentence."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from twellctl.bench.results import Run
from twellctl.decoding.drafted import Drafted
from twellctl.errors import counted

ORIGINAL, STABLE, FIT, EXACT = "original", "original, stable", "fit alone", "exact"


@dataclass(frozen=True)
class ExactForm:
    """How one engine answered the prompts.

    `rates`: tokens a second of each group of prompts that was answered together, None where there
    were too few. `differing`: prompts whose token ids are not those of the stable original.
    `weight_bytes`: all that the engine holds but its cache.
    """

    name: str
    rates: tuple[float | None, ...]
    differing: int
    drafted: Drafted
    weight_bytes: int

    @property
    def must_agree(self) -> bool:
        """Whether no prompt may differ."""
        return self.name not in (ORIGINAL, FIT)


@dataclass(frozen=True)
class ExactPoint:
    """All forms at one batch size. `prompts`: their number.

    Those groups of prompts count that were timed in each form.
    """

    batch: int
    prompts: int
    forms: tuple[ExactForm, ...]

    @property
    def num_timed(self) -> int:
        """Groups that count."""
        return len(self.rates(self.forms[0]))

    def form(self, name: str) -> ExactForm:
        return next(form for form in self.forms if form.name == name)

    def rates(self, form: ExactForm) -> list[float]:
        """Tokens a second of the groups that count."""
        groups = zip(form.rates, *(one.rates for one in self.forms), strict=True)
        return [rate for rate, *of_all in groups if rate and all(of_all)]

    def ratios(self, form: ExactForm) -> list[float]:
        """`rates` over those of the original's fastest engine, group by group."""
        pairs = zip(self.rates(form), self.rates(self.form(ORIGINAL)), strict=True)
        return [rate / original for rate, original in pairs]

    @property
    def wrong(self) -> list[str]:
        """Of forms whose answers are not those of the stable original, in words."""
        return [
            f"'{form.name}' answers {form.differing} of {counted(self.prompts, 'prompt')} with "
            f"other tokens than the original with --stable, at batch {self.batch}"
            for form in self.forms
            if form.must_agree and form.differing
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "prompts": self.prompts,
            "groups_timed": self.num_timed,
            "forms": {form.name: self._form_json(form) for form in self.forms},
        }

    def _form_json(self, form: ExactForm) -> dict[str, Any]:
        rates, ratios = self.rates(form), self.ratios(form)
        return {
            "tokens_per_second": median(rates),
            "least": min(rates),
            "most": max(rates),
            "over_original": median(ratios),
            "over_original_least": min(ratios),
            "over_original_most": max(ratios),
            "passes": form.drafted.passes,
            "tokens_a_pass": form.drafted.tokens_a_pass,
            "drafted": dict(form.drafted.read),
            "kept": {name: form.drafted.kept[name] for name in form.drafted.read},
            "differing": form.differing,
            "weight_bytes": form.weight_bytes,
            "rates": list(form.rates),
        }


@dataclass(frozen=True)
class ExactBench(Run):
    """A run of `bench exact`; `models`: the names of the "draft" and its "original".

    `is_head`: the draft is a draft head, and no form has it alone.
    """

    models: dict[str, str]
    is_head: bool
    points: tuple[ExactPoint, ...]

    @property
    def sentences(self) -> list[str]:
        """Like "on this GPU the same answers are 1.62x as fast at batch 1 (1.04x to 2.35x), 1.21x
        at 4 (1.10x to 1.30x)"; none if answers are not the same.
        """
        if self.wrong:
            return []
        parts: list[str] = []
        for point in self.points:
            ratios = point.ratios(point.form(EXACT))
            fast, batch = ("", "") if parts else (" as fast", "batch ")
            spread = f"({min(ratios):.2f}x to {max(ratios):.2f}x)"
            parts.append(f"{median(ratios):.2f}x{fast} at {batch}{point.batch} {spread}")
        return [f"on this {self.place} the same answers are {', '.join(parts)}"]

    @property
    def wrong(self) -> list[str]:
        return [words for point in self.points for words in point.wrong]

    def to_json(self) -> dict[str, Any]:
        points = [point.to_json() for point in self.points]
        return self.as_json("bench exact", models=self.models, is_head=self.is_head, points=points)
