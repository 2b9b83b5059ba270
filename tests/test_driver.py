"""Launches: CUDA's structs byte for byte as the driver gets them, and which launches overlap."""

import ctypes
import struct
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from twellctl.bundle import twell_launch
from twellctl.bundle.twell_launch import TENSOR_MAP, KernelSet, clusters_at_once, start
from twellctl.bundle.twell_nvrtc import Cubin, KernelError
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_signatures import Signature, signature_of

# cuda.h: grid and block (three unsigned each), sharedMemBytes, hStream, attrs, numAttrs
CONFIG = struct.Struct("@7I P P I 4x")
# an id, padding up to 8 bytes, a union of 64 bytes that begins with the one int that is used
ATTRIBUTE = struct.Struct("@i 4x i 60x")
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
ANSWER = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Driver:
    """Stands for cuLaunchKernelEx: reads what it is given as the driver does."""

    def __init__(self, formats: Sequence[str], answer: int = 0):
        self.formats, self.answer = formats, answer
        self.calls: list[tuple] = []

    def launch(self, config: int, function: int, values: int, extra: int | None) -> int:
        *sizes, stream, attributes, num = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        count = len(self.formats)
        pointers = struct.unpack(f"@{count}P", ctypes.string_at(values, 8 * count))
        args = [
            struct.unpack(kind, ctypes.string_at(at, struct.calcsize(kind)))[0]
            for kind, at in zip(self.formats, pointers, strict=True)
        ]
        each = [*ATTRIBUTE.iter_unpack(ctypes.string_at(attributes, num * ATTRIBUTE.size))]
        self.calls.append((sizes, stream, each, function, args, extra))
        return self.answer


@pytest.fixture
def driver(monkeypatch):
    """`driver(formats of the arguments, answer)` puts a stand-in in the driver's place."""

    def put(formats: Sequence[str], answer: int = 0) -> Driver:
        made = Driver(formats, answer)
        called = ANSWER(made.launch)
        monkeypatch.setattr(twell_launch, "_launch_kernel", lambda: called)
        return made

    return put


TAKEN = (
    'extern "C" __global__ void k(const float* x, uint4* y, int n, long long far, float share) {'
)
SIGNATURE = signature_of("k", [TAKEN.encode()])
ONE_INT = Signature("k", ("n",), ("int",))


def test_the_structs_are_cudas():
    config, attribute = twell_launch._CONFIG, twell_launch._Attribute
    assert (config.size, config.format) == (56, CONFIG.format)
    assert ctypes.sizeof(attribute) == ATTRIBUTE.size == 72
    assert (attribute.id.offset, attribute.value.offset) == (0, 8)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, []),
        ({"overlap": True}, [(PROGRAMMATIC_STREAM_SERIALIZATION, 1)]),
        ({"together": True}, [(COOPERATIVE, 1)]),
    ],
)
def test_what_the_driver_gets(driver, how, wanted):
    made, x = driver("PPiqf"), torch.zeros(3)
    for count, grid in enumerate(((132,), (7, 8), (7, 8, 9))):
        args = {"share": 0.25, "n": -5 - count, "far": -(2**40), "y": None, "x": x[count:]}
        start(2**62, grid, 256, SIGNATURE, args, 100_000, 0x7F00_0000_1234, **how)
        sizes, stream, attributes, function, found, extra = made.calls[-1]
        assert sizes == [*grid, *(1,) * (3 - len(grid)), 256, 1, 1, 100_000]
        assert stream == 0x7F00_0000_1234
        assert attributes == wanted
        assert function == 2**62
        assert found == [x.data_ptr() + 4 * count, 0, -5 - count, -(2**40), 0.25]
        assert extra is None


def test_parameters_of_a_model_are_tensors(driver):
    made, weight = driver("P"), torch.nn.Parameter(torch.zeros(3))
    start(1, (1,), 64, Signature("k", ("w",), ("float *",)), {"w": weight}, 0, 0)
    assert made.calls[0][4] == [weight.data_ptr()]


