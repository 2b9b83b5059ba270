"""What `twellctl profile` says."""

from typing import Any

from rich.markup import escape

from twellctl.screens import ui


def profiled(result: Any, saved_as: Any = None) -> None:
    """The figures of a `Profile`: a line a layer, a position and, of several, a kind of text."""
    from twellctl.screens.advice import of_profile  # that --help need not load it

    rows = []
    for number, layer in enumerate(result.layers):
        nnz = (f"{layer.nnz_mean:.1f}", layer.nnz_p50, layer.nnz_p99, layer.nnz_max)
        tiles = (layer.dead, layer.slots, f"{layer.overflow:.3%}")
        rows.append([str(cell) for cell in (number, *nnz, f"{layer.density:.2%}", *tiles)])
    title = f"{result.model}: neurons that fire, of {result.intermediate_size}"
    columns = "layer mean p50 p99 max density dead slots overflow"
    ui.table(title, columns.split(), rows)
    ui.say(
        f"mean {result.nnz_mean:.1f} a token, density {result.density:.2%}, dead "
        f"{result.dead_fraction:.2%}; {result.windows} windows of {result.seq_len} tokens"
    )
    note_overlap(result.distinct_tokens, result.tokens)
    ui.say(f"slots: places in a tile of {result.tile}; overflow: rows that would go to the backup")
    _densities("position", [(part.span, part) for part in result.by_position])
    if len(result.by_kind) > 1:
        _densities("kind of text", [(part.kind, part) for part in result.by_kind])
    if unseen := ", ".join(part.kind for part in result.by_kind if not part.tokens):
        ui.note(f"no window holds a token of {unseen}: raise --windows, or measure it alone")
    for said in of_profile(result):
        ui.note(said)
    if saved_as is not None:
        model, profile = map(ui.word, (result.model, saved_as))
        ui.say(f"next: twellctl export {model} OUT --profile {profile}")
    else:
        ui.say("next: the same with --json FILE, which twellctl export takes")


def note_overlap(text_tokens: int, tokens: int) -> None:
    """Of a text of so many tokens, whose windows hold so many."""
    if text_tokens < tokens:
        ui.note(f"the text has {text_tokens} tokens: its windows overlap")


def _densities(what: str, parts: list[tuple[str, Any]]) -> None:
    """Named `PartDensity`s, a line each: means over the layers."""
    rows = [
        [escape(name), str(part.tokens), "-" if part.density is None else f"{part.density:.2%}"]
        for name, part in parts
    ]
    ui.table(f"density by {what}", [what, "tokens", "density"], rows)
