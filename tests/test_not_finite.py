"""Weights that are NaN or infinite are named by whatever reads them; what is computed, too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from edits import weights_in
from serving_client import Scripted, get, post, running, serving

from twellctl.decoding.engine import Sampling
from twellctl.decoding.rounds import NO_TOKEN, inputs_of
from twellctl.decoding.sampler import Variant
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.export import export
from twellctl.files.strict_json import parse_json, to_json
from twellctl.models.answerer import open_answerer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.serve_local import load_served_model

BROKEN = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=["nan", "-inf"])
def broken(request, relu_llama, tmp_path) -> Path:
    """The tiny Llama with one number of one weight spoilt."""
    folder = Path(shutil.copytree(relu_llama, tmp_path / "broken"))
    with weights_in(folder) as tensors:
        tensors[BROKEN][3, 5] = float(request.param)
    return folder


def test_commands_name_tensor_and_file(broken, text_file, tmp_path, refusal):
    for words in (
        ("profile", broken, "--data", text_file, "--seq-len", 16),
        ("export", broken, tmp_path / "out"),
        ("generate", broken, "x = 1"),
        ("serve-local", broken, "--port", 0),
        ("finetune", broken, tmp_path / "out", "--data", text_file, "--seq-len", 32),
    ):
        assert f"{BROKEN} holds NaN or infinity ({broken / 'model.safetensors'})" in refusal(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_are_numbers(relu_llama, tmp_path, dtype):
    folder = Path(shutil.copytree(relu_llama, tmp_path / "large"))
    with weights_in(folder) as tensors:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors[BROKEN][0, :2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])
    load_model(open_checkpoint(folder), dtype=dtype)
    export(folder, tmp_path / "out")


@pytest.fixture
def overflowing(monkeypatch):
    """Weights are finite, what the model computes is not."""
    forward = TorchDecoder.run

    def spoilt(self, *inputs, **how):
        logits, fired = forward(self, *inputs, **how)
        return logits * float("nan"), fired

    monkeypatch.setattr(TorchDecoder, "run", spoilt)


def test_profile_says_where_gates_are_no_numbers(relu_llama, text_file, tmp_path, refusal):
    folder = Path(shutil.copytree(relu_llama, tmp_path / "large"))
    with weights_in(folder) as tensors:
        tensors["model.layers.1.mlp.gate_proj.weight"][0] = 3e38
    words = ("--data", text_file, "--windows", 1, "--seq-len", 16)
    assert "gates of layer 1 are NaN or infinite for" in refusal("profile", folder, *words)


def test_generate_says_that_the_model_computed_nan(overflowing, relu_llama, cli):
    code, out, err = cli("generate", relu_llama, "x = 1", "--max-tokens", 4)
    assert (code, out, len(err)) == (1, "", 2), err
    assert err[0].startswith("beware: ")
    assert "the model computed NaN in place of the next token's probabilities" in err[1]


def test_a_server_answers_500_and_health_says_so(overflowing, relu_llama):
    served = load_served_model(open_answerer(relu_llama))
    asked = {"model": "model", "prompt": "x = 1", "max_tokens": 4, "logprobs": 2}
    with running(served) as client:
        for changes in ({}, {"stream": True}, {"temperature": 1}):
            status, body = post(client, json.dumps(asked | changes).encode())
            assert (status, body["error"]["code"]) == (500, "internal_error")
            assert "computed NaN" in body["error"]["message"]
        assert get(client, "/health").status == 503
        assert json.loads(get(client, "/health").body) == {"status": "failing"}


def test_an_answer_never_holds_a_bare_nan(tokenizer):
    class Nameless(Scripted):
        def logprob(self, token: int) -> float:
            return float("nan")

    with serving(tokenizer, Nameless([5, 6])) as client:
        asked = {"model": "model", "prompt": "x", "max_tokens": 2, "logprobs": 0}
        status, body = post(client, json.dumps(asked).encode())
    assert (status, body["error"]["code"]) == (500, "internal_error")


def test_a_row_without_numbers_has_no_token():
    record = Record((4,), 8)
    logits = torch.zeros(3, 8)
    logits[0, 5], logits[1, 3], logits[2, 6] = 1.0, float("nan"), float("inf")
    fields = torch.zeros(9, 3, dtype=torch.int32)
    records = torch.zeros(3, 1, record.width, dtype=torch.int32)
    end, fired = StepEnd(record, None, 3, torch.device("cpu")), torch.zeros(1, 3, 1)
    inputs = inputs_of(fields, None)
    end(logits[:, None], fired, inputs, fields, records, Variant(logprobs=True))
    assert records[:, 0, 0].tolist() == [5, NO_TOKEN, 6]
    assert (fields[0] >= 0).all()  # what the next step reads, if there is one
    rows, with_logprobs = records[:, 0].numpy(), Sampling(1, top_logprobs=1)
    assert [record.token(row, Sampling(1)) is None for row in rows] == [False, True, False]
    assert [record.token(row, with_logprobs) is None for row in rows] == [False, True, True]


def test_json_is_read_as_it_is_written():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json({"a": [bad]})
        with pytest.raises(ValueError, match="not finite"):
            parse_json(json.dumps({"a": [bad]}))
    assert parse_json(json.dumps([float("inf")]), finite=False) == [float("inf")]
    value = {"é": ["\U0001f600", 1.5, None, True]}
    assert parse_json(to_json(value).encode()) == value
