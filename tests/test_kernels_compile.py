"""Every kernel compiles for Ampere and Hopper, there with NVRTC 12 and 13, and spills nothing.

compiled.py says which entries of a file that differs in instructions alone, and what is compiled in
a hurry, whose spills are not judged.
"""

import re
from pathlib import Path, PurePosixPath

import pytest
from compiled import (
    EVERY_CASE,
    OTHERS_TEXT,
    SOURCES,
    compiled,
    entries_for,
    is_hurried,
    most_threads,
    nvrtc,
    parameter_bytes,
    static_bytes,
)
from launched import signature

from twellctl.bundle import twell_few, twell_spec
from twellctl.bundle.twell_nvrtc import KernelError, compiled_files, static_shared
from twellctl.bundle.twell_plan import STATIC_SMEM
from twellctl.bundle.twell_reasons import GRAD_KERNELS, HOPPER_KERNELS
from twellctl.bundle.twell_signatures import Signature, signature_of
from twellctl.bundle.twell_spec import (
    ENTRY_FILES,
    KINDS,
    MOST_OF_BLOCK,
    NUMBERS,
    SPEC,
    SPEC_NAME,
    STEP_KINDS,
    entry,
)
from twellctl.here.resources import kernel_files

TUNED_WITH = (13, 0)  # the newest NVRTC by which registers were counted
FEW_BYTES = 16  # a newer one may spill a few words; a loop that spills does so by hundreds
HOPPER_ONLY = {ENTRY_FILES[e] for e in (*HOPPER_KERNELS, *GRAD_KERNELS)}
HOPPER_ONLY |= {
    f"{entry(f'decode/step_{K}', kind)}.cu" for K in MOST_OF_BLOCK for kind in STEP_KINDS
}
HOPPER_ONLY |= {f"{entry('ffn/few_walk', kind)}.cu" for kind in KINDS}
# of two kinds of numbers, NVRTC 12 compiles the kernels over e4m3: these include the others' parts
WITH_E4M3 = {name for name in SOURCES if f"{entry(name.removesuffix('.cu'), 'e4m3')}.cu" in SOURCES}
OTHER_SIZES = {name for name in OTHERS_TEXT if name.startswith(("decode/step", "decode/attend"))}
COMPILED = [  # NVRTC 12 for Hopper alone: it reads the same text for Ampere
    (name, arch, major)
    for name in SOURCES
    for arch, major in (("sm_80", 13), ("sm_90a", 12), ("sm_90a", 13))
    if name.endswith(".cu") and (arch == "sm_90a" or name not in HOPPER_ONLY)
    if (arch, major) == ("sm_90a", 13)
    or (EVERY_CASE and major == 13)
    or (name not in OTHER_SIZES and (EVERY_CASE or major == 13 or name not in WITH_E4M3))
]


@pytest.mark.parametrize(("name", "arch", "major"), COMPILED)
def test_compiles_without_spills(name, arch, major):
    library, cubin = nvrtc(major), compiled(name, arch, major)
    assert cubin.code.startswith(b"\x7fELF")
    used = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", cubin.log)
    assert used, cubin.log
    allowed = 0 if library.version <= TUNED_WITH else FEW_BYTES
    hurried = is_hurried(name, arch, major)
    assert hurried or all(int(size) <= allowed for size, _ in used), cubin.log
    assert "warning" not in cubin.log.lower(), cubin.log
    static = static_bytes(name, arch, major)
    assert hurried or static == static_in_log(cubin.log)
    assert all(size <= STATIC_SMEM for size in static.values()), static
    few = {entry: size for entry, size in static.items() if entry.startswith("few_")}
    assert few == {entry: twell_few._static(entry) for entry in few}
    assert all(most_threads(cubin.code, entry) % 32 == 0 for entry in static)
    assert {*static} == {*static_in_log(cubin.log)} == {*entries_for(name, arch, major)}


def static_in_log(log: str) -> dict[str, int]:
    """Bytes of shared memory that each kernel declares, as ptxas says."""
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    said = (re.search(r"(\d+) bytes smem", part) for part in parts[1::2])
    return {
        entry: int(found[1]) if found else 0 for entry, found in zip(parts[::2], said, strict=True)
    }


# ---- signatures


@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith(".cu")])
def test_parameters_are_those_of_the_compiled_kernels(name):
    code = compiled(name, "sm_90a").code
    sizes = [parameter_bytes(code, of) for of in entries_for(name, "sm_90a", 13)]
    made = [of for of, source in ENTRY_FILES.items() if source == name]
    assert len(made) >= len(sizes) > 0
    for of in made:
        is_compiled = of in entries_for(name, "sm_90a", 13)
        wanted = [parameter_bytes(code, of)] if is_compiled else sizes  # by the same macro
        assert sizes_in(signature(of)) in wanted, of


def sizes_in(taken: Signature) -> list[int]:
    """Bytes of each parameter."""
    sizes = {"int": 4, "float": 4, "long long": 8, "TensorMap": 128}
    return [8 if kind[-1] == "*" else sizes[kind] for kind in taken.types]


