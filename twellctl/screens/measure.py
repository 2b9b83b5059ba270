"""What commands that measure say: profile, eval, compare. No torch."""

import math
from typing import Any

from rich.markup import escape

from twellctl.errors import bounded, counted
from twellctl.screens import ui

ABOVE = 3  # standard errors: a task that is not so far above what needs no model says nothing
LONGEST = 300  # characters of a question or an answer that is shown
BEFORE, AFTER = 60, 240  # characters, of the place where two answers part


def profiled(result: Any, checkpoint: Any) -> None:
    """The figures of a `Profile` of the `checkpoint`: a line a layer, a position and, of several, a
    kind of text."""
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
        f"{result.dead_fraction:.2%}; {counted(result.windows, 'window')} of "
        f"{result.seq_len} tokens"
    )
    note_overlap(result.distinct_tokens, result.tokens)
    ui.say(f"slots: places in a tile of {result.tile}; overflow: rows that would go to the backup")
    _densities("position", [(part.span, part) for part in result.by_position])
    if len(result.by_kind) > 1:
        _densities("kind of text", [(part.kind, part) for part in result.by_kind])
    if unseen := ", ".join(part.kind for part in result.by_kind if not part.tokens):
        ui.note(f"no window holds a token of {unseen}: raise --windows, or measure it alone")
    ui.note(of_profile(result, checkpoint))


def next_of_profile(result: Any, saved_as: Any) -> None:
    """What comes next, once the file `saved_as` is there."""
    if saved_as is not None:
        model, profile = map(ui.word, (result.model, saved_as))
        ui.say(f"next: twellctl export {model} OUT --profile {profile}")
    else:
        ui.say("next: the same with --json FILE, which twellctl export takes")


def note_overlap(text_tokens: int, tokens: int) -> None:
    """Note that windows overlap: they hold more `tokens` than the text has."""
    if text_tokens < tokens:
        ui.note(f"the text has {text_tokens} tokens: its windows overlap")


def _densities(what: str, parts: list[tuple[str, Any]]) -> None:
    """Named `PartDensity`s, a line each: means over the layers."""
    rows = [
        [escape(name), str(part.tokens), "-" if part.density is None else f"{part.density:.2%}"]
        for name, part in parts
    ]
    ui.table(f"density by {what}", [what, "tokens", "density"], rows)


def evaluated(result: Any) -> None:
    """The figures of an `Evaluation`, what users will notice first."""
    if result.verdict is not None:
        ui.say(f"{result.model}: {result.verdict}")
    if result.bytes_read is not None:
        ui.say(of_bytes(result.bytes_read, result.reference_bytes_read, "the reference"))
    if result.text is not None:
        _text(result)
    if result.answers is not None:
        answered(result.answers)
    if result.acceptance is not None:
        ui.say(
            f"acceptance: as a draft (--exact) it is right for {result.acceptance:.2%} of the "
            "reference's tokens, and for more where it reads the reference's keys and values, too"
        )
    if choices := [task for task in result.tasks if task.kind == "choices"]:
        _tasks(result, choices)
    if written := [task for task in result.tasks if task.kind != "choices"]:
        _written(result, written)


def of_bytes(own: int, other: int | None, which: str) -> str:
    """What a step of one token reads of weights, beside what another model reads."""
    said = f"a step of one token reads {own / 1e6:.1f} MB of linear layers in its blocks"
    if not other:
        return said
    return f"{said}, {own / other:.1%} of what {which} reads"


def answered(score: Any) -> None:
    """An `AnswerScore`."""
    error = "" if score.kl.stderr is None else f" +- {score.kl.stderr:.4f}"
    ui.say(
        f"on {counted(score.answers, 'answer')} of the reference, "
        f"{counted(score.tokens, 'token')}: KL "
        f"{score.kl.mean:.4f}{error}, one token in a hundred above {score.kl_p99:.3g}; same token "
        f"{score.same_top:.2%}; of {score.confident:.1%} the reference is sure, and of "
        f"{score.flips:.2%} it is and the model takes another"
    )
    ui.say(f"its own answers: {of_own(score)}")


def of_own(score: Any) -> str:
    """How the answers that both wrote by themselves compare, of an `AnswerScore`."""
    parted = score.part_after
    others = ""
    if parted is not None:
        others = f", the others part after {parted:g} token{'s' * (parted != 1)} (median)"
    return (
        f"{score.agree} of {score.answers} agree to the end{others}; {score.ended} end (the "
        f"reference's: {score.reference_ended}), {score.repeat} repeat ({score.reference_repeat})"
    )


