"""The cache of cubins, by a stand-in for NVRTC: what is kept, found again, and survived."""

import contextlib
import importlib.metadata
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from twellctl.bundle import twell_cache, twell_launch, twell_nvrtc
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_nvrtc import Cubin, KernelError, load_cubin, with_headers
from twellctl.bundle.twell_plan import Limits

INCLUDE = b'#include "head.cuh"\n'
SOURCES = {
    "one.cu": INCLUDE + b"one",
    "two.cu": b"two",
    "head.cuh": b'  #include "deep.cuh"\nhead',
    "deep.cuh": b'#include "head.cuh"\ndeep',
    "other.cuh": b"other",
}
CODE = b"code of " + INCLUDE + b"one"


class Compiler:
    """Counts what it is asked to compile."""

    def __init__(self):
        self.version, self.compiled = (13, 0), []

    def compile(self, name, sources, arch):
        self.compiled.append((name, arch))
        return Cubin(b"code of " + sources[name], f"log of {name}, {arch} \u2264")


@pytest.fixture
def compiler(monkeypatch, tmp_path) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(twell_nvrtc, "find_nvrtc", lambda: made)
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path / "cache"))
    return made


def test_a_second_load_compiles_nothing(compiler, tmp_path):
    first = load_cubin("one.cu", SOURCES, "sm_80")
    assert first == Cubin(CODE, "log of one.cu, sm_80 \u2264")
    assert load_cubin("one.cu", SOURCES, "sm_80") == first
    assert compiler.compiled == [("one.cu", "sm_80")]
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.suffix == ".cubin"


def test_the_key_is_all_that_counts(compiler):
    load_cubin("one.cu", SOURCES, "sm_80")
    load_cubin("one.cu", SOURCES, "sm_90a")
    load_cubin("two.cu", SOURCES, "sm_80")
    load_cubin("one.cu", SOURCES | {"one.cu": b"other"}, "sm_80")
    load_cubin("one.cu", SOURCES | {"head.cuh": b"other"}, "sm_80")
    compiler.version = (13, 1)
    load_cubin("one.cu", SOURCES, "sm_80")
    assert len(compiler.compiled) == 6
    load_cubin("one.cu", SOURCES | {"deep.cuh": b"included by what it includes"}, "sm_80")
    assert len(compiler.compiled) == 7
    for name in ("two.cu", "other.cuh"):  # what it does not include does not count
        load_cubin("one.cu", SOURCES | {name: b"changed"}, "sm_80")
    load_cubin("one.cu", {n: SOURCES[n] for n in ("one.cu", "head.cuh", "deep.cuh")}, "sm_80")
    assert len(compiler.compiled) == 7


def test_the_headers_of_a_source():
    assert set(with_headers("one.cu", SOURCES)) == {"one.cu", "head.cuh", "deep.cuh"}
    assert with_headers("two.cu", SOURCES) == {"two.cu": b"two"}
    assert with_headers("one.cu", {"one.cu": INCLUDE}) == {"one.cu": INCLUDE}  # NVRTC names it


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_a_damaged_file_is_made_again(compiler, tmp_path, damage):
    wanted = load_cubin("one.cu", SOURCES, "sm_80")
    (kept,) = (tmp_path / "cache").iterdir()
    content = bytearray(kept.read_bytes())
    if damage == "folder":
        kept.unlink()
        kept.mkdir()
    else:
        content[-1] ^= 1
        kept.write_bytes({"cut": content[:50], "flipped": content, "empty": b""}[damage])
    assert load_cubin("one.cu", SOURCES, "sm_80") == wanted
    assert len(compiler.compiled) == 2
    load_cubin("one.cu", SOURCES, "sm_80")
    assert len(compiler.compiled) == (3 if damage == "folder" else 2)


@pytest.mark.parametrize(
    "whose", ["another's folder", "open folder", "another's file", "open file", "link"]
)
def test_what_another_may_have_written_is_not_run(compiler, tmp_path, monkeypatch, whose, caplog):
    load_cubin("one.cu", SOURCES, "sm_80")
    folder = tmp_path / "cache"
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    if whose == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif whose.startswith("open"):
        (folder if whose == "open folder" else file).chmod(0o777)
    else:
        changed = folder if whose == "another's folder" else file
        real = os.fstat if changed is file else Path.stat

        def by_another(path, **how):
            found = real(path, **how)
            mine = os.path.samestat(found, os.stat(changed))
            return os.stat_result([*found[:4], 4711 if mine else found.st_uid, *found[5:]])

        owner = twell_cache.os if changed is file else twell_cache.Path
        monkeypatch.setattr(owner, "fstat" if changed is file else "stat", by_another)
    load_cubin("one.cu", SOURCES, "sm_80")
    assert len(compiler.compiled) == 2
    assert ("nothing of it is used" in caplog.text) == ("folder" in whose)


