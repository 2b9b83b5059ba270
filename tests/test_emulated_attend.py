"""`attend` and the norms, emulated: what tests/gpu/test_attend.py asks, of rows that stay whole."""

import pytest
from emulated_kernels import EmulatedKernels, needs_emulator
from test_emulated_grad import on_cpu

pytestmark = needs_emulator
of_gpu = on_cpu("test_attend")


class Kernels(EmulatedKernels):
    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        """As `KernelSet.launch`; the kernel in front has always ended."""
        assert grid[2:] in ((), (1,))
        super().launch(name, grid[:2], block, args, smem_bytes)


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
    of_gpu.check_attend(Kernels(), heads, [0, 15, 64, 77], splits=1, **how)


def test_norms():
    of_gpu.test_norms(Kernels(), 2, 264)
    of_gpu.test_a_norm_that_is_added(Kernels(), 264)
    of_gpu.test_a_norm_of_a_part_of_rows(Kernels())
    of_gpu.test_embeddings_and_their_norm(Kernels(), 264)