def compared(result: Any) -> None:
    """A `Compared`: of each prompt where two answers part, and how each goes on."""
    if result.left_out:
        ui.note(f"{counted(result.left_out, 'prompt')} left out: the model's context is too short")
    for number, pair in enumerate(result.pairs, 1):
        ui.say(f"{number}. {in_a_line(pair.prompt)}")
        if pair.agrees:
            ui.say(
                f"   the same to the end, {counted(pair.tokens, 'token')}: {in_a_line(pair.common)}"
            )
            ui.say("")
            continue
        common = " ".join(pair.common.split())
        before = f", after ...{common[-BEFORE:]!r}" if common else ""
        ui.say(f"   the same for {counted(pair.tokens, 'token')}{before}")
        for name, rest, ended, repeats in zip(
            result.names, pair.rest, pair.ended, pair.repeats, strict=True
        ):
            end = " [repeats itself]" if repeats else "" if ended else " [cut]"
            ui.say(f"   {name}: {in_a_line(rest, AFTER) or '(ends here)'}{end}")
        ui.say("")
    answered(result.score)
    ui.say(f"{result.names[1]}: {result.score.verdict}")


def _written(result: Any, tasks: list[Any]) -> None:
    """Tasks in the model's own words, and the shortest ones that were lost."""
    rows = []
    for task in tasks:
        row = [task.task, str(task.questions), _percent(task.accuracy.acc)]
        if task.reference is not None:
            row += [_percent(task.reference.acc), _percent(task.difference.acc, "+")]
            row += [str(task.won), str(task.lost)]
        rows.append(row)
    columns = ["task", "questions", "right", "reference", "difference", "won", "lost"]
    ui.table(f"{result.model}: in its own words", columns[: len(rows[0])], rows)
    for task in tasks:
        if task.cut:
            ui.note(f"{task.task}: cut at their most tokens: {counted(task.cut, 'answer')}")
        for lost in task.lost_ones:
            ui.say(f"lost of {task.task}: {in_a_line(lost.question)}")
            ui.say(f"  reference: {in_a_line(lost.reference)}")
            ui.say(f"  this model: {in_a_line(lost.answer)}")


def in_a_line(text: str, longest: int = LONGEST) -> str:
    return bounded(" ".join(text.split()), longest)


def _text(result: Any) -> None:
    text = result.text
    columns = ["text", "tokens", "cross-entropy", "perplexity"]
    if result.reference is not None:
        columns += ["reference", "KL", "same top"]
    rows = [_score(part.kind, part) for part in text.by_kind] if len(text.by_kind) > 1 else []
    for row, part in zip(rows, text.density_by_kind, strict=False):
        row.append(_or_dash(part.density, "{:.2%}"))
    rows.append([*_score("all", text.score), f"{text.density:.2%}"])
    ui.table(
        f"{result.model}: {counted(text.windows, 'window')} of {text.seq_len} tokens",
        [*columns, "density"],
        [[cell for cell in row if cell is not None] for row in rows],
    )
    note_overlap(text.text_tokens, text.windows * text.seq_len)
    if text.density < 1:
        ui.say(f"density by layer: {', '.join(f'{d:.2%}' for d in text.density_by_layer)}")
    if result.reference is not None:
        ui.say(
            f"reference: {result.reference}; losses and KL(reference || model) in nats a token; "
            "same top: tokens with the same likeliest one"
        )


def _score(name: str, score: Any) -> list[str]:
    cells = [name, str(score.tokens), _or_dash(score.cross_entropy, "{:.4f}")]
    cells.append(_or_dash(score.perplexity, "{:.4g}"))
    if score.kl is not None:
        cells += [f"{score.reference_cross_entropy:.4f}", f"{score.kl:.4f}"]
        cells.append(f"{score.same_top:.2%}")
    return cells


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _tasks(result: Any, tasks: list[Any]) -> None:
    rows = []
    for task in (*tasks, *filter(None, [result.mean])):
        rows.append([task.task, str(task.questions), f"{task.chance:.1%}", *_cells(task.accuracy)])
        if task.reference is not None:
            rows.append(["  reference", "", "", *_cells(task.reference)])
            rows.append(["  difference", "", "", *_cells(task.difference, "+")])
    ui.table(
        f"{result.model}: right answers", ["task", "questions", "chance", "acc", "acc_norm"], rows
    )
    ui.say("acc: by likelihood; acc_norm: by likelihood per character; +- one standard error")
    for task in tasks:
        if task.cut:
            ui.note(
                f"{task.task}: {task.cut} of {task.questions} questions are longer than the "
                "model's context and lost their beginning"
            )
    if guessed := [task.task for task in tasks if _is_guessed(task)]:
        ui.note(f"no better than guessing, by {ABOVE} standard errors: {', '.join(guessed)}")


def _cells(accuracy: Any, sign: str = "") -> list[str]:
    return [_percent(mean, sign) for mean in (accuracy.acc, accuracy.acc_norm)]


def _percent(mean: Any, sign: str = "") -> str:
    if mean is None:
        return "-"
    error = f" +- {100 * mean.stderr:.1f}" if mean.stderr else ""  # none where all agree
    return f"{100 * mean.mean:{sign}.1f}{error}"


def _is_guessed(task: Any) -> bool:
    chance, means = task.chance, (task.accuracy.acc, task.accuracy.acc_norm)
    best = max(mean.mean for mean in means if mean is not None)
    return best - chance <= ABOVE * math.sqrt(chance * (1 - chance) / task.questions)
