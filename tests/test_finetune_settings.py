"""finetune: teachers, the schedule, recipes, rates, epochs."""

import dataclasses
import json
import os
import re
import resource

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import json_in, weights_in
from finetune_runs import SMALL, Watching, small
from transformers import AutoModelForCausalLM, TrainingArguments

from twellctl.convert import convert
from twellctl.errors import TwellError, UsageError
from twellctl.evaluate import evaluate
from twellctl.finetune import finetune
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_tokenizer
from twellctl.text.blocks import read_blocks, token_stream, write_tokens
from twellctl.training import runs
from twellctl.training.build import micro_batch
from twellctl.training.optimizer import default_rate
from twellctl.training.progress import Progress
from twellctl.training.recipe import Recipe, recipe_names, resolve_recipe
from twellctl.training.teacher import may_be_source

pytestmark = pytest.mark.usefixtures("no_answers")


@pytest.fixture(scope="module")
def pretrained(make_model, long_text, tmp_path_factory):
    """A tiny SiLU model that has learnt something, converted."""
    folder = tmp_path_factory.mktemp("pretrained")
    source = make_model("llama", seed=3, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = load_tokenizer(open_checkpoint(source))
    texts = [json.loads(line)["text"] for line in long_text.open(encoding="utf-8")]
    write_tokens(token_stream(texts, tokenizer), folder / "tokens.bin")
    blocks = torch.from_numpy(read_blocks(folder / "tokens.bin", 64).astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        ids = blocks[torch.randint(0, len(blocks), (8,))]
        logits = model(ids).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "silu")
    tokenizer.save_pretrained(folder / "silu")
    convert(folder / "silu", folder / "relu")
    return folder / "relu"


def test_teacher_keeps_the_model_near_what_it_was(pretrained, long_text, tmp_path):
    settings = {"seq_len": 64, "max_steps": 20, "learning_rate": 1e-3, "eval_blocks": 4}
    settings |= {"l1": 1e-2, "l1_schedule": "constant", "eval_steps": 0, "eval_fraction": 0.1}
    settings |= {"teacher_weight": 0.5, "optimizer": "adamw"}
    kl = {}
    for teacher in ("none", "auto"):
        recipe = small(long_text, teacher=teacher, **settings)
        out = tmp_path / teacher
        done = finetune(pretrained, out, recipe)
        assert (done.teacher_cross_entropy is None) == (teacher == "none")
        silu = pretrained.parent / "silu"
        found = evaluate(out, [str(long_text)], reference=silu, windows=8, seq_len=64)
        kl[teacher] = found.text.score.kl
    assert kl["auto"] < 0.9 * kl["none"]


def test_controller_meets_its_target(pretrained, long_text, tmp_path):
    settings = {"seq_len": 64, "max_steps": 140, "batch_size": 4, "micro_batch_size": 4}
    settings["lr_scheduler"] = "cosine"  # in so few steps a linear fall leaves it too little time
    recipe = small(long_text, density=0.15, eval_steps=0, l1=5e-5, **settings)
    done = finetune(pretrained, tmp_path / "out", recipe)
    assert done.density == pytest.approx(0.15, rel=0.1)


def test_a_result_learns_from_its_source_on_the_hub(pretrained, text_file, tmp_path, monkeypatch):
    recipe = small(text_file, max_steps=2)
    first = finetune(pretrained, tmp_path / "once", recipe)
    with pytest.raises(UsageError, match="does not say from which model it was made"):
        finetune(tmp_path / "once", tmp_path / "twice", recipe)
    with json_in(tmp_path / "once/config.json") as config:
        config["twell"]["source"] = "owner/model"
    source = pretrained.with_name("silu")
    monkeypatch.setattr("twellctl.models.checkpoint._download", lambda name, revision: source)
    again = finetune(tmp_path / "once", tmp_path / "twice", recipe)
    assert again.teacher_cross_entropy == pytest.approx(first.teacher_cross_entropy, rel=1e-5)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_runs(pretrained, text_file, tmp_path, name):
    overrides = {"data": [str(text_file)], "max_steps": 4, "seq_len": 32, "eval_blocks": 2}
    overrides |= {"batch_size": 4, "micro_batch_size": 4}
    recipe = resolve_recipe(name, overrides)
    done = finetune(pretrained, tmp_path / "out", recipe)
    assert done.num_steps == 4


def test_warm_up_before_a_constant_rate(relu_llama, text_file, tmp_path):
    rates = []
    progress = Watching(step=lambda t, state: rates.append(t.optimizer.param_groups[0]["lr"]))
    recipe = small(text_file, lr_scheduler="constant", warmup_steps=4, max_steps=6)
    finetune(relu_llama, tmp_path / "out", recipe, progress=progress)
    shares = [rate / recipe.learning_rate for rate in rates]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])


