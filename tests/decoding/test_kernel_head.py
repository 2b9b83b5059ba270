"""When the layer of a draft head goes in one kernel, and how its weights lie, without a GPU."""

from dataclasses import replace

import pytest
from launched import bf16
from played_kernels import H200

from twellctl.bundle.twell_few import few_dense_kernels
from twellctl.decoding.attention import AttendLayer, Rotary
from twellctl.decoding.kernel_head import KernelHead, step_sizes
from twellctl.heads.head import DraftHead, HeadSizes

QWEN = HeadSizes(1536, 8960, 12, 2, 128, 32768, 1e-6, qkv_bias=True)
LLAMA = HeadSizes(2048, 8192, 32, 8, 64, 32768, 1e-5)
WIDE = HeadSizes(3072, 9216, 12, 4, 256, 32768, 1e-6)  # heads that no kernel over e4m3 takes
AMPERE = replace(H200, capability=(8, 0))


class Prepared(list):
    """Stands for a KernelSet: the entries that were asked for."""

    def prepare(self, names) -> None:
        self.extend(names)


@pytest.mark.parametrize(
    ("sizes", "limits", "kind"),
    [
        (QWEN, H200, "e4m3"),
        (LLAMA, H200, "e4m3"),
        (WIDE, H200, "bf16"),
        (replace(QWEN, H=14, Hkv=2), H200, None),
        (replace(QWEN, K=896, H=14, D=64), H200, None),
        (QWEN, replace(H200, num_sms=80), None),
        (QWEN, AMPERE, None),
    ],
)
def test_which_layers_go_in_one_kernel(sizes, limits, kind):
    found = step_sizes(sizes, 151936, limits)
    assert (found and found.kind) == kind
    if found:
        assert (found.K, found.N, found.H, found.D) == (sizes.K, sizes.N, sizes.H, sizes.D)


@pytest.mark.parametrize(
    ("sizes", "limits", "step", "kind"),
    [
        (replace(QWEN, N=260), H200, "step_1536_128_dense_e4m3", "e4m3"),
        (replace(WIDE, N=256), H200, "step_3072_256_dense", "bf16"),
        (replace(QWEN, N=256), AMPERE, None, "e4m3"),
    ],
)
def test_its_weights_lie_once_in_memory(sizes, limits, step, kind):
    kernels, K = Prepared(), sizes.K
    rows, cached = bf16(300, K), bf16(2, sizes.Hkv, 64, sizes.D)
    last, rotary = AttendLayer(cached, cached, 1.0), Rotary(*bf16(2, 9, sizes.D), sizes.D)
    head = DraftHead(replace(sizes, V=40)).bfloat16().requires_grad_(False)
    made = KernelHead(head, kernels, limits, rows, rows, last, rotary, over=None)
    assert {name for name in kernels if name.startswith("step")} == ({step} if step else set())
    assert {"join_norms", *few_dense_kernels(limits, "e4m3")} <= set(kernels)
    ffn, down = made._layer.ffn, head.down.weight
    assert {made._layer.qkv.kind, made._layer.out.kind, ffn.kind, ffn.down.kind} == {kind}
    by_rows = ffn.down.values if step is None else ffn.by_neurons
    assert by_rows.is_contiguous()
    assert ffn.turned is None
    values = ffn.down.values.float() * (1 if ffn.down.scales is None else ffn.down.scales)
    assert (values - down).abs().max() <= down.abs().max() / 16
    assert made._rows.values.shape == (40, K)
    assert made._join.kind == made._rows.kind == "e4m3"
