"""Which way passes over each number of tokens go, measured when a decoder is attached.

They are measured on a text that the model draws itself, of which a pass over n tokens reads the
first n at once: each a row of its own, that attends to what is before it. All of it lies in page 0,
which is nobody's. Each way is a CUDA graph here, as it is in the engine, so that the host's time
does not count.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from twellctl.bundle.twell_choice import (
    WayPlan,
    density_bucket,
    measure_by_turns,
    measured_plan,
)
from twellctl.bundle.twell_spec import PAGE
from twellctl.here.captures import without_collection

logger = logging.getLogger(__name__)
Pass = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # as of KernelDecoder.ways


def plan_steps(
    ways: Callable[[int], Mapping[str, Pass]],
    tops: Sequence[int],
    device: torch.device,
    vocab_size: int,
    width: int,
    *,
    key: str,
    neurons: int,
    density: float | None,
) -> WayPlan:
    """The fastest of `ways(n)` for passes over up to n tokens, n of `tops`, and where others begin.

    The first of them where nothing can be measured, or there is one alone. `width` of tables. `key`
    names the model and its kernels; each of its FFNs has `neurons`, of which `density` fires by a
    profile; None: it is counted.
    """
    taken = {n: list(ways(n)) for n in range(1, max(tops) + 1)}
    borders = {n for n in taken if n + 1 in taken and taken[n] != taken[n + 1]}
    names = {top: taken[top] for top in sorted({*tops, *borders})}
    measured = [top for top, of_top in names.items() if len(of_top) > 1]
    if not can_measure(device) or not measured:
        return WayPlan.of(names, lambda top: names[top][0])
    text, counts = draw_text(next(iter(ways(1).values())), max(measured), vocab_size, width, device)
    if density is None:
        density = counts.float().mean().item() / neurons

    def measure(top: int) -> dict[str, float]:
        inputs = rows_of(text[:top], width)
        runs = {name: partial(run, *inputs) for name, run in ways(top).items()}
        times = measure_by_turns(runs, capture_in(torch.cuda.graph_pool_handle()))
        of_each = ", ".join(f"{name} {time:.3f}" for name, time in times.items())
        logger.info("steps of %d tokens take, in ms: %s", top, of_each)
        return times

    named = f"step {torch.cuda.get_device_name(device)} {key} density={density_bucket(density)}"
    return measured_plan(named, names, measure)


def draw_text(
    run: Pass, length: int, vocab_size: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """int32 `[length]` tokens that the model draws, the first at random, and what `run` counted at
    the last one. `run`: a pass over one token. `length` up to PAGE."""
    if length > PAGE:
        raise ValueError(f"one page holds {PAGE} tokens, got {length}")
    generator = torch.Generator(device).manual_seed(0)
    text = torch.randint(vocab_size, (1,), generator=generator, device=device)
    while True:
        position = len(text) - 1
        tokens, positions, tables = rows_of(text, width)
        logits, counts = run(tokens[position:], positions[position:], tables[position:])
        if len(text) == length:
            return text.int(), counts
        shares = logits[0].float().softmax(-1).nan_to_num(1.0)
        text = torch.cat([text, torch.multinomial(shares, 1, generator=generator)])


def rows_of(text: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions `[n, 1]` and tables `[n, width]` of a text, a row each of its tokens."""
    positions = torch.arange(len(text), dtype=torch.int32, device=text.device)
    tables = torch.zeros(len(text), width, dtype=torch.int32, device=text.device)
    return text.int()[:, None], positions[:, None], tables


def can_measure(device: torch.device) -> bool:
    """Whether times can be taken now: on a GPU, and not in the midst of a capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def capture_in(pool: object) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """What makes of a run the replay of its CUDA graph, with memory of `pool`."""
    stream = torch.cuda.Stream()

    def captured(run: Callable[[], object]) -> Callable[[], object]:
        run()  # loads what it needs
        graph = torch.cuda.CUDAGraph()
        how = {"capture_error_mode": "thread_local"}
        with without_collection(), torch.cuda.graph(graph, pool, stream, **how):
            run()
        return graph.replay

    return captured
