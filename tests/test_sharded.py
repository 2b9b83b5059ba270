"""Runs whose weights are sharded over processes: those of one process, to rounding."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from compiled import EVERY_CASE
from finetune_runs import InterruptAt, small
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twellctl.convert import convert
from twellctl.dry_run import OnSeveral, _on_several
from twellctl.errors import TwellError, UsageError
from twellctl.finetune import Interrupted, finetune
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import without_values
from twellctl.training import memory
from twellctl.training.launcher import as_launched
from twellctl.training.memory import least_bytes
from twellctl.training.recipe import Recipe, run_folder
from twellctl.training.runs import last_checkpoint
from twellctl.training.sharded_weights import _stored_name

pytestmark = pytest.mark.usefixtures("no_answers")

SHORT = {"max_steps": 6, "eval_steps": 0, "batch_size": 6, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def sources(make_model, tmp_path_factory) -> dict[bool, Path]:
    """Models by whether their head is tied; no size is a multiple of 2 and 3.

    One is stored in several files, the tied one without the prefix of the body.
    """
    made = {}
    for tied in (False, True):
        sizes = {"hidden_size": 20, "intermediate_size": 47, "head_dim": 6}
        silu = make_model("llama", tie_word_embeddings=tied, shard_size="30KB", **sizes)
        made[tied] = tmp_path_factory.mktemp("relu") / "model"
        if tied:
            bare = {name.removeprefix("model."): t for name, t in stored(silu).items()}
            for file in silu.glob("*.safetensors*"):
                file.unlink()
            save_file(bare, silu / "model.safetensors", {"format": "pt"})
        convert(silu, made[tied])
    return made


@pytest.fixture(scope="module")
def alone(sources, text_file, tmp_path_factory):
    """What the same runs give in one process, by whether the head is tied."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = small(text_file, **SHORT)
    return {tied: finetune(model, folder / str(tied), recipe) for tied, model in sources.items()}


