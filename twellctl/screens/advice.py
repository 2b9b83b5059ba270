"""What to make of a profile or of a run, in sentences. Each names the figure that it rests on."""

from collections.abc import Callable, Iterator
from typing import Any

from twellctl.firing.profiled import Profile

FEW_TOKENS = 50_000  # too few to call a neuron dead
MANY_DEAD = 0.05
FEWER_KINDS = 1.5  # times as dense as the sparsest kind of text
PREFILL, DECODE = 0.02, 0.05  # densities from which on dense was as fast on an H200, the latter
# for 16 sequences side by side; one alone gains far above it
TOO_MANY = 0.2  # by reckoning: above DECODE nothing was measured
SMALL = 2048  # neurons of a layer; with 1536 decoding was no faster at 1 and 3 % on an H200
MET = 1.1  # times the target
# of held-out text, nats a token: a code model of +0.031 and KL 0.096 solved a third of what its
# teacher solves (591 executed tasks)
BAD_LOSS, BAD_KL = 0.1, 0.09
LOSSES = ("cross_entropy", "teacher_cross_entropy", "teacher_kl")
MOST_NAMED = 6  # layers, by their numbers


def percent(share: float) -> str:
    """With three digits: "12.3 %", "0.456 %"."""
    value = 100 * share
    if value == 0:
        return "0 %"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.01 else 4
    return f"{value:.{digits}f} %"


def of_profile(profile: Profile) -> list[str]:
    """About a measured model, what matters most first."""
    rules: tuple[Callable[[Profile], Iterator[str]], ...] = (_density, _slots, _kinds, _dead)
    return [said[0].upper() + said[1:] for rule in rules for said in rule(profile)]


def of_run(report: dict[str, Any]) -> list[str]:
    """About how a fine-tuning run ended (the fields of a `FineTuned`)."""
    wanted, density = report["target_density"], report["density"]
    said = []
    loss, teacher, kl = (report.get(key) for key in LOSSES)
    lost = 0.0 if loss is None or teacher is None else loss - teacher
    if lost > BAD_LOSS or (kl or 0.0) > BAD_KL:
        by = f", KL {kl:.3f}" if kl is not None else ""
        said.append(
            f"far from its teacher, {lost:+.3f} nats a token of held-out text{by}: train longer, "
            "on the model's own answers, or be content with a higher density"
        )
    if wanted is not None and density > MET * wanted:
        said.append(
            f"the target of {wanted:.2%} density was not met in this budget: train longer, or take "
            "a higher --density"
        )
    if wanted is not None and density < wanted * 0.9:
        said.append(
            f"sparser than the {wanted:.2%} asked for, which costs loss: the price had not settled "
            "when the run ended; train longer"
        )
    return said


def _density(profile: Profile) -> Iterator[str]:
    density = profile.density
    if density > TOO_MANY:
        yield (
            f"{percent(density)} of the neurons fire: too many for a gain. Fit or fine-tune with a "
            "lower --density."
        )
    elif profile.intermediate_size < SMALL:
        yield (
            f"{percent(density)} of the neurons fire: "
            f"{'few enough' if density <= PREFILL else 'many'} for long prompts. Layers of "
            f"{profile.intermediate_size} neurons are small, and may decode no faster: bench "
            "decode says."
        )
    elif density > DECODE:
        yield (
            f"{percent(density)} of the neurons fire: a gain where few sequences are written side "
            "by side, and no other. For more, fit or fine-tune with a lower --density."
        )
    elif density > PREFILL:
        yield (
            f"{percent(density)} of the neurons fire: a gain token by token. Long prompts are as "
            f"fast dense above about {percent(PREFILL)}, and an export runs them so."
        )
    else:
        yield f"{percent(density)} of the neurons fire: few enough for prompts and for decoding."


def _slots(profile: Profile) -> Iterator[str]:
    full = [n for n, layer in enumerate(profile.layers) if layer.slots >= profile.tile]
    if full:
        named = f" ({', '.join(map(str, full))})" if len(full) <= MOST_NAMED else ""
        yield (
            f"{len(full)} of {len(profile.layers)} layers{named} need all {profile.tile} slots of "
            "a tile: the packed gate is no smaller than the dense one there."
        )


def _kinds(profile: Profile) -> Iterator[str]:
    kinds = sorted((p for p in profile.by_kind if p.density), key=lambda part: part.density)
    if len(kinds) > 1 and kinds[-1].density > FEWER_KINDS * kinds[0].density:
        yield (
            f"Of the kinds of text, {kinds[-1].kind} fires {percent(kinds[-1].density)} of the "
            f"neurons, {kinds[0].kind} {percent(kinds[0].density)}: profile the text that you will "
            "serve before export."
        )


def _dead(profile: Profile) -> Iterator[str]:
    if profile.dead_fraction <= MANY_DEAD:
        return
    said = f"{percent(profile.dead_fraction)} of the neurons fired on no token."
    if profile.distinct_tokens < FEW_TOKENS:
        yield f"{said} {profile.distinct_tokens} tokens are few to call them dead: read more text."
    else:
        yield f"{said} They cost memory and no time."
