"""Where the time of a step in one kernel goes: a layer's stages, by the clocks of all blocks."""

import torch
from torch import Tensor

from twellctl.bench.decode_results import Stage
from twellctl.bundle.twell_spec import PAGE, STEP_STAGES
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.whole_step import WholeStep

_STEPS = 8  # whose layers are averaged
_WARM_UPS = 20
# in which order a block has part in them; attention comes before what waits for it
_ORDER = [*STEP_STAGES[:3], "attention", *(s for s in STEP_STAGES[3:] if s != "attention")]


def measure_stages(decoder: Decoder, step: WholeStep, position: int) -> tuple[Stage, ...]:
    """Of steps of one row at `position`, whose cache is that of the last sequence."""
    device = decoder.device
    token, at = (torch.full((1, 1), n, dtype=torch.int32, device=device) for n in (1, position))
    pages = range(1, position // PAGE + 2)  # page 0 is nobody's
    table = torch.tensor([[*pages]], dtype=torch.int32, device=device)
    stamps = [step.new_stamps() for _ in range(_STEPS)]
    events = [torch.cuda.Event(enable_timing=True) for _ in stamps]
    for _ in range(_WARM_UPS):
        step(token, at, table)
    for event, clocks in zip(events, stamps, strict=True):
        event.record()
        step(token, at, table, stamps=clocks)
    torch.cuda.synchronize(device)
    us = 1000 * events[0].elapsed_time(events[-1])
    clocks_of_all = (stamps[-1][0, 0] - stamps[0][0, 0]).double().median().item()
    return stages_of(torch.stack(stamps).cpu(), clocks_of_all / us)


def stages_of(clocks: Tensor, clocks_a_us: float) -> tuple[Stage, ...]:
    """Of clocks int64 `[steps, L, len(STEP_STAGES), blocks]`, 0 where a block had no part."""
    by_name = {name: clocks[:, 1:, i] for i, name in enumerate(STEP_STAGES)}
    before = clocks[:, :-1, STEP_STAGES.index("their sum")]  # of the layer before
    stages = []
    for name in _ORDER:
        had_part = by_name[name] > 0
        if not had_part.any():
            continue
        took = (by_name[name] - before).double() / clocks_a_us
        took = took.masked_fill(~had_part, torch.nan).flatten(0, 1)  # [layers, blocks]
        by_block = took.nanmean(0)
        by_block = by_block[~by_block.isnan()]
        figures = by_block.mean(), by_block.min(), by_block.max()
        stages.append(Stage(name, *(figure.item() for figure in figures)))
        before = torch.where(had_part, by_name[name], before)
    return tuple(stages)
