"""What commands that make a model say: convert, write, draft, finetune, export, quickstart.
No torch."""

import dataclasses
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, counted
from twellctl.models.schemes import INT4
from twellctl.screens import ui
from twellctl.screens.measure import of_bytes, of_own


def fitting(done: int, total: int, differ: float, left: float) -> None:
    """How far a fit has come, after each layer; on a CPU before the first, too."""
    far = f"layer {done} of {total} fitted, hidden states differ by {differ:.3f}, "
    about = f"fitting the first layer of {total}, by a guess "
    ui.doing(f"{far if done else about}{ui.duration(left)} left")


def converted(done: Any, model: str) -> None:
    """A `Converted`: what was made of `model`, and what comes next."""
    if done.fitted is None:
        _only_converted(done, model)
        return
    _fitted_layers(done.fitted)
    _fitted_model(done)
    ui.say(f"next: twellctl compare {ui.word(model)} {ui.word(done.out)}")


def _size(done: Any) -> str:
    return f"{done.num_layers} gated FFNs, {done.hidden_size} x {done.intermediate_size}"


def _only_converted(done: Any, model: str) -> None:
    """A conversion without a fit, and how to fit or fine-tune it."""
    out = ui.word(done.out)
    ui.say(f"{done.out}: {_size(done)}, {done.source_act} -> relu")
    write = f"twellctl write {ui.word(model)} own.jsonl --prompts FILE, then "
    fit = f"twellctl convert {ui.word(model)} {out} --overwrite --data"
    ui.note(
        "such a model talks noise until it is fitted or fine-tuned; to fit it: "
        + (f"{write}{fit} own.jsonl" if done.is_chat_model else f"{fit} FILE")
    )
    ui.say(f"next: twellctl finetune {out} OUT --recipe standard --data FILE")


def _fitted_model(done: Any) -> None:
    """The whole of a fitted model: density, and the distance to the source on held-out text."""
    from twellctl.screens.advice import FAR_KL, MET  # imported here: --help does not load it

    fitted, held_out = done.fitted, done.fitted.held_out
    ui.say(
        f"{done.out}: {_size(done)}{_changes(done)}, fitted on {fitted.tokens} tokens in "
        f"{ui.duration(fitted.seconds)}"
        + (f", {counted(fitted.kept, 'layer')} kept from before" if fitted.kept else "")
    )
    if done.is_relu:
        ui.say(f"{fitted.density:.2%} of the neurons fire for a token")
    if done.bytes_read is not None:  # of several processes the first knows
        ui.say(of_bytes(done.bytes_read, done.source_bytes_read, "its source"))
    if fitted.density > MET * fitted.wanted:
        ui.note(
            f"the target of {fitted.wanted:.2%} density was not met: fit on more text, or ask for "
            "a lower --density"
        )
    ui.say(
        f"held-out text: KL to the source {held_out.kl:.4f}, same token "
        f"{held_out.same_token:.2%}, cross-entropy {held_out.cross_entropy:.4f} (source "
        f"{held_out.source_cross_entropy:.4f})"
    )
    if held_out.kl > FAR_KL:
        other = "ask for a higher --density" if done.is_relu else "give a smaller --group-size"
        ui.note(
            f"KL {held_out.kl:.2f} is far from the source: few answers will be right. Fit on more "
            f"text, or {other}"
        )


def _changes(done: Any) -> str:
    """What was changed in a fitted model."""
    to_relu = f" and a map of rank {done.fitted.map_neurons}, {done.source_act} -> relu"
    rounded = f", linear layers in {done.bits} bits" if done.bits else ""
    return (to_relu if done.is_relu else "") + rounded


def _fitted_layers(fitted: Any) -> None:
    """A table: errors are shares of the squared output, and so is what the map contributes."""
    rows = [
        [
            str(index),
            f"{layer.fires:.2%}",
            "-" if layer.error_swapped is None else f"{layer.error_swapped:.2%}",
            f"{layer.error:.2%}",
            f"{layer.map_share:.1%}",
            f"{layer.states_differ:.3f}",
        ]
        for index, layer in enumerate(fitted.layers)
    ]
    columns = ["layer", "fires", "error, swapped", "error", "by the map", "states differ"]
    ui.table("on held-out text, by layer", columns, rows)


def planned(plan: Any) -> None:
    """What a fit would take (a `Plan`)."""
    ui.say(
        f"{plan.tokens} tokens, {plan.num_layers} layers of {plan.hidden_size} x "
        f"{plan.intermediate_size}"
        + (f" and a map of rank {plan.map_neurons}" if plan.map_neurons else "")
        + (f", linear layers in {plan.bits} bits" if plan.bits else "")
    )
    ui.say(
        f"about {ui.duration(plan.seconds)} on {plan.device}, {plan.bytes / 2**30:.1f} GiB of "
        f"its memory, {plan.host_bytes / 2**30:.1f} GiB of the host's"
    )
    if plan.no_room:
        raise TwellError(plan.no_room)


def written_so_far(stage: ui.Stage, going: Any) -> None:
    """How far the texts of a `stage` have come (a `Going`)."""
    speed = going.drawn / going.seconds if going.seconds else 0
    left = going.seconds * (1 - going.share) / going.share if going.share else None
    stage.report(f"{going.share:.0%}, {speed:.0f} tokens/s", left)