def test_every_step_of_every_epoch_is_whole(relu_llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"x{i} = {i}\n" for i in range(120)), encoding="utf-8")
    ids = []

    def watched(trainer):
        compute = trainer.compute_loss

        def seeing(model, inputs, *args, **kwargs):
            ids.append(len(inputs["input_ids"]))
            return compute(model, inputs, *args, **kwargs)

        trainer.compute_loss = seeing

    recipe = small(text, max_steps=None, epochs=2, eval_fraction=0, batch_size=4)
    done = finetune(relu_llama, tmp_path / "out", recipe, progress=Watching(watched))
    assert sum(ids) * recipe.seq_len == done.num_tokens
    assert done.num_steps % 2 == 0


class SeesTwoGpus(TrainingArguments):
    def __post_init__(self):
        super().__post_init__()
        self._n_gpu = 2


def test_a_lone_process_takes_one_of_two_gpus(relu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("twellctl.training.build.TrainingArguments", SeesTwoGpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    notes, sizes = [], []
    progress = Watching(lambda trainer: sizes.append(trainer.args.train_batch_size))
    progress.note = notes.append
    finetune(relu_llama, tmp_path / "out", small(text_file, max_steps=1), progress=progress)
    said = "on one of 2 GPUs; on all: torchrun --nproc-per-node 2 -m twellctl finetune ..."
    assert notes[0] == said
    assert sizes == [SMALL["micro_batch_size"]]


@pytest.mark.parametrize(
    ("batch", "most", "processes", "taken"),
    [
        (24, 8, 1, (8, 3)),
        (24, 8, 2, (6, 2)),
        (24, 5, 1, (4, 6)),
        (2, 8, 2, (1, 1)),
        (26, 8, 2, (1, 13)),
    ],
)
def test_as_many_blocks_at_once_as_divide_a_share(batch, most, processes, taken):
    recipe = Recipe(batch_size=batch, micro_batch_size=most)
    assert micro_batch(recipe, processes) == taken


def test_fewer_blocks_at_once_than_asked_are_said(relu_llama, text_file, tmp_path):
    notes, progress = [], Progress()
    progress.note = notes.append
    recipe = small(text_file, max_steps=1, batch_size=4, micro_batch_size=3)
    finetune(relu_llama, tmp_path / "out", recipe, progress=progress)
    assert notes[0].startswith("2 blocks at once, for micro-batch-size 3: they must divide the 4")


@pytest.mark.parametrize("family", ["llama", "phi3"])  # gate and up apart, and in one
def test_learning_rate_is_left_to_the_size_of_the_weights(make_model, text_file, tmp_path, family):
    silu = make_model(family, num_hidden_layers=3)
    with weights_in(silu) as weights:
        for name, weight in weights.items():  # all but the layer in the middle mean nothing
            if ".mlp." in name and ".layers.1." not in name:
                weight.mul_(3)
    middle = [w.double().flatten() for name, w in weights.items() if ".layers.1.mlp." in name]
    rms = torch.cat(middle).square().mean().sqrt()
    convert(silu, tmp_path / "relu")
    file = tmp_path / "relu/model.safetensors"
    file.symlink_to(file.rename(tmp_path / "elsewhere.safetensors"))
    recipe = small(text_file, max_steps=1, learning_rate=None)
    finetune(tmp_path / "relu", tmp_path / "out", recipe)
    rate = resolve_recipe(tmp_path / "out/recipe.yaml").learning_rate
    assert rate == pytest.approx(0.015 * float(rms), rel=0.05)
    assert f"{rate:.1e}" == f"{rate:e}".replace("00000e", "e")  # two digits
    works = open_checkpoint(tmp_path / "out")  # and shall stay so
    assert default_rate(works) == pytest.approx(0.1 * rate, rel=0.1)


@pytest.fixture
def mixed(text_file, tokenizer, tmp_path):
    """`mixed(limit, files)`: the run's tokens of files by name; what "x" and "q" are in them."""

    def mix(limit: int, files: dict[str, str]) -> tuple[np.ndarray, list[int]]:
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        changes = {"data": [str(tmp_path / name) for name in files], "max_steps": None}
        changes |= {"max_tokens": limit, "seq_len": 8, "batch_size": 1, "eval_fraction": 0.0}
        runs._write_run_tokens(tmp_path, small(text_file, **changes), tokenizer, None)
        ids = tokenizer.encode("xq", add_special_tokens=False)
        return np.fromfile(tmp_path / "tokens.bin", np.int32), ids

    return mix


X, Q = '{"text": "x"}\n', '{"text": "q"}\n'  # rows of one token, and the end of a text


@pytest.mark.parametrize(("limit", "share"), [(2000, 0.5), (6000, 0.3)])
def test_of_each_data_equally_many_tokens_are_taken(mixed, limit, share):
    """As long as it lasts: the first file has 1800 tokens, the second many more."""
    tokens, ids = mixed(limit, {"x.jsonl": X * 900, "q.jsonl": Q * 9000})
    assert limit <= len(tokens) < limit + 600
    first, second = ((tokens == number).sum() for number in ids)
    assert first / (first + second) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("steps", "said"), [(4, None), (40, r", the text \d+\.\d times$")])
def test_how_often_the_text_is_read_is_said(success, relu_llama, text_file, tmp_path, steps, said):
    data = tmp_path / "text.txt"
    data.write_text("yes and no " * 400)
    flags = ["--seq-len=32", f"--max-steps={steps}", "--batch-size=4", "--save-steps=0"]
    flags += ["--teacher=none", "--optimizer=adamw", "--eval-fraction=0", f"--data={data}"]
    _, stderr = success("finetune", relu_llama, tmp_path / "out", *flags)
    (line,) = (line for line in stderr if f"{steps} steps of 128 tokens" in line)
    assert re.search(said, line) if said else line.endswith("tokens")


@pytest.mark.parametrize(("limit", "words"), [(800, (9000, 9000)), (40_000, (200_000, 9000))])
def test_a_long_text_leaves_room_for_others(mixed, limit, words):
    """Two texts; each word is a token."""
    tokens, (_, q) = mixed(limit, {"x.txt": "x" * words[0], "q.txt": "q" * words[1]})
    assert (tokens == q).sum() >= min(words[1], 0.35 * limit)


def test_of_more_files_than_may_be_open_equally_much_is_taken(mixed):
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = {f"{number}.jsonl": X * 60 for number in range(299)} | {"last.jsonl": Q * 60}
    there = len(os.listdir("/proc/self/fd"))  # of the tests before this one
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 200, most))
    try:
        tokens, (_, q) = mixed(12_000, files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    assert (tokens == q).mean() == pytest.approx(0.5 / len(files), rel=0.05)


def test_weights_without_a_size_leave_no_learning_rate(make_model, text_file, tmp_path):
    silu = make_model("llama")
    with weights_in(silu) as weights:
        for name in weights:
            weights[name] *= ".layers.1.mlp." not in name
    convert(silu, tmp_path / "relu")
    with pytest.raises(TwellError, match="layer 1 are all zero, so give --learning-rate"):
        finetune(tmp_path / "relu", tmp_path / "out", small(text_file, learning_rate=None))
    assert not (tmp_path / "out").exists()


def test_the_first_line_says_which_schedule(success, relu_llama, text_file, tmp_path):
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in (SMALL | {"max_steps": 1}).items()]
    cases = (("constant", "price held constant at 0.001"), ("target", "steered until"))
    for schedule, said in cases:
        extra = [f"--data={text_file}", f"--l1-schedule={schedule}", "--teacher=none"]
        _, stderr = success("finetune", relu_llama, tmp_path / schedule, *flags, *extra)
        assert said in stderr[0]
        assert "no teacher" in stderr[0]
        assert stderr[0].endswith("1 steps of 128 tokens")