def test_a_folder_that_cannot_be_written_costs_time_only(compiler, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        assert load_cubin("one.cu", SOURCES, "sm_80").code == CODE
    assert len(compiler.compiled) == 2


def test_a_write_that_fails_leaves_nothing_in_the_cache(compiler, tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(twell_cache.os, "replace", full)
    load_cubin("one.cu", SOURCES, "sm_80")
    assert list((tmp_path / "cache").iterdir()) == []


def test_threads_meet_in_the_cache(compiler, tmp_path):
    start = threading.Barrier(8)

    def load(_: int):
        start.wait()
        return load_cubin("one.cu", SOURCES, "sm_80")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(load, range(8)))) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


def test_the_default_folder(monkeypatch):
    monkeypatch.delenv("TWELL_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(twell_cache.cache_dir()) == "/somewhere/.cache/twellctl"
    monkeypatch.setenv("TWELL_CACHE_DIR", "~/else")
    assert str(twell_cache.cache_dir()) == "/somewhere/else"


def test_a_user_without_a_home_keeps_nothing(compiler, monkeypatch):
    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TWELL_CACHE_DIR")
    monkeypatch.setattr(twell_cache.Path, "expanduser", expanduser)
    for _ in range(2):
        assert load_cubin("one.cu", SOURCES, "sm_80").code == CODE
    assert len(compiler.compiled) == 2


@pytest.mark.parametrize(("cuda", "major"), [("12.8", "12"), ("13.0", "13"), (None, "13")])
def test_the_error_names_what_to_install(monkeypatch, cuda, major):
    monkeypatch.setattr(twell_nvrtc.torch.version, "cuda", cuda)
    monkeypatch.setattr(twell_nvrtc, "find_nvrtc", lambda: None)
    advice = re.escape(f"pip install {twell_nvrtc.PACKAGES[major]}")
    with pytest.raises(KernelError, match=f"is not installed: {advice}$"):
        load_cubin("one.cu", SOURCES, "sm_80")


@pytest.mark.parametrize("major", ["12", "13"])
def test_what_to_install_is_in_the_extra(major):
    extra = f'extra == "cuda{major}x"'
    required = [r for r in importlib.metadata.requires("twellctl") if r.endswith(extra)]
    for name in twell_nvrtc.PACKAGES[major].split():
        wanted = Requirement(name.strip("'"))
        assert wanted in [Requirement(r.partition(";")[0]) for r in required]


class Loaded:
    """Stands for CuPy's Module."""

    def load(self, code):
        if b"void bad()" in code:
            raise OSError("no kernel image")
        self.code = code

    def get_function(self, name):
        return name, self.code


@pytest.fixture
def driver(compiler, monkeypatch):
    """A device 0 of capability 9.0 whose driver loads what the compiler gives."""
    limits = Limits(132, 232448, (9, 0))
    monkeypatch.setattr(twell_launch, "_cupy", lambda: (Loaded, None))
    shared = dict.fromkeys(("one", "two", "bad"), 0)
    monkeypatch.setattr(twell_launch, "static_shared", lambda code: shared)
    monkeypatch.setattr(twell_launch, "device_limits", lambda index: limits)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return compiler


def kernel(name: str) -> bytes:
    return f'extern "C" __global__ void {name}() {{}}'.encode()


KERNELS = {f"{name}.cu": kernel(name) for name in ("one", "two", "bad")}


def test_what_is_prepared_is_compiled_once(driver):
    kernels = KernelSet(KERNELS, 0)
    kernels.prepare(["one", "two", "one"])
    kernels.prepare(["two"])
    assert sorted(driver.compiled) == [("one.cu", "sm_90a"), ("two.cu", "sm_90a")]
    assert kernels._functions["two"] == ("two", b"code of " + kernel("two"))
    assert sorted(kernels.logs) == ["one.cu", "two.cu"]


def test_what_cannot_be_prepared_says_why(driver):
    kernels = KernelSet(KERNELS | {"four.cu": kernel("five")}, 0)
    with pytest.raises(KernelError, match=r"three.cu, where kernel three should be, is not"):
        kernels.prepare(["one", "three"])
    with pytest.raises(KernelError, match="kernel four is not defined where it should be"):
        kernels.prepare(["one", "four"])
    with pytest.raises(KernelError, match=r"driver does not load bad.cu for sm_90a: no kernel"):
        kernels.prepare(["bad"])
    kernels.prepare(["one"])  # none of it stays in the way
    assert kernels._functions["one"] == ("one", b"code of " + kernel("one"))
