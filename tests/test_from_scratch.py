"""finetune --from-scratch: random weights of a config, and what cannot be trained so."""

import json
import shutil

import pytest
import torch
from finetune_runs import InterruptAt, assert_same_weights, small, weights
from transformers import AutoModelForCausalLM

from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.training.from_scratch import open_config
from twellctl.training.optimizer import default_rate
from twellctl.training.teacher import choose_teacher

SHORT = {"max_steps": 4, "eval_steps": 0}


@pytest.fixture
def blueprint(silu_llama, tmp_path):
    """A folder with a ReLU config and a tokenizer."""
    folder = tmp_path / "blueprint"
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    folder.mkdir()
    for name in names:
        shutil.copy(silu_llama / name, folder)
    config = json.loads((silu_llama / "config.json").read_text())
    keep(folder, config | {"hidden_act": "relu", "initializer_range": 0.05})
    changed(folder, dtype="bfloat16")
    (folder / "notes.txt").write_text("not to be copied")
    return folder


def keep(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def changed(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    keep(folder, {key: value for key, value in config.items() if value is not None})


@pytest.mark.parametrize("penalty", ["l1", "count"])
def test_result_is_a_trained_stock_model(blueprint, text_file, tmp_path, penalty):
    out = tmp_path / "out"
    done = finetune(open_config(blueprint), out, small(text_file, penalty=penalty))
    assert done.teacher_cross_entropy is None
    assert done.cross_entropy < done.first_cross_entropy
    assert abs(done.first_cross_entropy - 6.24) < 0.3  # ln 512
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.hidden_act == "relu"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    made = {path.name for path in out.iterdir()}
    assert "notes.txt" not in made
    assert {"tokenizer.json", "recipe.yaml", "config.json", "model.safetensors"} <= made
    again = open_checkpoint(out)
    again.require_tokenizer()
    assert choose_teacher(again, small(text_file)) is None


@pytest.mark.parametrize(("std", "rate"), [(0.05, 7.5e-4), (None, 3e-4)])
def test_learning_rate_is_left_to_the_size_of_what_is_drawn(blueprint, std, rate):
    changed(blueprint, initializer_range=std)
    assert default_rate(open_config(blueprint)) == rate


def test_weights_follow_from_the_seed(blueprint, text_file, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        finetune(open_config(blueprint), tmp_path / name, small(text_file, seed=seed, **SHORT))
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(tmp_path / "a")[name], weights(tmp_path / "c")[name])


def test_interrupted_and_resumed(blueprint, text_file, tmp_path):
    recipe, whole, out = small(text_file, **SHORT), tmp_path / "whole", tmp_path / "out"
    finetune(open_config(blueprint), whole, recipe)
    with pytest.raises(Interrupted):
        finetune(open_config(blueprint), out, recipe, progress=InterruptAt(2))
    other = open_config(shutil.copytree(blueprint, tmp_path / "other"))
    with pytest.raises(UsageError, match="resume it with that model"):
        finetune(other, out, recipe, resume=True)
    finetune(open_config(blueprint / "config.json"), out, recipe, resume=True)
    assert_same_weights(whole, out)


def test_tied_heads_and_weights_that_lie_there(silu_llama, blueprint, text_file, tmp_path):
    changed(blueprint, tie_word_embeddings=True)
    shutil.copy(silu_llama / "model.safetensors", blueprint)
    torch.manual_seed(1)
    drawn = load_model(open_config(blueprint), dtype=torch.float32)
    stored = weights(blueprint)["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(drawn.model.layers[0].mlp.up_proj.weight.cpu(), stored.float())
    finetune(open_config(blueprint), tmp_path / "out", small(text_file, **SHORT))
    assert "lm_head.weight" not in weights(tmp_path / "out")
    tied = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_command_line(cli, blueprint, text_file, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("print('hello')\n" * 400, encoding="utf-8")
    flags = ["--max-steps=2", "--batch-size=2", "--eval-blocks=1", "--seq-len=32"]
    begin = ["finetune", "--from-scratch", blueprint / "config.json", tmp_path / "out"]
    code, stdout, stderr = cli(*begin, "--data", text_file, more, *flags, "--dry-run")
    assert code == 0, stderr
    assert "2 steps" in stdout
    code, _, stderr = cli(*begin, "--data", text_file, more, *flags, "--recipe", "paper")
    assert code == 0, stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "silu"}, "has hidden_act 'silu': --from-scratch trains ReLU"),
        ({"hidden_act": None}, "has hidden_act None"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "nosuch"}, "transformers makes no model of it"),
        ({"model_type": "gpt2"}, "has 0 gated FFNs"),
        ({"num_attention_heads": 5}, "transformers makes no model of it"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"dtype": "float64"}, "dtype must be float32 or float16 or bfloat16"),
    ],
)
def test_configs_that_are_refused(blueprint, changes, said):
    changed(blueprint, **changes)
    with pytest.raises(TwellError, match=said) as refused:
        open_config(blueprint)
    assert "\n" not in str(refused.value)


def test_refusals(cli, blueprint, text_file, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(blueprint / "config.json", tmp_path / "bare")
    out, data = tmp_path / "out", ("--data", text_file)
    for arguments, code, said in [
        (("--from-scratch", tmp_path / "no", out, *data), 1, "no does not exist"),
        (("--from-scratch", tmp_path / "bare", out, *data), 1, "has no tokenizer"),
        (("--from-scratch", blueprint, out, *data, "--lora-rank", "4"), 2, "lora-rank"),
        (("--from-scratch", blueprint, blueprint, out), 2, "which flag is it for"),
        ((blueprint,), 2, "no OUT"),
    ]:
        exit_code, stdout, stderr = cli("finetune", *arguments)
        assert (exit_code, stdout) == (code, ""), stderr
        assert len(stderr) == 1, stderr
        assert said in stderr[0]
        assert not out.exists()
