"""What `twellctl convert` says: how far a fit has come, and what came of it."""

from typing import Any

from twellctl.screens import ui


def fitting(done: int, total: int, differ: float, left: float) -> None:
    """After each layer."""
    ui.doing(
        f"layer {done} of {total} fitted, hidden states differ by {differ:.3f}, "
        f"{ui.duration(left)} left"
    )


def converted(done: Any, model: str) -> None:
    """A `Converted`: what was made of `model`, and what comes next."""
    size = f"{done.num_layers} gated FFNs, {done.hidden_size} x {done.intermediate_size}"
    out = ui.word(done.out)
    if done.fitted is None:
        ui.say(f"{done.out}: {size}, {done.source_act} -> relu")
        write = f"twellctl write {ui.word(model)} own.jsonl --prompts FILE, then "
        fit = f"twellctl convert {ui.word(model)} {out} --overwrite --data"
        ui.note(
            "such a model talks noise until it is fitted or fine-tuned; to fit it: "
            + (f"{write}{fit} own.jsonl" if done.is_chat_model else f"{fit} FILE")
        )
        ui.say(f"next: twellctl finetune {out} OUT --recipe standard --data FILE")
        return
    fitted = done.fitted
    _layers(fitted)
    ui.say(
        f"{done.out}: {size} and a map of rank {fitted.map_neurons}, {done.source_act} -> relu, "
        f"fitted on {fitted.tokens} tokens in {ui.duration(fitted.seconds)}"
    )
    read = fitted.share_read(done.intermediate_size)
    ui.say(
        f"{fitted.density:.2%} of the neurons fire for a token; a step of one token reads "
        f"{read:.0%} of the weights that the FFNs had"
    )
    held = fitted.held_out
    ui.say(
        f"held-out text: KL to the source {held.kl:.4f}, same token {held.same_token:.2%}, "
        f"cross-entropy {held.cross_entropy:.4f} (source {held.source_cross_entropy:.4f})"
    )
    ui.say(f"next: twellctl finetune {out} OUT --recipe standard --data FILE, or profile {out}")


def _layers(fitted: Any) -> None:
    """Errors are shares of the squared output, the map's is its share of it."""
    rows = [
        [
            str(index),
            f"{layer.fires:.1%}",
            f"{layer.error_swapped:.2%}",
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
        f"{plan.intermediate_size} and a map of rank {plan.map_neurons}"
    )
    ui.say(
        f"about {ui.duration(plan.seconds)} on {plan.device}, {plan.bytes / 2**30:.1f} GiB of "
        f"its memory, {plan.host_bytes / 2**30:.1f} GiB of the host's"
    )