@pytest.mark.parametrize("teacher", ["silu", "other", "none"])
def test_another_teacher_than_the_source_is_noted(
    silu_llama, relu_llama, make_model, text_file, tmp_path, teacher
):
    other = make_model("llama", intermediate_size=64)
    names = {"silu": str(silu_llama), "other": str(other), "none": "none"}
    recipe, progress, said = small(text_file, max_steps=1, teacher=names[teacher]), Progress(), []
    progress.note = said.append
    finetune(relu_llama, tmp_path / "out", recipe, progress=progress)
    noted = f"beware: the teacher {other} is not the model that {relu_llama} was made from"
    warnings = [line[: len(noted)] for line in said if line.startswith("beware")]
    assert warnings == [noted] * (teacher == "other")


def test_a_teacher_is_known_by_its_id_and_family(relu_llama, silu_llama):
    student, teacher = open_checkpoint(relu_llama), open_checkpoint(silu_llama)
    twell = student.config["twell"] | {"source": "some/model"}
    student = dataclasses.replace(student, config=student.config | {"twell": twell})
    for name, is_source in ((silu_llama, True), ("some/model", True), ("another/model", False)):
        named = dataclasses.replace(teacher, name=str(name))
        assert may_be_source(student, named) is is_source
    other = dataclasses.replace(teacher, config=teacher.config | {"model_type": "qwen2"})
    assert not may_be_source(student, other)
    config = {k: v for k, v in student.config.items() if k != "twell"}
    assert may_be_source(dataclasses.replace(student, config=config, name="a/b"), named)


def test_a_model_that_no_export_takes_is_noted(make_model, text_file, tmp_path):
    convert(make_model("falcon_h1"), tmp_path / "relu")
    recipe, progress, notes = small(text_file, max_steps=1, teacher="none"), Progress(), []
    progress.note = notes.append
    finetune(tmp_path / "relu", tmp_path / "out", recipe, progress=progress)
    (said,) = [line for line in notes if line.startswith("beware")]
    assert "uses hidden_act outside of its FFNs" in said
    assert said.endswith("it cannot be exported")
