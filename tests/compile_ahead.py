"""All kernels for Hopper, compiled into TWELL_TEST_BUILDS before tests need them, without torch.

    python tests/compile_ahead.py           as tests without a GPU judge them
    python tests/compile_ahead.py whole     as tests/gpu runs them; on all processors

Builds are those of the NVRTC that is found first, and only where NVRTC has the same major and minor
version are they found again. To compile for a machine with another NVRTC, unpack the wheel of its
nvidia-cuda-nvrtc into a folder and put that folder first on PYTHONPATH.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from types import SimpleNamespace

sys.modules["torch"] = SimpleNamespace(version=SimpleNamespace(cuda=None))
from compiled import SOURCES, compiled, compiled_whole  # noqa: E402

names = [name for name in SOURCES if name.endswith(".cu")]
if sys.argv[1:] == ["whole"]:
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda name: compiled_whole(name, SOURCES, "sm_90a"), names))
else:
    for name in names:
        compiled(name, "sm_90a")