def settings(text_file: Path, **changes) -> dict:
    return {"text_file": str(text_file)} | SHORT | changes


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_near(folder: Path, wanted: Path) -> None:
    found, expected = stored(folder), stored(wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.allclose(found[name], tensor, atol=1e-5), name


@pytest.mark.parametrize(("count", "at_once"), [(3, 1), *([(3, 1 << 26)] if EVERY_CASE else [])])
def test_muon_by_owners_is_muon(processes, count, at_once):
    away = processes("muon", count, at_once)
    assert max(away) < 1e-5
    assert len(away) == count


@pytest.mark.parametrize(("count", "tied"), [(2, False), (3, True)] if EVERY_CASE else [(3, True)])
def test_a_sharded_run_is_that_of_one_process(
    processes, sources, alone, text_file, tmp_path, count, tied
):
    out, wanted = tmp_path / "out", alone[tied]
    changes = settings(text_file, gradient_checkpointing=tied)
    ends = processes("run", count, str(sources[tied]), str(out), changes, {"file_bytes": 20_000})
    assert len(ends) == count
    assert all(end == ends[0] for end in ends), "the controllers of the processes disagree"
    assert ends[0] == pytest.approx([wanted.l1, wanted.density], rel=1e-5)
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_near(out, wanted.out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored(out).items())
    assert not run_folder(out).exists()


REPLICAS = {
    "sent on the way": (2, {"small": 500}),
    "recorded by one": (2, {"small": 500, "recorded_by": [0]}),
}
if EVERY_CASE:
    REPLICAS["sent at the end"] = 3, {"small": 10**6}
    REPLICAS["recorded"] = 2, {"small": 500, "recorded_by": [0, 1]}


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_are_one_process(processes, sources, alone, text_file, tmp_path, name):
    (count, how), out, wanted = REPLICAS[name], tmp_path / "out", alone[True]
    changes = settings(text_file, shard="never")
    ends = processes("run", count, str(sources[True]), str(out), changes, how)
    assert all(end == ends[0] for end in ends), "the controllers of the processes disagree"
    assert ends[0] == pytest.approx([wanted.l1, wanted.density], rel=1e-5)
    assert_near(out, wanted.out)


def test_gradients_that_are_complete_in_another_order(processes):
    assert max(processes("means", 2)) < 1e-5


@pytest.mark.parametrize("shard", ["always", "never"])
def test_resumed_on_more_or_fewer_processes(processes, sources, alone, text_file, tmp_path, shard):
    def go_on(count, **how):
        changes = settings(text_file, shard=shard, micro_batch_size=3)
        return processes("run", count, str(sources[True]), str(out), changes, {"small": 500} | how)

    out = tmp_path / "out"
    said = go_on(2, interrupt_at=2)
    assert said[0].startswith("interrupted at step 2 of 6")
    assert said[0] == said[1]
    if shard == "always":
        other = tmp_path / "other"
        shutil.copytree(run_folder(out), run_folder(other))
        for file in run_folder(other).glob("checkpoint-2/sharded/*.distcp"):
            file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(TwellError, match="distcp is damaged or missing: remove that"):
            finetune(sources[True], other, small(text_file, **SHORT), resume=True)
    assert go_on(3, interrupt_at=4, resume=True)[2].startswith("interrupted at step 4 of 6")
    (end,) = go_on(1, resume=True)
    assert end == pytest.approx([alone[True].l1, alone[True].density], rel=1e-5)
    assert_near(out, alone[True].out)


@pytest.mark.parametrize(
    ("how", "said", "kept"),
    [
        ({"kill_at": 5}, "another process of this run has ended; --resume continues from", {2, 4}),
        ({"kill_in_save": True}, "another process of this run has ended; no checkpoint", set()),
        ({"full_at": 3}, "out.run could not be written: a checkpoint was not written", {2}),
        ({"first_full_after": 1}, "out.run could not be written: torch did not write", {2}),
    ],
    ids=["killed", "killed in a save", "full", "full in the first"],
)
def test_what_fails_keeps_the_last_checkpoint(
    processes, sources, alone, text_file, tmp_path, how, said, kept
):
    out, changes = tmp_path / "out", settings(text_file, save_steps=2, micro_batch_size=3)
    line = processes("run", 2, str(sources[False]), str(out), changes, how)[0]
    assert said in line
    assert not out.exists()
    found = last_checkpoint(run_folder(out))
    assert found.name in {f"checkpoint-{step}" for step in kept} if kept else found is None
    if "kill_at" in how:
        recipe = small(text_file, **SHORT)
        finetune(sources[False], out, recipe, resume=True)
        assert_near(out, alone[False].out)


def test_a_checkpoint_that_was_not_sharded(processes, sources, text_file, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        finetune(sources[False], out, small(text_file, **SHORT), progress=InterruptAt(1))
    words = str(sources[False]), str(out), settings(text_file), {"resume": True}
    lines = processes("run", 2, *words)
    assert lines[0] == lines[1]
    said = "checkpoint-1 is of a run that was not sharded: --resume it with --shard never"
    assert said in lines[0]


def test_each_reads_its_rows(processes, make_model):
    assert processes("load", 3, str(make_model("falcon_h1"))) == [[], [], []]


def test_a_weight_under_no_known_name(sources):
    checkpoint = open_checkpoint(sources[True])
    model = without_values(checkpoint, torch.float32)
    assert _stored_name(model, "model.norm.weight", checkpoint) == "norm.weight"
    head = {"lm_head.weight": checkpoint.tensors["embed_tokens.weight"]}
    only_head = dataclasses.replace(checkpoint, tensors=head)
    assert _stored_name(model, "model.embed_tokens.weight", only_head) == "lm_head.weight"
    with pytest.raises(TwellError, match=r"has no model\.norm\.weight under that name"):
        _stored_name(model, "model.norm.weight", only_head)


def test_several_processes_measure_together(processes, sources, text_file):
    changes = {"text_file": str(text_file), "shard": "always"}
    found = processes("dry", 2, str(sources[False]), changes, {})
    num_trained = sum(t.numel() for t in stored(sources[False]).values()) + 2 * 47
    assert found == [[2, True, num_trained, True]] * 2


def test_a_dry_run_refuses_processes_with_other_settings_or_text(
    processes, sources, text_file, tmp_path
):
    changes = {"text_file": str(text_file), "shard": "always"}
    longer = tmp_path / text_file.name
    longer.write_text(text_file.read_text() + "more\n")
    for other, said in (
        ({"micro_batch_size": 2}, "another micro-batch-size than the first: start all with"),
        ({"text_file": str(longer)}, "another text than the first"),
    ):
        for line in processes("dry", 2, str(sources[False]), changes, other):
            assert said in line


@pytest.mark.parametrize("what", [{"recipe": 3}, {"text": None}, {"more": 1}, {}])
def test_processes_that_see_something_else(processes, what):
    lines = processes("same", 3, what)
    said = f"process 2 has another {next(iter(what), '')} than the first: give all the same"
    assert lines == [said if what else None] * 3


def test_a_checkpoint_ends_where_one_process_writes_longer(processes, tmp_path):
    steps = processes("slow_disk", 2, str(tmp_path / "checkpoint"))
    assert steps[0] == steps[1] > 2
    assert (tmp_path / "checkpoint" / "sharded" / ".metadata").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "fsdp_version 1: say 2, or start with torchrun"),
        ({"FSDP_VERSION": "2", "FSDP_FORWARD_PREFETCH": "true"}, "fsdp_forward_prefetch true"),
        ({"FSDP_VERSION": "2", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"}, "leave it out"),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "nothing is kept in host memory"),
        (
            {"FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "give --gradient-checkpointing",
        ),
    ],
)
def test_an_accelerate_config_that_cannot_work(monkeypatch, settings, said):
    for name, value in ({"ACCELERATE_USE_FSDP": "true"} | settings).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TwellError, match=said):
        as_launched(Recipe())


def test_an_accelerate_config_that_shards(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "false")
    assert as_launched(Recipe()).shard == "always"
    assert as_launched(Recipe(shard="never")).shard == "never"


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(TwellError, match="4 processes were started on a machine with 2 GPUs"):
        as_launched(Recipe())


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_count_of_processes_that_is_no_number(monkeypatch, name):
    monkeypatch.setenv(name, "two")
    with pytest.raises(TwellError, match=f"^{name} .* must be a whole number, got 'two'"):
        as_launched(Recipe())


def test_what_several_gpus_would_hold(sources, monkeypatch):
    checkpoint = open_checkpoint(sources[False])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    least = least_bytes(checkpoint, Recipe())
    monkeypatch.setattr(memory, "total_bytes", lambda: 2 * least + 1)
    assert _on_several(checkpoint, Recipe()) == (OnSeveral(2, least, False),)
    forced = _on_several(checkpoint, Recipe(shard="always"))
    assert forced == tuple(OnSeveral(n, least // n, True) for n in (2, 4, 8))
    monkeypatch.setattr(memory, "total_bytes", lambda: 2 * least - 1)
    assert _on_several(checkpoint, Recipe()) == forced
    assert not _on_several(checkpoint, Recipe(shard="never"))[0].is_sharded
    assert not _on_several(checkpoint, Recipe(lora_rank=2))[0].is_sharded


def test_lora_is_not_sharded():
    """Also where one process runs alone, before anything is loaded."""
    with pytest.raises(UsageError, match="leave out --lora-rank or --shard"):
        as_launched(Recipe(lora_rank=2, shard="always"))
