"""The screen: tables and results to stdout, errors and progress to stderr. No torch."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from twellctl.errors import TwellError, printable
from twellctl.screens.activity import Activity

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)
activity = Activity(stderr)
_ANY_WIDTH = 100_000


def be_quiet() -> None:
    """From now on stderr has errors only: no notes, no progress."""
    stderr.quiet = True


def write_any_text() -> None:
    """From now on stdout has a ? for what its encoding lacks, as stderr has an escape of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where it was closed
        sys.stdout.reconfigure(errors="replace")


def doing(text: str) -> None:
    """What the command does from now on, until it says something on stdout or does another."""
    activity.now(printable(text))


def say(text: str) -> None:
    """One line of result."""
    activity.over()
    stdout.print(printable(text), markup=False, soft_wrap=True)


def note(text: str) -> None:
    """One line beside the result, on stderr."""
    stderr.print(printable(text), markup=False, soft_wrap=True)


def fail(text: str) -> None:
    """The one line of an error, also with --quiet."""
    activity.over()
    stderr.quiet = False
    note(f"error: {text}")


def duration(seconds: float) -> str:
    """As people say it: "45 s", "3 min 20 s", "1 h 03 min", "10 d 2 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def read_stdin() -> str:
    """All of stdin, less the newline at its end. `TwellError` if it is no text."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise TwellError(f"stdin is not UTF-8 (byte {error.start}): convert it") from error


def stream(pieces: Iterable[str]) -> None:
    """Text as it comes, to stdout, nothing added but a newline at the end."""
    some = False
    try:
        for piece in pieces:
            activity.over()
            some = True
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        if some:
            sys.stdout.write("\n")
            sys.stdout.flush()


