"""The kernels for few tokens on a CPU, by emulated_kernels.py, and the GPU's tests of them."""

import re

from emulated_kernels import EmulatedKernels
from test_emulated_grad import on_cpu

from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_spec import E4M3_END, few_down_entries

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
        end = E4M3_END if name.endswith(E4M3_END) else ""
        sizes = few_down_entries(H200.capability, end).get(name)
        walk = re.match(r"few_walk_(\d)", name)
        cluster = sizes.blocks if sizes else int(walk[1]) if walk else 1
        super().launch(name, grid, block, args, smem_bytes, cluster=cluster)
