"""What a step of one token reads of weights, counted by hand."""

import json

import pytest
import torch

from twellctl.convert import convert
from twellctl.models.bytes_read import bytes_read, known_density, share_read
from twellctl.models.checkpoint import open_checkpoint

K, N, LAYERS = 32, 96, 2


@pytest.fixture
def source(make_model):
    return open_checkpoint(make_model("llama", dtype=torch.bfloat16))


def test_of_a_model_that_is_not_sparse_all_is_read(source):
    attention = sum(
        t.shape[0] * t.shape[1] for n, t in source.tensors.items() if ".0.self_attn" in n
    )
    assert bytes_read(source) == 2 * LAYERS * (attention + 3 * K * N)
    assert bytes_read(source, 0.1) == bytes_read(source)  # SiLU fires always


def test_of_a_relu_model_up_and_down_of_what_fires(source, tmp_path):
    convert(source.path, tmp_path / "relu")
    made = open_checkpoint(tmp_path / "relu")
    assert bytes_read(made) is None  # nobody has measured it
    assert bytes_read(source) - bytes_read(made, 0.25) == 2 * LAYERS * 2 * K * N * 3 / 4


@pytest.mark.parametrize("bits", [None, 4])
def test_of_a_fit_its_map_and_the_bits_of_its_weights(source, text_file, tmp_path, bits):
    how = {"tokens": 2048, "seq_len": 32, "eval_windows": 8, "steps": 0, "density": 1.0}
    how |= {"bits": bits, "group_size": 16} if bits else {}
    done = convert(source.path, tmp_path / "out", data=[str(text_file)], **how)
    made, mapped = open_checkpoint(tmp_path / "out"), done.fitted.map_neurons
    attention = bytes_read(source) / 2 / LAYERS - 3 * K * N
    a_weight = 2.0 if bits is None else (4 + 16 / 16) / 8
    weights = attention + K * (N + 1) + 2 * K * (0.5 * N + mapped)
    assert bytes_read(made, 0.5) == round(LAYERS * a_weight * weights)
    assert known_density(made) == pytest.approx(done.fitted.density)
    dense = attention + 3 * K * N
    assert share_read(made, 0.5) == pytest.approx(weights / dense)  # in the same bits
    assert done.bytes_read == bytes_read(made)
    assert done.source_bytes_read == bytes_read(source)


def test_a_profile_says_more_than_the_fit(source, tmp_path):
    convert(source.path, tmp_path / "relu")
    config = json.loads((tmp_path / "relu/config.json").read_text())
    config["twell"]["densities"] = [0.1, 0.3]
    (tmp_path / "relu/config.json").write_text(json.dumps(config))
    assert known_density(open_checkpoint(tmp_path / "relu")) == pytest.approx(0.2)