def generated(figures: Any) -> None:
    """What a generation has done (a `Figures`), on stderr; nothing if nothing came."""
    if not figures.tokens:
        return
    parts = [f"{figures.prompt_tokens} + {figures.tokens} tokens"]
    parts.append(f"the first after {figures.first_seconds:.2f} s")
    if figures.tokens_per_second is not None:
        parts.append(f"then {figures.tokens_per_second:.1f} tokens/s")
    if figures.density is not None:
        parts.append(f"{figures.density:.2%} of the neurons fired")
    if figures.cut:
        parts.append("cut at --max-tokens")
    note(", ".join(parts))


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose first column is text, which folds, and whose others are numbers, kept whole."""
    made = Table(
        title=escape(printable(title)), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    rows = [list(map(printable, row)) for row in rows]
    for number, column in enumerate(columns):
        figures = [row[number] for row in rows]
        whole = max(map(cell_len, [*column.split(), *figures]), default=0)
        how = {"justify": "right", "min_width": whole} if number else {}
        made.add_column(column, overflow="fold", **how)
    for row in rows:
        made.add_row(*row)
    activity.over()
    if not stdout.is_terminal:  # there a line may be of any length
        options = stdout.options.update(max_width=_ANY_WIDTH)
        made.width = Measurement.get(stdout, options, made).maximum
    stdout.print(made, crop=False)


def finetuned(result: Any) -> None:
    """What a fine-tuning run ended with (a `FineTuned`)."""
    from twellctl.report.advice import of_run  # no page is drawn for --help
    from twellctl.report.of_run import RUN_PAGE

    for sentence in of_run(dataclasses.asdict(result)):
        note(sentence)
    losses = {
        "teacher": result.teacher_cross_entropy,
        "before": result.first_cross_entropy,
        "after": result.cross_entropy,
    }
    held_out = ", ".join(f"{k} {v:.4f}" for k, v in losses.items() if v is not None)
    where = "held-out text" if result.cross_entropy is not None else "the last step"
    density = f"density {result.density:.2%} after {result.num_tokens} tokens"
    say(f"{result.out}: {density}, measured on {where}")
    say(f"by layer: {', '.join(f'{d:.2%}' for d in result.density_by_layer)}")
    if held_out:
        kl = "" if result.teacher_kl is None else f"; KL to the teacher {result.teacher_kl:.4f}"
        say(f"held-out cross-entropy: {held_out}{kl}")
    if (page := result.out / RUN_PAGE).is_file():
        say(f"the run as a page: {page}")
    say(f"next: twellctl profile {result.out} --data FILE")


def dry_run(result: Any, changes: str) -> None:
    """What a fine-tuning run would take (a `DryRun`); `changes` as flags."""
    again = f", the text about {result.passes:.1f} times" if result.passes > 1.05 else ""
    tokens = f"{result.num_tokens} tokens{again}"
    say(f"{result.num_steps} steps, {tokens}, {result.num_trained} parameters")
    say(
        f"about {duration(result.seconds)} at {result.tokens_per_second:.0f} tokens/s, "
        "evaluations and checkpoints not counted"
    )
    peak, total = (n / 2**30 for n in (result.peak_bytes, result.total_bytes))
    say(f"{peak:.1f} of {total:.1f} GiB of {result.memory}{_over_processes(result)}")
    for plan in result.on_several:
        say(_on_several(plan))
    _loss_to_expect(result)
    _speed_to_expect(result.speed)
    if result.checkpoint_bytes:
        size = result.checkpoint_bytes / 1e9
        say(f"a checkpoint takes {size:.3g} GB on disk; two are kept, a third is there for moments")
    if changes:
        raise TwellError(f"it does not fit in {result.memory} as asked; with {changes} it does")


def _loss_to_expect(result: Any) -> None:
    """Of a `DryRun`: its `LossOutlook`, or why there is none."""
    if result.loss is None:
        say(f"no loss over SiLU is predicted: {result.without_loss}")
        return
    expected = result.loss.expected
    told = f"loss over SiLU to expect at {expected.density:.2%}"
    if expected.outside:
        beyond = f"extrapolated: {', '.join(expected.outside)}; its error is not known"
        say(f"{told}: about {expected.nats:+.3f} nats a token, {beyond}")
    else:
        figures = f"{expected.nats:+.3f} +- {expected.error:.3f} nats a token"
        say(f"{told}: {figures}, by two small models' text; kinds of text differ by more")
    if others := result.loss.others:
        note = " (~: extrapolated)" if any(one.outside for one in others) else ""
        say(f"other runs: {', '.join(map(_in_short, others))}{note}")


def _in_short(loss: Any) -> str:
    """An `ExpectedLoss`, like "3.00% with 80 million tokens +0.040"."""
    nats = f"{'~' if loss.outside else ''}{loss.nats:+.3f}"
    return f"{loss.density:.2%} with {loss.tokens / 1e6:.3g} million tokens {nats}"


def _speed_to_expect(speed: Any) -> None:
    """An `ExpectedSpeed`; None says nothing."""
    if speed is None:
        return
    if speed.speedups:
        ratios = ", ".join(f"{one.over_dense:.2f}x ({one.work})" for one in speed.speedups)
        say(f"speed over dense to expect on this GPU, by random weights: {ratios}")
    for reason in speed.missing:
        say(f"speed over dense, not measured: {reason}")


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


def profiled(result: Any, saved_as: Any = None) -> None:
    """The figures of a `Profile`: a line a layer, a position and, of several, a kind of text."""
    rows = []
    for number, layer in enumerate(result.layers):
        nnz = (f"{layer.nnz_mean:.1f}", layer.nnz_p50, layer.nnz_p99, layer.nnz_max)
        tiles = (layer.dead, layer.slots, f"{layer.overflow:.3%}")
        rows.append([str(cell) for cell in (number, *nnz, f"{layer.density:.2%}", *tiles)])
    title = f"{result.model}: neurons that fire, of {result.intermediate_size}"
    columns = "layer mean p50 p99 max density dead slots overflow"
    table(title, columns.split(), rows)
    say(
        f"mean {result.nnz_mean:.1f} a token, density {result.density:.2%}, dead "
        f"{result.dead_fraction:.2%}; {result.windows} windows of {result.seq_len} tokens"
    )
    say(f"slots: places in a tile of {result.tile}; overflow: rows that would go to the backup")
    if result.loss is not None:
        error = "" if result.loss_error is None else f" +- {result.loss_error:.4f}"
        say(f"cross-entropy {result.loss:.4f}{error} nats a token")
    _densities("position", [(_positions(part), part) for part in result.by_position])
    if len(result.by_kind) > 1:
        _densities("kind of text", [(part.kind, part) for part in result.by_kind])
    if unseen := ", ".join(part.kind for part in result.by_kind if not part.tokens):
        note(f"no window holds a token of {unseen}: raise --windows, or measure it alone")
    _speed(result)
    if saved_as is not None:
        say(f"next: twellctl export {result.model} OUT --profile {saved_as}")
    else:
        say("next: the same with --json FILE, which twellctl export takes")


def _speed(result: Any) -> None:
    """What the timing of a `Profile` found, if it was asked for."""
    if result.speed is not None:
        speedups = [layer.speedup for layer in result.speed.layers]
        say(
            f"over TwELL all FFNs are {result.speed.speedup:.2f} times as fast as dense ones, by "
            f"layer {min(speedups):.2f} to {max(speedups):.2f}, and with the faster of the two in "
            f"each layer {result.speed.best_speedup:.2f} times, at {result.speed.tokens} tokens"
        )
        if (found := result.speed_correlation) is not None:
            say(f"correlation of neurons that fire and speed-up, by layer: {found:.3f}")
    if result.without_speed:
        note(f"the FFNs were not timed: {result.without_speed}")


def _positions(part: Any) -> str:
    return str(part.first) if part.first == part.last else f"{part.first}-{part.last}"


def _densities(what: str, parts: list[tuple[str, Any]]) -> None:
    """Named `PartDensity`s, a line each: means over the layers."""
    rows = [
        [escape(name), str(part.tokens), "-" if part.density is None else f"{part.density:.2%}"]
        for name, part in parts
    ]
    table(f"density by {what}", [what, "tokens", "density"], rows)


def exported(result: Any) -> None:
    """What an `Exported` folder holds, and how it loads."""
    low, high = min(result.slots), max(result.slots)
    slots = f"{low} to {high}" if low < high else f"{low}"
    how = "from the profile" if result.profiled else "no profile given"
    say(f"{result.out}: {result.class_name}, tile {result.tile}, slots {slots} ({how})")
    if result.quantize == "fp8":
        say("its linear layers are FP8; from_pretrained(..., trust_remote_code=True) loads it, and")
        say("without that transformers needs the package compressed-tensors")
    else:
        say("it runs over TwELL with from_pretrained(..., trust_remote_code=True), dense without")
    if result.over_twell_in_vllm:
        say("vLLM serves it over TwELL where twellctl is installed, dense with")
        say("--model-impl transformers")
    else:
        say("vLLM serves it dense, with --model-impl transformers")
    say(f"next: twellctl generate {result.out} PROMPT")
    note(
        "beware: llama.cpp and mlx-lm run Llama models with SiLU, whatever hidden_act says, and so "
        "this one wrongly; SGLang and vLLM's own classes refuse ReLU"
    )


def diagnosed(result: Any) -> None:
    """The findings of a `Diagnosis`, each with what to do about it."""
    for finding in (*result.machine, *result.folder):
        say(f"{finding.state:5}{finding.name:12}{finding.what}")
        if finding.advice:
            say(f"{'':17}-> {finding.advice}")


def stages() -> tuple[Callable[[str], None], Callable[[int, int], None]]:
    """(`begin(text)`, `show(done, total)`): what comes next, and how far it has come."""
    begun = [""]

    def begin(text: str) -> None:
        begun[0] = text
        doing(text)

    def show(done: int, total: int) -> None:
        if stderr.is_terminal:  # elsewhere each text is a line of its own
            doing(f"{begun[0]}: {done} of {total}")

    return begin, show


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """Yield `show(done, total, what)`: a bar on stderr, nothing off a terminal."""
    from rich.progress import Progress

    activity.over()
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(what)

        def show(done: int, total: int, what: str = what) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def quickstarted(result: Any) -> None:
    """What changed in the whole job (a `QuickStarted`)."""
    rows = [
        ["SiLU, trained here", f"{result.silu_loss:.3f}", "100.00%", str(result.out / "silu")],
        ["ReLU, converted", f"{result.relu_loss:.3f}", "-", str(result.out / "relu")],
        [
            "ReLU, fine-tuned and exported",
            f"{result.sparse_loss:.3f}",
            f"{result.density:.2%}",
            str(result.export),
        ],
    ]
    say(f"the export writes: {result.text!r}")
    say(
        "(so small a model is still learning, and goes on while it is fine-tuned; a real one loses)"
    )
    table("What changed", ["model", "held-out loss", "neurons firing", "folder"], rows)
    say(f"next: twellctl generate {result.export} 'def '")
