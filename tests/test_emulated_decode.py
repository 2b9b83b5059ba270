"""`attend`, the norms and the end of a round, emulated: what tests/gpu/ asks of them."""

from collections.abc import Iterator

import pytest
import torch
from emulated_kernels import EmulatedKernels, needs_emulator
from test_emulated_grad import on_cpu

from twellctl.bundle.twell_spec import PAGE

pytestmark = needs_emulator


def stored_heads(args) -> Iterator[torch.Tensor]:
    """What `store_keys` writes for an `attend` with these arguments, each head by itself."""
    for position, table in zip(args["positions"].tolist(), args["tables"].tolist(), strict=True):
        if position >= 0:
            page, slot = table[position // PAGE], position % PAGE
            yield from (*args["keys"][page, :, slot], *args["values"][page, :, slot])


class Kernels(EmulatedKernels):
    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        """As `KernelSet.launch`; the kernel in front has ended, but `store_keys`."""
        assert grid[2:] in ((), (1,))
        stored = stored_heads(args) if args.get("new_is_cached") else ()
        super().launch(name, grid[:2], block, args, smem_bytes, from_previous=stored)


# ---- `attend`, of rows that stay whole


of_attend = on_cpu("test_attend")


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        ((4, 2, 64), {"turned": 48}),
        ((7, 1, 38), {"normed": True}),
        ((4, 2, 100), {"window": 33}),
        ((2, 1, 128), {"cap": 2.0, "turned": 96}),
        ((4, 2, 256), {"normed": True}),
    ],
    ids=str,
)
def test_heads(heads, how):
    of_attend.check_attend(Kernels(), heads, [0, 15, 64, 77], splits=1, **how)


@pytest.mark.parametrize(
    ("heads", "spans", "how"),
    [
        ((4, 2, 64), [(14, 5), (62, 3), (0, 1)], {"turned": 48}),
        ((7, 1, 38), [(0, 3), (30, 2)], {"normed": True, "cap": 2.0}),
        ((2, 1, 100), [(5, 16)], {"window": 9}),
        ((2, 1, 128), [(77, 2), (60, 2)], {"window": 33, "turned": 96}),
        ((2, 1, 256), [(63, 3)], {"normed": True}),
        ((2, 1, 128), [(15, 16)], {}),  # the last one's first batch ends 15 positions before it
    ],
    ids=str,
)
def test_heads_of_several_tokens(heads, spans, how):
    of_attend.check_queries(Kernels(), heads, spans, splits=1, **how)


# ---- the norms


of_norms = on_cpu("test_norms")


def test_norms():
    of_norms.test_norms(Kernels(), 2, 264)
    of_norms.test_a_norm_that_is_added(Kernels(), 264)
    of_norms.test_a_norm_of_a_part_of_rows(Kernels())
    of_norms.test_embeddings_and_their_norm(Kernels(), 264)
    of_norms.test_norms_that_are_joined(Kernels(), 264)
    of_norms.test_a_state_that_is_found_by_its_position(Kernels(), 16)


# ---- the end of a round, of few logits


of_end = on_cpu("test_step_end")


@pytest.mark.parametrize("V", [4, 1021])
def test_the_end_of_a_round(V):
    of_end.test_what_torch_would_choose(Kernels(), 3, V, False)
    of_end.test_what_torch_would_keep_of_a_round(Kernels(), 3, 5, V, False)
    of_end.test_of_some_tokens_what_is_chosen_of_all(Kernels(), V, False)


def test_records_of_a_round():
    of_end.test_records_go_by_turns(Kernels())
    of_end.test_of_several_the_first_and_nan_before_all(Kernels())
