"""What to make of a profile or of a run, in sentences. Each names the figure that it rests on."""

from typing import Any

from twellctl.firing.profiled import Profile
from twellctl.models.bytes_read import share_read
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.schemes import INT4

PREFILL, DECODE = 0.02, 0.05  # densities from which on dense was as fast on an H200, the latter
# for 16 sequences side by side; one alone gains far above it
TOO_MANY = 0.2  # up to here one sequence was faster, of large models; above nothing was measured
SMALL = 2048  # neurons of a layer; with 1536 decoding was no faster at 1 and 3 % on an H200
MET = 1.1  # times the target
# of held-out text, nats a token: a code model of +0.031 and KL 0.096 solved a third of what its
# teacher solves (591 executed tasks)
BAD_LOSS, BAD_KL = 0.1, 0.09
FAR_KL = 1.0  # by the curve of verdicts, a fifth is kept of what is solved
LOSSES = ("cross_entropy", "teacher_cross_entropy", "teacher_kl")


def of_profile(profile: Profile, checkpoint: Checkpoint) -> str:
    """What the density of a model is good for, which `profile` measured of `checkpoint`."""
    density, size = profile.density, profile.intermediate_size
    read = f"{share_read(checkpoint, density):.0%} of the bytes that it would if all did"
    if checkpoint.scheme is INT4:  # 0.97 to 1.06 times as fast at 15 % on an H200
        worth = (
            f"a step of one token reads {read}, but in 4 bits takes about as long. So a higher "
            "--density costs little."
        )
    elif density > TOO_MANY:
        worth = (
            f"a step of one token reads {read}. Several sequences and long prompts gain nothing: "
            "fit or fine-tune with a lower --density."
        )
    elif size < SMALL:
        worth = (
            f"{'few enough' if density <= PREFILL else 'many'} for long prompts. Layers of {size} "
            "neurons are small, and may decode no faster: bench decode says."
        )
    elif density > DECODE:
        worth = (
            "a gain only where few sequences are decoded at once. For more, fit or fine-tune with "
            "a lower --density."
        )
    elif density > PREFILL:
        worth = (
            f"a gain token by token. Long prompts are as fast dense above about {PREFILL:.0%}, and "
            "an export runs them so."
        )
    else:
        worth = "few enough for prompts and for decoding."
    return f"{density:.2%} of the neurons fire: {worth}"


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
