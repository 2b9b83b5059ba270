"""What the plugin refuses, in one line each, and what doctor says of vLLM; without vLLM."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from twellctl.bundle.twell_config import quantization_config
from twellctl.errors import TwellError
from twellctl.vllm import installed
from twellctl.vllm.installed import find_vllm, requirement
from twellctl.vllm.refusals import check_densely, check_served, check_version, why_densely

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TWELL = {"format_version": 1, "tile": 32, "slots": [8, 8], "densities": [0.1, 0.2]}
TWELL |= {"activation": "relu", "sharpness": [256, 256], "down_share": [16, 16]}

FP8 = {"total_num_heads": 8, "total_num_kv_heads": 2}  # which vLLM adds


def check(*, quantized=False, lora=False, hidden_act="silu", fp8=None, **changes):
    twell = {key: value for key, value in (TWELL | changes).items() if value is not None}
    config = SimpleNamespace(twell=twell, num_hidden_layers=2, hidden_act=hidden_act)
    if fp8:
        config.quantization_config = quantization_config("e4m3", ["lm_head"]) | fp8
    check_served("some/model", config, quantized=quantized, lora=lora)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.27.1rc1.dev3+gabc"])
def test_versions_that_are_known(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "dev"])
def test_another_version_is_refused(version):
    said = f"vLLM {version} is not one .* install vLLM 0.26 to 0.32, or .*--model-impl transformers"
    with pytest.raises(TwellError, match=re.escape(version)) as error:
        check_version(version)
    assert re.search(said, str(error.value))


def test_an_export_with_a_profile_is_served():
    check()
    check(quantized=True, fp8=FP8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"densities": None}, "holds no profile, .* export it with --profile"),
        ({"slots": [8]}, 'in config.json "twell" must hold 2 slots, .*: export it again'),
        ({"format_version": 9}, "format_version 9, this code reads 1: export it again"),
        ({"hidden_act": "relu"}, "not that of a ReLU model written as SiLU: export it again"),
        (
            {"activation": None, "sharpness": None, "down_share": None},
            "not that of a ReLU model written as SiLU: export it again",
        ),
        ({"quantized": True}, "exported in bf16: drop --quantization, or serve it densely"),
        (
            {"fp8": {"format": "int-quantized"}, "quantized": True},
            "quantization_config is not that of an export: export it again",
        ),
        ({"fp8": FP8, "densities": None}, "holds no profile, .* export it with --profile"),
        ({"fp8": FP8, "quantized": True, "lora": True}, "not support adapters: drop --enable-lora"),
        ({"lora": True}, "do not support adapters: drop --enable-lora, or serve it densely"),
    ],
)
def test_what_is_not_served_is_named(changes, said):
    with pytest.raises(TwellError, match=f"^some/model: .*{said}"):
        check(**changes)


def in_4_bits(**changes):
    """The config of a model in 4 bits, as vLLM gives it."""
    block = quantization_config("int4", ["lm_head"], 128) | FP8
    given = {"twell": TWELL, "hidden_act": "silu", "quantization_config": block}
    return SimpleNamespace(**given | changes)


def test_models_in_4_bits_are_left_to_vllm():
    silu = {"format_version": 1, "tile": 32, "slots": [8, 8], "source_act": "silu"}
    for config in (in_4_bits(), in_4_bits(twell=silu)):
        assert why_densely(config) == "its weights are in 4 bits"
        check_densely("some/model", config)


def test_a_model_in_4_bits_that_was_not_exported_is_refused():
    config = in_4_bits(hidden_act="relu")
    assert why_densely(config)
    with pytest.raises(TwellError, match=r": serve what 'twellctl export' makes of it"):
        check_densely("some/model", config)


@pytest.fixture
def play(monkeypatch):
    """`play(version, plugins)`: doctor looks at that vLLM, which sees plugins of these names."""

    def play(version: str | None, plugins: tuple[str, ...] = ("twellctl",)) -> None:
        monkeypatch.setattr(installed, "version_of", lambda name: version)
        names = SimpleNamespace(names=set(plugins))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: names)

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return play


@pytest.mark.parametrize(
    ("version", "plugins", "state", "what", "advice"),
    [
        (None, (), "none", "not installed", ""),
        (
            "0.32.0",
            ("twellctl",),
            "ok",
            "0.32.0 takes exports, over TwELL where the kernels load: LlamaForCausalLM",
            "",
        ),
        ("0.40.0", ("twellctl",), "bad", "vLLM 0.40.0", "pip install 'vllm>=0.26,<0.33'"),
        ("0.32.0", ("other",), "bad", "0.32.0 does not see the plugin", "install twellctl again"),
    ],
)
def test_doctor_says_what_vllm_would_do(play, version, plugins, state, what, advice):
    play(version, plugins)
    found = find_vllm()
    assert (found.state, found.advice) == (state, advice)
    assert found.what.startswith(what)


@pytest.mark.parametrize(("plugins", "state"), [("twellctl,x", "ok"), ("x", "bad"), ("", "bad")])
def test_doctor_sees_plugins_that_are_left_out(play, monkeypatch, plugins, state):
    play("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert find_vllm().state == state


@pytest.mark.skipif(not PYPROJECT.is_file(), reason="no checkout around the tests")
def test_the_package_says_the_same():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm{requirement()}"]
    (target,) = project["entry-points"]["vllm.general_plugins"].values()
    module, name = target.split(":")
    assert callable(getattr(importlib.import_module(module), name))