SIGNED = rb"""
// extern "C" __global__ void older(int x) {
template <int N> __global__ void inner(int x) {}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32 * (kWarps), 1)
    one(const __grid_constant__ TensorMap x_map,  // of x
        const unsigned short *bias, const Weight::Memory* w, long long stride) { if (stride) {} }
#define MAKE(name, N)                                         \
    extern "C" __global__ void CLUSTER(N) name(const int* x,  \
                                               float eps) {   \
    }
extern "C" __global__ void none() {}
"""


def test_parameters_are_read_from_the_source():
    one = signature_of("one", [b"", SIGNED])
    assert one.names == ("x_map", "bias", "w", "stride")
    assert one.types == ("TensorMap", "unsigned short *", "Weight::Memory *", "long long")
    made = signature_of("made_by_a_macro", [SIGNED])
    assert (made.names, made.types) == (("x", "eps"), ("int *", "float"))
    assert signature_of("none", [SIGNED]).names == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extern "C" __global__ void k(double x) {', "kernel k takes x of type double, which no"),
        ('extern "C" __global__ void other(int x) {', "kernel k is not defined where it should be"),
        ("__global__ void k(int x) {", "kernel k is not defined where it should be"),
    ],
)
def test_what_no_launch_can_give_is_said(text, said):
    with pytest.raises(ValueError, match=said):
        signature_of("k", [text.encode()])


# ---- what is compiled


def test_what_is_no_cubin_is_refused():
    code = compiled("decode/norm.cu", "sm_80").code
    for wrong in (b"", b"PTX", code[:100], code[: len(code) // 2], b"\x7fELF" + code[4:5]):
        with pytest.raises(KernelError, match=r"^what the compiler made is no cubin \("):
            static_shared(wrong)


def test_every_entry_has_its_source():
    assert {*ENTRY_FILES.values()} == {name for name in SOURCES if name.endswith(".cu")}


def test_a_number_that_the_host_shares_is_one_that_a_kernel_takes():
    taken = {name.decode() for text in SOURCES.values() for name in SPEC_NAME.findall(text)}
    of_steps = {*twell_spec._step_numbers("decode/step_4096.cu")}
    host_alone = {name for name in NUMBERS if name not in taken}
    assert (host_alone, taken - NUMBERS.keys()) == (set(), of_steps)


def test_a_number_that_nobody_declared_is_refused():
    with pytest.raises(KeyError, match="NO_SUCH"):
        compiled_files("one.cu", {"one.cu": b"int x = spec::NO_SUCH;"}, "sm_90a")


def test_a_changed_number_compiles_anew_what_uses_it(monkeypatch):
    def spec_of(name: str) -> bytes:
        return compiled_files(name, SOURCES, "sm_90a")[SPEC]

    before = {name: spec_of(name) for name in SOURCES if name.endswith(".cu")}
    monkeypatch.setitem(twell_spec.NUMBERS, "UP_BLOCK", 256)
    assert [name for name, was in before.items() if spec_of(name) != was] == ["ffn/up.cu"]


def test_the_first_error_of_the_compiler_is_reported():
    sources = {"broken.cu": b"\nvoid f() { g(); }"}
    found = [nvrtc(major) for major in (12, 13)]
    for library in found:
        said = r'NVRTC \d+\.\d+ does not compile broken.cu for sm_80: broken.cu\(2\): error: .*"g"'
        with pytest.raises(KernelError, match=said):
            library.compile("broken.cu", sources, "sm_80")
        with pytest.raises(KernelError, match=r"for sm_1: .*gpu-architecture"):
            library.compile("broken.cu", {"broken.cu": b""}, "sm_1")


def test_a_header_comes_from_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.cuh").write_text("#error from the working folder")
    sources = {
        "one.cu": b'#include "two.cuh"\nextern "C" __global__ void k(int* x) { *x = two(); }',
        "two.cuh": b"inline int two() { return 2; }",
    }
    assert b"k" in nvrtc(13).compile("one.cu", sources, "sm_90a").code


# ---- the floors of kernels/: instructions at the bottom, then what kernels share, then kernels


BELOW = {  # what a folder's files may include beside those of their own
    "ptx": set(),
    "tile": {"ptx"},
    "ffn": {"tile", "ptx"},
    "train": {"tile", "ptx"},
    "decode": {"ffn", "tile", "ptx"},
}
FILES = {name: text.decode() for name, text in kernel_files().items()}


def folder(name: str) -> str:
    return PurePosixPath(name).parts[0]


def test_every_source_lies_in_a_folder():
    assert {folder(name) for name in FILES} == set(BELOW)


@pytest.mark.parametrize("name", FILES)
def test_a_file_includes_only_what_lies_below_it(name):
    own = folder(name)
    included = re.findall(r'^#include "(.+)"', FILES[name], re.MULTILINE)
    assert {folder(path) for path in included if path != SPEC} <= BELOW[own] | {own}


def test_inline_assembly_is_in_ptx_alone():
    with_assembly = {name for name, text in FILES.items() if re.search(r"\basm\b", text)}
    assert with_assembly
    assert {folder(name) for name in with_assembly} == {"ptx"}
