"""The kernels for few tokens over e4m3 weights, emulated: what tests/gpu/test_few_e4m3.py asks."""

import re

import pytest
import torch
import torch.nn.functional as F
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator
from test_emulated_grad import asked, on_cpu

from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import few_down_entries
from twellctl.bundle.twell_weights import FFN, plain_weight
from twellctl.decoding.stable import STABLE_ROWS

pytestmark = needs_emulator


@pytest.fixture(scope="module")
def kernels():
    return FewKernels()


NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
SIZES = [*((M, 128, 8) for M in (1, 3, 8, 9)), (9, 2176, 136)]
# those of many tokens take long to compile
SIZES += [(17, 128, 8), (40, 128, 8), (17, 1024, 24)] if EVERY_CASE else []
ASKED = {
    "test_whole_numbers_are_exact": [
        *((*sizes, -1.0, bool(sizes[0] % 2)) for sizes in SIZES),
        *((M, 16384, 24, -1.0, True) for M in ((1, 16) if EVERY_CASE else (1,))),  # do not stay
    ],
    "test_numbers_err_as_bf16_rounds": [(1, 1024, 24), (12, 1024, 24)],
    "test_rows_of_any_size": [(1,), (8,), (16,)],
    "test_no_pairs_and_all_pairs": [(4, 128), *([(17, 264)] if EVERY_CASE else [])],
    "test_any_number_of_pairs": [(4, 1), (4, 129)],
    "test_pairs_of_rows_of_any_size": [(4,)],
    "test_rows_that_are_not_finite": [(9, bad) for bad in NOT_FINITE],
    "test_pairs_of_rows_that_are_not_finite": [(4, bad) for bad in NOT_FINITE],
}


@asked(ASKED)
def test_as_on_a_gpu(kernels, name, given):
    getattr(of_e4m3, name)(kernels, *given)


H200 = Limits(132, 232448, (9, 0))
of_e4m3 = on_cpu("test_few_e4m3")
of_e4m3.limits = lambda: H200


class FewKernels(EmulatedKernels):
    """Knows the clusters of few_down and few_walk, which are compiled in."""

    def clusters_at_once(self, name, cluster, block, smem_bytes):
        """As an H200 has them."""
        return 120 // cluster

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        """As `KernelSet.launch`; the kernel in front has always ended."""
        kind = "e4m3" if name.endswith("_e4m3") else "bf16"
        sizes = few_down_entries(H200.capability, kind).get(name)
        walk = re.match(r"few_walk_(\d)", name)
        cluster = sizes.blocks if sizes else int(walk[1]) if walk else 1
        super().launch(name, grid, block, args, smem_bytes, cluster=cluster)


@pytest.mark.parametrize("K", [576, 16384])  # whose x does not stay for more than a few tokens
def test_bits_of_a_token_do_not_depend_on_others(kernels, K):
    """What stable decoding rests on (twellctl/decoding/stable.py)."""
    tokens = (2, 12, STABLE_ROWS) if EVERY_CASE else (2, 12)
    torch.manual_seed(0)
    x = torch.randn(max(tokens), K).bfloat16()
    gate, up = (plain_weight(torch.randn(16, K).bfloat16() / 16) for _ in range(2))
    ffn = FFN(gate, up, plain_weight(torch.zeros(K, 16).bfloat16()))
    products = {
        "linear": lambda rows: few_linear(kernels, H200, rows, gate),
        "ahead": lambda rows: few_linear(kernels, H200, rows, gate, ahead=True),
        "logits": lambda rows: few_linear(kernels, H200, rows, gate, wide=True),
        "gated": lambda rows: few_gated(kernels, H200, rows, ffn),
        "gated by SiLU": lambda rows: few_gated(kernels, H200, rows, ffn, is_silu=True),
    }
    for name, product in products.items():
        alone = torch.cat([product(row[None]) for row in x])
        for count in tokens:
            assert torch.equal(product(x[:count]), alone[:count]), (name, count)


def test_silu_in_the_place_of_relu(kernels):
    """As torch has it in bf16, also of gates that are far from 0, or no numbers."""
    torch.manual_seed(0)
    x = torch.randn(9, 576).bfloat16()
    gate, up = (plain_weight(torch.randn(24, 576).bfloat16() / 16) for _ in range(2))
    bias = torch.tensor([300.0, -300.0, torch.inf, -torch.inf, torch.nan, -90.0, 90.0, -1e30])
    gate = plain_weight(gate.values, torch.cat([bias, torch.zeros(16)]).bfloat16())
    ffn = FFN(gate, up, plain_weight(torch.zeros(576, 24).bfloat16()))
    found = few_gated(kernels, H200, x, ffn, is_silu=True)
    products = [
        (x.double() @ weight.values.double().t()).float().add(0 if b is None else b.float())
        for weight, b in ((gate, gate.bias), (up, None))
    ]
    of_gate, of_up = (product.bfloat16() for product in products)
    torch.testing.assert_close(
        found, F.silu(of_gate) * of_up, rtol=2**-6, atol=1e-3, equal_nan=True
    )
