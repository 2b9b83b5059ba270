"""Exports in vLLM itself, built for CPUs: `environment.sh` makes an environment for this."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers_judge import assert_as_transformers

from twellctl.convert import convert
from twellctl.export import export
from twellctl.profile import profile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: tests/vllm_plugin/environment.sh DIR makes an environment",
)
LAYERS = 2
FAMILIES = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
PROMPTS = [[(7 * i * i + 3 * j) % 512 for j in range(5 + 9 * i)] for i in range(8)]
DENSE = "densely, through vLLM's transformers backend"


@pytest.fixture(scope="module")
def exports(make_export) -> dict[str, Path]:
    return {family: make_export(family, **changes) for family, changes in FAMILIES.items()}


def routes_told(log: str) -> list[str]:
    """What each rank said of its route, "rank 0 of 1: ..."."""
    return re.findall(r"TwELL, (rank \d of \d: .*)", log)


def assert_over_twell(answer: dict, ranks: int = 1, neurons: int = 320) -> None:
    """The FFNs ran over the plugin's operator, and each rank said how, once."""
    told = sorted(routes_told(answer["log"]))
    assert len(told) == ranks
    for rank, line in enumerate(told):
        assert line.startswith(f"rank {rank} of {ranks}: ")
        assert f"{LAYERS} FFNs 128 x {neurons // ranks}, of which" in line
        assert line.endswith("densely, in plain PyTorch: the kernels need an NVIDIA GPU")
    assert DENSE not in answer["log"]


@pytest.mark.parametrize("family", FAMILIES)
def test_eager(exports, ask_vllm, family):
    # of 64 tokens at a time, so that the longest prompts come in chunks
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    answer = ask_vllm(exports[family], PROMPTS, **settings)
    assert_over_twell(answer)
    # once a layer and step; it wrote 8 tokens, so there were 8 steps and more
    assert answer["calls"] >= 8 * LAYERS
    assert answer["calls"] % LAYERS == 0
    assert_as_transformers(exports[family], answer["rows"])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_compiled(exports, ask_vllm, family):
    answer = ask_vllm(exports[family], PROMPTS)
    assert_over_twell(answer)
    assert answer["calls"] >= 8 * LAYERS
    assert_as_transformers(exports[family], answer["rows"])


def test_two_ranks(exports, ask_vllm):
    """Of a model with biases: one rank alone may add that of down."""
    answer = ask_vllm(exports["llama"], PROMPTS, tensor_parallel_size=2, enforce_eager=True)
    assert_over_twell(answer, ranks=2)
    assert_as_transformers(exports["llama"], answer["rows"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_transformers_backend_computes_the_same(exports, ask_vllm, trusted, ranks):
    settings = {"trust_remote_code": trusted, "tensor_parallel_size": ranks}
    answer = ask_vllm(
        exports["llama"], PROMPTS, model_impl="transformers", enforce_eager=True, **settings
    )
    told = routes_told(answer["log"])
    assert len(told) == ranks
    assert all(DENSE in line and "it would run over TwELL" in line for line in told)
    assert answer["calls"] == 0
    assert_as_transformers(exports["llama"], answer["rows"])


def test_without_the_plugin_the_backend_computes_the_same(exports, ask_vllm):
    answer = ask_vllm(
        exports["qwen2"],
        PROMPTS,
        model_impl="transformers",
        enforce_eager=True,
        variables={"VLLM_PLUGINS": ""},
    )
    assert routes_told(answer["log"]) == []
    assert_as_transformers(exports["qwen2"], answer["rows"])


def test_a_family_without_a_class_says_that_it_runs_densely(make_export, ask_vllm):
    folder = make_export("smollm3")
    answer = ask_vllm(folder, PROMPTS, enforce_eager=True)
    (told,) = routes_told(answer["log"])
    assert DENSE in told
    assert "the plugin has no class for SmolLM3ForCausalLM" in told
    assert_as_transformers(folder, answer["rows"])


def test_what_is_no_export_is_served_as_before(make_model, ask_vllm):
    model = make_model("llama", seed=5, head_dim=32, dtype="bfloat16", initializer_range=0.08)
    told = [
        ask_vllm(model, PROMPTS, enforce_eager=True, variables={"VLLM_PLUGINS": plugins})
        for plugins in ("twellctl", "")
    ]
    assert told[0]["rows"] == told[1]["rows"]
    assert routes_told(told[0]["log"]) == []


@pytest.mark.parametrize(
    ("changes", "settings", "told"),
    [
        ({"profiled": False}, {}, "was exported without a profile"),
        ({}, {"enable_lora": True}, "exports take no adapters: drop --enable-lora"),
    ],
)
def test_refused_in_one_line(make_export, ask_vllm, changes, settings, told):
    answer = ask_vllm(
        make_export("llama", **changes), PROMPTS, fails=True, enforce_eager=True, **settings
    )
    (line,) = {line for line in re.findall(r"TwellError: (.*)", answer["log"]) if told in line}
    assert "--model-impl transformers" in line


def test_200_prompts_of_a_real_model(real_model, text_file, ask_vllm, tmp_path):
    convert(real_model, tmp_path / "relu")
    found = profile(tmp_path / "relu", [text_file], windows=4, seq_len=128)
    export(tmp_path / "relu", tmp_path / "exported", profile=found)
    ids = AutoTokenizer.from_pretrained(real_model)(text_file.read_text())["input_ids"]
    prompts = [ids[100 * i : 100 * i + 20 + i // 4] for i in range(200)]
    answer = ask_vllm(tmp_path / "exported", prompts, enforce_eager=True, new_tokens=4)
    assert answer["calls"] > 0
    assert_as_transformers(tmp_path / "exported", answer["rows"])
