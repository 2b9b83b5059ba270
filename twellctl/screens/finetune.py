"""What `twellctl finetune` says at its end, and of a run that it only tried."""

import dataclasses
from typing import Any

from twellctl.errors import TwellError
from twellctl.screens import ui
from twellctl.screens.eval import of_own


def finetuned(result: Any) -> None:
    """What a fine-tuning run ended with (a `FineTuned`): first what users will notice."""
    from twellctl.screens.advice import of_run  # that --help need not load it

    if result.answers is not None:
        ui.say(f"{result.out}: {result.answers.verdict}")
    for sentence in of_run(dataclasses.asdict(result)):
        ui.note(sentence)
    losses = {"teacher": result.teacher_cross_entropy, "this model": result.cross_entropy}
    held_out = ", ".join(f"{k} {v:.4f}" for k, v in losses.items() if v is not None)
    where = "held-out text" if result.cross_entropy is not None else "the last step"
    density = f"density {result.density:.2%} after {result.num_tokens} tokens"
    ui.say(f"{result.out}: {density}, measured on {where}")
    ui.say(f"by layer: {', '.join(f'{d:.2%}' for d in result.density_by_layer)}")
    if held_out:
        kl = "" if result.teacher_kl is None else f"; KL to the teacher {result.teacher_kl:.4f}"
        ui.say(f"held-out cross-entropy: {held_out}{kl}")
    if result.answers is not None:
        ui.say(f"answers to held-out prompts: {of_own(result.answers)}")
    ui.say(f"next: twellctl profile {ui.word(result.out)} --data FILE")


def tried_out(result: Any, changes: str) -> None:
    """What a run would take (a `DryRun`); `changes` as flags."""
    again = f", the text about {result.passes:.1f} times" if result.passes > 1.05 else ""
    tokens = f"{result.num_tokens} tokens{again}"
    ui.say(f"{result.num_steps} steps, {tokens}, {result.num_trained} parameters")
    ui.say(
        f"about {ui.duration(result.seconds)} at {result.tokens_per_second:.0f} tokens/s, "
        "evaluations and checkpoints not counted"
    )
    peak, total = (n / 2**30 for n in (result.peak_bytes, result.total_bytes))
    ui.say(f"{peak:.1f} of {total:.1f} GiB of {result.memory}{_over_processes(result)}")
    for plan in result.on_several:
        ui.say(_on_several(plan))
    if result.checkpoint_bytes:
        size = result.checkpoint_bytes / 1e9
        ui.say(
            f"a checkpoint takes {size:.3g} GB on disk; two are kept, a third is there for moments"
        )
    if result.density is not None:
        shape = f"--config {ui.word(result.config)} --density {result.density:g}"
        ui.say(f"its speed, measured with random weights: twellctl bench decode {shape}")
    if changes:
        raise TwellError(f"it does not fit in {result.memory} as asked; with {changes} it does")


def _over_processes(result: Any) -> str:
    if result.num_processes == 1:
        return ""
    share = "some rows of student, teacher and optimizer" if result.is_sharded else "a replica"
    return f", the most of {result.num_processes} processes; each holds {share}"


def _on_several(plan: Any) -> str:
    """Before the first block, of an `OnSeveral`."""
    size = f"{plan.least_bytes / 2**30:.1f} GiB each before the first block"
    if plan.is_sharded:
        return f"on {plan.num_gpus} such GPUs: sharded, {size}"
    return f"on {plan.num_gpus} or more such GPUs: a replica on each, {size}"
