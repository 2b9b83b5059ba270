"""doctor: right on a bare machine, on odd ones played here, and about folders."""

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from twellctl import machine
from twellctl.cli import app
from twellctl.doctor import doctor
from twellctl.export import export

CUPY_PARTS = ("cupy", "cupy._core", "cupy._core.core", "cupy_backends.cuda.libs")


@pytest.fixture
def play(monkeypatch):
    """Play a machine: which CuPy wheels it has, and the CUDA its driver runs (none: no driver)."""

    def play(wheels: tuple[str, ...] = (), driver: int | None = None) -> None:
        real = importlib.metadata.version
        cupy = ModuleType("cupy")
        cupy.__version__, cupy.__spec__ = "14.2.0", SimpleNamespace()
        monkeypatch.setitem(sys.modules, "cupy", cupy if wheels else None)

        def version(name: str) -> str:
            if name not in machine.CUPY_WHEELS:
                return real(name)
            if name not in wheels:
                raise importlib.metadata.PackageNotFoundError(name)
            return "14.2.0"

        def library(name: str) -> SimpleNamespace:
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")

            def driver_version(reference) -> int:
                reference._obj.value = driver
                return 0 if driver else 100

            return SimpleNamespace(cuDriverGetVersion=driver_version)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(machine.ctypes, "CDLL", library)

    return play


def test_a_bare_machine(play, monkeypatch):
    play()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.name: finding for finding in doctor().machine}
    states = {name: finding.state for name, finding in found.items()}
    assert states == {
        "libraries": "ok",
        "driver": "none",
        "GPU": "none",
        "CuPy": "none",
        "NVRTC": "none",
        "works": "ok",
    }
    assert f"torch {torch.__version__}" in found["libraries"].what
    assert "on the CPU" in found["works"].what


@pytest.mark.parametrize(
    ("cuda", "extra"), [("13.0", "cuda13x"), ("12.8", "cuda12x"), (None, "cuda13x")]
)
def test_the_extra_is_that_of_torchs_cuda(play, cuda, extra):
    play()
    assert machine.install_advice(cuda) == f"pip install 'twellctl[{extra}]'"
    advice = machine.find_cupy(cuda).advice
    assert advice == (machine.install_advice(cuda) if cuda else "")


@pytest.mark.parametrize(
    ("wheels", "cuda", "state", "advice"),
    [
        (["cupy-cuda13x"], "13.0", "ok", ""),
        (["cupy-cuda12x"], None, "ok", ""),
        (["cupy-cuda12x"], "13.0", "bad", "pip uninstall cupy-cuda12x, then pip install"),
        (list(machine.CUPY_WHEELS), "12.8", "bad", "pip uninstall cupy-cuda12x cupy-cuda13x, then"),
        (list(machine.CUPY_WHEELS), None, "bad", "pip uninstall cupy-cuda12x cupy-cuda13x, then"),
    ],
)
def test_cupy_must_be_that_of_torchs_cuda(play, wheels, cuda, state, advice):
    play(tuple(wheels))
    found = machine.find_cupy(cuda)
    assert found.state == state
    assert found.advice.startswith(advice)


def test_drivers(play, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    play(driver=12080)
    found, number = machine.find_driver()
    assert (found.state, found.what, number) == ("ok", "runs CUDA up to 12.8", 12080)
    assert machine.find_gpu(found, None).advice.startswith("install a CUDA build of torch")
    assert machine.find_gpu(found, "13.0").advice.startswith("update the driver")
    play(driver=0)
    assert machine.find_driver()[0].state == "bad"


def test_a_cupy_without_nvrtc(play, monkeypatch):
    play(("cupy-cuda12x",))
    for name in CUPY_PARTS[1:]:
        monkeypatch.setitem(sys.modules, name, None)
    found = machine.find_nvrtc("12.8", 0)
    assert found.state == "bad"
    assert found.what.startswith("does not work:")
    assert found.advice == "pip install 'twellctl[cuda12x]'"


def test_a_real_nvrtc_compiles_without_a_gpu():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    found = machine.find_nvrtc(None, 0)
    assert found.state == "ok", found
    assert "compiles for sm_90a" in found.what
    assert machine.compile_probe("80")[:4] == b"\x7fELF"
    assert machine.find_nvrtc(None, 11080).advice.startswith("update the driver")


def test_a_library_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(machine, "version_of", lambda n: None if n == "peft" else "1.0")
    found = doctor().machine
    assert found[0].state == found[-1].state == "bad"
    assert "peft missing" in found[0].what
    assert "pip install" in found[0].advice
    assert "'peft>=" in found[0].advice
    assert "'torch<2.14,>=2.11'" in found[0].advice


def run_doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_folders(relu_llama, silu_llama, tmp_path):
    assert run_doctor().exit_code == 0
    for folder in (relu_llama, silu_llama):
        done = run_doctor(folder)
        assert done.exit_code == 0
        assert "none: this is no export" in done.stdout
    export(relu_llama, tmp_path / "out")
    done = run_doctor(tmp_path / "out")
    assert done.exit_code == 0
    assert "files, intact, as this twellctl writes them" in done.stdout


def test_a_bundle_of_another_version_is_sound(relu_llama, tmp_path, monkeypatch):
    export(relu_llama, tmp_path / "out")
    monkeypatch.setattr("twellctl.doctor.bundle_files", dict)
    found = doctor(tmp_path / "out")
    assert not found.broken
    assert "of another version" in found.folder[1].what


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda out: (out / "modeling_twell.py").write_text("#"), "modeling_twell.py was changed"),
        (lambda out: (out / "twell_format.py").unlink(), "twell_format.py is missing"),
        (lambda out: (out / "twell_manifest.json").unlink(), "twell_manifest.json is missing"),
        (lambda out: (out / "twell_manifest.json").write_text("{"), "twell_manifest.json was chan"),
        (lambda out: (out / "model.safetensors").unlink(), "has no weights"),
        (lambda out: (out / "config.json").unlink(), "has no config.json"),
    ],
)
def test_broken_folders_are_named(relu_llama, tmp_path, spoil, sentence):
    export(relu_llama, tmp_path / "out")
    spoil(tmp_path / "out")
    assert len(doctor(tmp_path / "out").broken) == 1
    done = run_doctor(tmp_path / "out")
    assert done.exit_code == 1
    assert sentence in str(done.exception)
    assert str(tmp_path / "out") in str(done.exception)


def test_a_lost_auto_map_is_named(relu_llama, tmp_path):
    export(relu_llama, tmp_path / "out")
    (tmp_path / "out/config.json").write_bytes((relu_llama / "config.json").read_bytes())
    assert "lost its auto_map" in doctor(tmp_path / "out").broken[0]