def test_the_default_stream_and_a_refusal(driver):
    made = driver("i", answer=701)
    with pytest.raises(KernelError, match=r"^cuLaunchKernelEx answers 701 for a grid of \(3, 2\)$"):
        start(1, (3, 2), 64, ONE_INT, {"n": 1}, 0, 0)
    assert made.calls[0][1] is None or made.calls[0][1] == 0


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    made, asked = driver("i", answer=201), []

    def bind():
        asked.append(made.calls[:])
        made.answer = 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", bind)
    start(1, (3, 2), 64, ONE_INT, {"n": 1}, 0, 0)
    assert (len(asked), len(made.calls)) == (1, 2)
    assert made.calls[0] == made.calls[1]


def test_a_tensor_map_goes_by_value(driver):
    made = driver(("128s", "i"))
    words = np.arange(16, dtype=np.uint64)
    taken = Signature("k", ("x_map", "n"), ("TensorMap", "int"))
    start(1, (3,), 64, taken, {"x_map": words.view(TENSOR_MAP)[0], "n": 7}, 0, 0)
    assert made.calls[0][4] == [words.tobytes(), 7]


@pytest.mark.parametrize("wrong", ["7", 7.0, None, 2**31])
def test_what_is_no_argument_is_refused(driver, wrong):
    made = driver("i")
    with pytest.raises(struct.error):
        start(1, (3,), 64, ONE_INT, {"n": wrong}, 0, 0)
    assert not made.calls


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("x y n far", "kernel k needs share"),
        ("x y n far share much", "kernel k takes no much"),
        ("x y m far", "kernel k needs n, share and takes no m"),
    ],
)
def test_other_names_than_the_kernels_are_refused(driver, names, said):
    made = driver("PPiqf")
    with pytest.raises(TypeError, match=f"^{said}$"):
        start(1, (3,), 64, SIGNATURE, dict.fromkeys(names.split()), 0, 0)
    assert not made.calls


def test_threads_do_not_meet(driver, monkeypatch):
    """Each has arguments of its own, also while another is in the midst of a launch."""
    made, inner = driver("i"), []

    def meanwhile(*call):
        if not inner:
            inner.append(
                threading.Thread(target=start, args=(1, (2,), 64, ONE_INT, {"n": 8}, 0, 0))
            )
            inner[0].start()
            inner[0].join()
        return made.launch(*call)

    called = ANSWER(meanwhile)
    monkeypatch.setattr(twell_launch, "_launch_kernel", lambda: called)
    start(1, (1,), 64, ONE_INT, {"n": 7}, 0, 0)
    assert [(sizes[0], found) for sizes, *_, found, _ in made.calls] == [(2, [8]), (1, [7])]


# ---- clusters ----


def test_how_many_clusters_run_at_the_same_time(monkeypatch):
    asked = []

    def answer(num, function, config):
        *sizes, _, attributes, _ = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        asked.append((sizes, function, struct.unpack("@i 4x 3i", ctypes.string_at(attributes, 20))))
        ctypes.c_int.from_address(num).value = 30
        return len(asked) // 2  # the second time an error

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    called = kind(answer)
    monkeypatch.setattr(twell_launch, "_max_active_clusters", lambda: called)
    assert clusters_at_once(2**62, 4, 256, 100_000) == 30
    assert asked == [([4, 1, 1, 256, 1, 1, 100_000], 2**62, (CLUSTER_DIMENSION, 4, 1, 1))]
    with pytest.raises(KernelError, match=r"^cuOccupancyMaxActiveClusters answers 1 for 4 blocks$"):
        clusters_at_once(1, 4, 256, 0)


