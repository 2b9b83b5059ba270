"""What stable decoding rests on: sums whose order does not depend on who is beside."""

from itertools import product

import pytest

from twellctl.bundle.twell_spec import FEW_OCTETS, few_entries
from twellctl.decoding.attention import batch_positions, plan_alike
from twellctl.decoding.stable import STABLE_ROWS

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("family", ["few_linear", "few_gated"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_products_of_a_stable_pass_have_slabs_of_one_size(family, capability):
    """A warp adds up slab by slab, whatever its stages, passes and tokens."""
    entries = few_entries(family, capability, "bf16").values()
    assert {sizes.octets for sizes in entries} == set(FEW_OCTETS)
    assert {sizes.halves for sizes in entries if 8 * sizes.octets <= STABLE_ROWS} == {2}


def parts_of(plan, position: int) -> tuple[int, int]:
    """How many splits share the positions up to `position`, and warps in each (attend_job.cuh)."""
    batches = position // batch_positions(plan.D) + 1
    if plan.splits == 1 or batches <= plan.num_warps * plan.whole_batches:
        return 1, plan.num_warps
    of_split = plan.num_warps * plan.split_batches
    return min(-(-batches // of_split), plan.splits), plan.num_warps


@pytest.mark.parametrize(
    "heads", [(12, 2, 128), (32, 8, 128), (32, 32, 64), (8, 1, 256), (9, 3, 96)]
)
@pytest.mark.parametrize("longest", [2048, 32768, 131072])
def test_attention_is_split_by_positions_alone(heads, longest):
    for position in (0, 63, 500, 2047, longest // 3, longest - 1):
        found = set()
        for B, Q in product((1, 3, 8, 32), (1, 4, 8)):
            for width in (1024, 4096, longest):
                if position < width <= longest:
                    plan = plan_alike(B, *heads, width, 132, Q, longest=longest)
                    assert (plan.B, plan.queries) == (B, Q)
                    found.add(parts_of(plan, position))
        assert len(found) == 1


def test_blocks_have_fewer_heads_while_there_are_multiprocessors_for_them():
    """Of heads of 128 over 1,024 positions: four splits."""
    sizes = {"D": 128, "max_positions": 1024, "num_sms": 132, "longest": 32768}
    small = [plan_alike(1, 12, 2, queries=Q, **sizes) for Q in (1, 2, 4, 8, 16)]
    assert [plan.heads for plan in small] == [1, 1, 2, 4, 4]
    assert {plan.splits for plan in small} == {4}
    large = [plan_alike(1, 32, 8, queries=Q, **sizes) for Q in (1, 2, 4)]
    assert [plan.heads for plan in large] == [1, 2, 4]
    alone = plan_alike(1, 32, 32, queries=1, **sizes)
    assert alone.heads == 1