def written(done: Any) -> None:
    """The answers that a model wrote (a `Written`), and what comes next."""
    ui.say(
        f"{done.out}: {counted(done.texts, 'text')}, {counted(done.tokens, 'token')}, "
        f"{counted(done.cut, 'text')} cut at "
        f"--max-tokens, {done.drawn / done.seconds:.0f} tokens/s"
    )
    step = f"profile {ui.word(done.by)}" if done.is_relu else f"convert {ui.word(done.by)} RELU"
    ui.say(f"next: twellctl {step} --data {ui.word(done.out)}")


def drafting(stage: ui.Stage, done: int, total: int, loss: float, left: float | None) -> None:
    """How far the training of a draft head has come, after each step."""
    stage.report(f"step {done} of {total}, loss {loss:.3f}", left)


def drafted(done: Any, model: str) -> None:
    """A draft head (a `TrainedHead`) for `model`, what that would keep of its drafts, and what
    comes next."""
    ui.say(
        f"{done.out}: {done.num_parameters / 1e6:.1f} million parameters, guesses "
        f"{counted(done.vocabulary, 'token')}, trained on {counted(done.tokens, 'token')}, "
        f"read {counted(done.epochs, 'time')}, in {ui.duration(done.seconds)}"
    )
    depths = zip(done.kept.by_depth, done.kept.tokens_a_pass, strict=True)
    rows = [[str(n), f"{kept:.1%}", f"{given:.2f}"] for n, (kept, given) in enumerate(depths, 1)]
    title = f"on {counted(done.kept.tokens, 'token')} of held-out text"
    ui.table(title, ["draft", "kept, those before it kept", "tokens a pass, with so many"], rows)
    original = f" --original {ui.word(model)}" if done.source is None else ""
    ui.say(f"next: twellctl serve-local {ui.word(done.out)} --exact{original}")


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
    rate = result.tokens_per_second
    ui.say(
        f"about {ui.duration(result.seconds)} at {rate:.{'0f' if rate >= 10 else '2g'}} tokens/s"
        + (", by a guess, as a step takes too long to try" if result.is_guess else "")
        + ", evaluations and checkpoints not counted"
    )
    peak, total = (n / 2**30 for n in (result.peak_bytes, result.total_bytes))
    least = "at least " if result.is_guess else ""
    ui.say(f"{least}{peak:.1f} of {total:.1f} GiB of {result.memory}{_over_processes(result)}")
    for plan in result.on_several:
        ui.say(_on_several(plan))
    if result.checkpoint_bytes:
        size = result.checkpoint_bytes / 1e9
        ui.say(f"a checkpoint takes {size:.3g} GB on disk; two are kept, plus a third for a moment")
    if result.density is not None:
        shape = f"--config {ui.word(result.config)} --density {result.density:g}"
        ui.say(f"to measure its speed with random weights: twellctl bench decode {shape}")
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


def exported(result: Any) -> None:
    """What an `Exported` folder holds, and how it loads."""
    if result.class_name is None:
        scheme = result.scheme
        ui.say(f"{result.out}: the model in {scheme.title}, every neuron is computed")
        ui.say(f"transformers loads it with the package {scheme.package}")
    else:
        _over_twell(result)
    if result.over_twell_in_vllm:
        ui.say("vLLM serves it over TwELL where twellctl is installed, dense elsewhere")
    elif result.scheme is INT4:
        ui.say("vLLM serves it dense, by its own kernels for 4 bits")
    else:
        ui.say("vLLM serves it dense; if twellctl is installed, with --model-impl transformers")
    exact = ""
    if result.has_original:
        ui.say("it holds its original, too, whose answers it drafts with --exact")
        exact = " --exact"
    ui.say(f"next: twellctl generate {ui.word(result.out)} PROMPT{exact}")


def _over_twell(result: Any) -> None:
    """How the code in an export runs, and what it was written with."""
    low, high = min(result.slots), max(result.slots)
    slots = f"{low} to {high}" if low < high else f"{low}"
    how = "from the profile" if result.profiled else "no profile given"
    ui.say(f"{result.out}: {result.class_name}, tile {result.tile}, slots {slots} ({how})")
    ui.say(f"ReLU written as SiLU of sharpness {result.sharpness}: engines that know SiLU run it")
    if (scheme := result.scheme) is not None:
        ui.say(
            f"its linear layers are in {scheme.title}; from_pretrained(..., "
            "trust_remote_code=True) loads it, and"
        )
        ui.say(f"without it, transformers needs the package {scheme.package}")
    else:
        ui.say(
            "it runs over TwELL with from_pretrained(..., trust_remote_code=True), dense without"
        )


def quickstarted(result: Any, page: Path) -> None:
    """What changed in the whole job (a `QuickStarted`), and the `page` that shows it."""
    models = (
        ("SiLU, trained here", result.silu_loss, 1, result.out / "silu"),
        ("ReLU, converted", result.relu_loss, result.relu_density, result.out / "relu"),
        ("ReLU, fine-tuned and exported", result.sparse_loss, result.density, result.export),
    )
    rows = [[name, f"{loss:.3f}", f"{fires:.2%}", str(path)] for name, loss, fires, path in models]
    ui.say(f"the export writes: {result.text!r}")
    ui.say("(a model this small is still learning, and improves in fine-tuning; a real one loses)")
    ui.table("What changed", ["model", "held-out loss", "neurons firing", "folder"], rows)
    ui.say("(on held-out text; training steers what fires on its own text, which differs)")
    ui.say(f"next: open {page} in a browser; twellctl generate {ui.word(result.export)} 'def '")
