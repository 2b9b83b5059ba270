"""Exports in vLLM itself, built for CPUs: `environment.sh` makes an environment for this."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import AutoTokenizer
from transformers_judge import FAMILIES, PROMPTS, assert_as_transformers, needs_vllm

from twellctl.convert import convert
from twellctl.errors import TwellError
from twellctl.export import export
from twellctl.profile import profile

pytestmark = needs_vllm
LAYERS = 2
DENSE = "densely, through vLLM's transformers backend"


@pytest.fixture(scope="module")
def exports(make_export) -> dict[str, Path]:
    return {family: make_export(family, **changes) for family, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def eager(exports, ask_vllm) -> tuple[dict, dict]:
    """Answers and logged routes, by family; 64 tokens at a time, so that long prompts are cut."""
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    answers, log = ask_vllm(*exports.values(), prompts=PROMPTS, **settings)
    routes = dict.fromkeys(exports, "")
    for line in logged_routes(log):
        routes[next(family for family, folder in exports.items() if str(folder) in line)] += line
    return dict(zip(exports, answers, strict=True)), routes


def logged_routes(log: str) -> list[str]:
    """What each rank said of its route, "rank 0 of 1: ..."."""
    return sorted(re.findall(r"TwELL, (rank \d of \d: .*)", log))


def assert_over_twell(routes: list[str], ranks: int = 1) -> None:
    """Each rank said once that its FFNs are those of the plugin, and how they run."""
    assert len(routes) == ranks
    for rank, line in enumerate(routes):
        assert line.startswith(f"rank {rank} of {ranks}: ")
        assert f"{LAYERS} FFNs 128 x {320 // ranks}, of which" in line
        assert line.endswith("densely, in plain PyTorch: the kernels need an NVIDIA GPU")


def assert_each_step_ran_over_twell(answer: dict) -> None:
    """Its 8 tokens took 8 steps and more, and each called the operator once a layer."""
    assert answer["calls"] >= 8 * LAYERS
    assert answer["calls"] % LAYERS == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_eager(exports, eager, family):
    answers, routes = eager
    assert_over_twell([routes[family]])
    assert_each_step_ran_over_twell(answers[family])
    assert_as_transformers(exports[family], answers[family]["rows"])


def test_compiled(exports, ask_vllm):
    (answer,), log = ask_vllm(exports["qwen2"], prompts=PROMPTS)
    assert_over_twell(logged_routes(log))
    assert_each_step_ran_over_twell(answer)
    assert_as_transformers(exports["qwen2"], answer["rows"])


def test_two_ranks(exports, ask_vllm):
    """Compiled, and of a model with biases: one rank alone may add that of down."""
    (answer,), log = ask_vllm(exports["llama"], prompts=PROMPTS, tensor_parallel_size=2)
    assert_over_twell(logged_routes(log), ranks=2)
    assert_as_transformers(exports["llama"], answer["rows"])


@pytest.mark.parametrize(("ranks", "trusted"), [(1, False), (1, True), (2, True)])
def test_the_transformers_backend_computes_the_same(exports, ask_vllm, trusted, ranks):
    settings = {"trust_remote_code": trusted, "tensor_parallel_size": ranks, "enforce_eager": True}
    (answer,), log = ask_vllm(
        exports["llama"], prompts=PROMPTS, model_impl="transformers", **settings
    )
    lines = logged_routes(log)
    assert len(lines) == ranks
    assert all(DENSE in line and "it would run over TwELL" in line for line in lines)
    assert answer["calls"] == 0
    assert_as_transformers(exports["llama"], answer["rows"])


@pytest.mark.parametrize(("family", "impl"), [("qwen2", "transformers"), ("llama", "auto")])
def test_without_the_plugin_vllm_computes_the_same(exports, ask_vllm, family, impl):
    settings = {"model_impl": impl, "enforce_eager": True, "variables": {"VLLM_PLUGINS": ""}}
    (answer,), log = ask_vllm(exports[family], prompts=PROMPTS, **settings)
    assert logged_routes(log) == []
    assert_as_transformers(exports[family], answer["rows"])


def test_ffns_of_another_make_are_refused():
    """Where vLLM named its layers otherwise, they would go on running SiLU."""
    from vllm.model_executor.layers.activation import SiluAndMul

    from twellctl.vllm.models import put_over_twell

    silu = SiluAndMul.__new__(SiluAndMul)
    nn.Module.__init__(silu)
    named = SimpleNamespace(model="some/model")
    config = SimpleNamespace(model_config=named, quant_config=None)
    with pytest.raises(TwellError, match=r"some/model: vLLM .* has FFNs that the plugin does not"):
        put_over_twell(nn.Sequential(silu), {}, config)


def test_a_family_without_a_class_says_that_it_runs_densely(make_export, ask_vllm):
    folder = make_export("smollm3")
    (answer,), log = ask_vllm(folder, prompts=PROMPTS, enforce_eager=True)
    (line,) = logged_routes(log)
    assert DENSE in line
    assert "the plugin has no class for SmolLM3ForCausalLM" in line
    assert_as_transformers(folder, answer["rows"])


def test_what_is_no_export_is_served_as_before(make_model, ask_vllm):
    sizes = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.08}
    model = make_model("llama", seed=5, dtype="bfloat16", **sizes)
    answers = [
        ask_vllm(model, prompts=PROMPTS, enforce_eager=True, variables={"VLLM_PLUGINS": plugins})
        for plugins in ("twellctl", "")
    ]
    (ours, log), (stock, _) = answers
    assert ours == stock
    assert logged_routes(log) == []


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"profiled": False}, {}, "config.json holds no profile"),
        ({}, {"enable_lora": True}, "exports do not support adapters: drop --enable-lora"),
    ],
)
def test_refused_in_one_line(make_export, ask_vllm, changes, settings, said):
    folder = make_export("llama", **changes)
    _, log = ask_vllm(folder, prompts=PROMPTS, fails=True, enforce_eager=True, **settings)
    (line,) = {line for line in re.findall(r"TwellError: (.*)", log) if said in line}
    assert "--model-impl transformers" in line


def test_200_prompts_of_a_real_model(real_model, text_file, ask_vllm, tmp_path):
    convert(real_model, tmp_path / "relu")
    found = profile(tmp_path / "relu", [text_file], windows=4, seq_len=128)
    export(tmp_path / "relu", tmp_path / "exported", profile=found)
    ids = AutoTokenizer.from_pretrained(real_model)(text_file.read_text())["input_ids"]
    prompts = [ids[100 * i : 100 * i + 20 + i // 4] for i in range(200)]
    for settings in ({"enforce_eager": True}, {}):
        (answer,), log = ask_vllm(tmp_path / "exported", prompts=prompts, new_tokens=4, **settings)
        assert answer["calls"] > 0
        assert len(logged_routes(log)) == 1
        assert_as_transformers(tmp_path / "exported", answer["rows"])