def test_a_device_is_asked_once_for_each(monkeypatch):
    asked, allowed = [], []
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(twell_launch, "clusters_at_once", lambda *args: asked.append(args) or 30)
    kernels = KernelSet({}, 0)
    kernels._functions["k"] = Function()
    monkeypatch.setattr(kernels, "_allow_shared", lambda *args: allowed.append(args[2]))
    for smem_bytes in (1000, 2000, 1000):
        assert kernels.clusters_at_once("k", 4, 256, smem_bytes) == 30
    assert asked == [(99, 4, 256, 1000), (99, 4, 256, 2000)]
    assert allowed == [1000, 2000]


# ---- when launches overlap ----


class Function:
    """Stands for a kernel that CuPy holds."""

    ptr = 99


@pytest.mark.parametrize("current", [0, 1], ids=["current device", "another device"])
@pytest.mark.parametrize(
    ("capability", "overlap", "started"),
    [((9, 0), True, True), ((10, 0), True, True), ((9, 0), False, False), ((8, 9), True, False)],
)
def test_who_may_start_early(monkeypatch, capability, overlap, started, current):
    """On GPUs that can, the kernels that are launched so."""
    calls, entered = [], []
    limits = Limits(132, 232448, capability)
    monkeypatch.setattr(twell_launch, "device_limits", lambda index: limits)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 500 + i, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda i: entered.append(i) or nullcontext())
    monkeypatch.setattr(twell_launch, "start", lambda *args, **how: calls.append((*args, how)))
    kernels, x = KernelSet({}, 0), torch.zeros(3)
    kernels._functions["k"], kernels._shared["k"] = Function(), 48 * 1024
    kernels._signatures["k"], args = SIGNATURE, {"x": x}
    kernels.launch("k", (4, 2), 256, args, 1000, overlap=overlap)
    how = {"overlap": started, "together": False}
    assert calls == [(99, (4, 2), 256, SIGNATURE, args, 1000, 500, how)]
    assert entered == ([] if current == 0 else [0])


# ---- shared memory ----


class Permissions:
    """Stands for CuPy's binding of the driver: how much each kernel may be given."""

    def __init__(self):
        self.given: list[tuple[int, int, int]] = []

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.given.append((function, attribute, value))


@pytest.fixture
def declaring(monkeypatch):
    """`declaring(static)`: kernels of a GPU of 227 KB, "k" among them, and what is permitted."""
    limits, permissions = Limits(132, 227 << 10, (9, 0)), Permissions()
    monkeypatch.setattr(twell_launch, "device_limits", lambda index: limits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(twell_launch, "start", lambda *args, **how: None)
    monkeypatch.setattr(twell_launch, "load_cubin", lambda *given: Cubin(b"", ""))

    class Module:
        def load(self, code):
            pass

        def get_function(self, name):
            return Function()

    monkeypatch.setattr(twell_launch, "_cupy", lambda: (Module, permissions))

    def make(static: int) -> tuple[KernelSet, Permissions]:
        monkeypatch.setattr(twell_launch, "static_shared", lambda code: {"k": static})
        return KernelSet({"k.cu": TAKEN.encode()}, 0), permissions

    return make


@pytest.mark.parametrize("static", [0, 32, 1024])
def test_permission_is_asked_for_above_48_kb_of_both_kinds_together(declaring, static):
    kernels, permissions = declaring(static)
    kernels.launch("k", (1,), 64, {}, (48 << 10) - static)
    assert permissions.given == []
    for smem_bytes in ((48 << 10) - static + 1, 1000, (227 << 10) - static):
        kernels.launch("k", (1,), 64, {}, smem_bytes)
        assert permissions.given == [(99, 8, (227 << 10) - static)]


def test_more_than_a_block_has_is_refused_before_the_driver_does(declaring):
    kernels, permissions = declaring(32)
    wanted = r"^k asks for 232449 bytes of shared memory, and a block has 232448 on this GPU$"
    with pytest.raises(KernelError, match=wanted):
        kernels.launch("k", (1,), 64, {}, (227 << 10) - 31)
    with pytest.raises(KernelError, match="asks for 232480"):
        kernels.clusters_at_once("k", 4, 64, 227 << 10)
    assert permissions.given == []
