"""finetune on a GPU: compiled layers give what the plain ones give."""

import dataclasses

import pytest
import torch

from twellctl.convert import convert
from twellctl.finetune import finetune
from twellctl.models.loading import load_model
from twellctl.training import build
from twellctl.training.build import trainer_arguments
from twellctl.training.captured_part import CapturedPart
from twellctl.training.recipe import resolve_recipe
from twellctl.training.teacher import Teacher
from twellctl.training.trainer import PARTS_BEFORE_CAPTURE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("bf16", "near"), [(False, 1e-3), (True, 5e-3)])
def test_compiled_is_as_plain(make_model, text_file, tmp_path, monkeypatch, bf16, near):
    """Fused bf16 keeps more digits than one operation after the other: float32 shows the rest.

    Half the loss is cross-entropy: at first model and teacher are the same, so that the KL's
    gradient is the teacher's rounding alone, and the optimizer makes whole steps of it.
    """
    if not bf16:
        in_float32(monkeypatch)
    settings = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 10}
    convert(make_model("llama", initializer_range=0.05, **settings), tmp_path / "relu")
    flags = {"data": [str(text_file)], "seq_len": 64, "batch_size": 8, "micro_batch_size": 4}
    flags |= {"max_steps": 12, "eval_blocks": 4, "save_steps": 0, "learning_rate": 1e-3}
    flags["teacher_weight"] = 0.5
    done = {}
    for how in (False, True):
        recipe = resolve_recipe(None, flags | {"compile": how})
        out = tmp_path / str(how)
        done[how] = finetune(tmp_path / "relu", out, recipe)
    plain, compiled = done[False], done[True]
    assert compiled.cross_entropy == pytest.approx(plain.cross_entropy, rel=near)
    assert compiled.density_by_layer == pytest.approx(plain.density_by_layer, rel=0.03)


def in_float32(monkeypatch):
    """All of a run, its teacher too: what that rounds would be most of the first steps."""

    def arguments(*args):
        made = trainer_arguments(*args)
        changed = dataclasses.replace(made, bf16=False)
        changed._n_gpu = made.n_gpu  # which is no field: there may be more GPUs
        return changed

    def load(teacher, sharded=False):
        model = load_model(teacher.checkpoint, dtype=torch.float32, activation=teacher.activation)
        return model.requires_grad_(False)

    monkeypatch.setattr(build, "trainer_arguments", arguments)
    monkeypatch.setattr(Teacher, "load", load)


def test_recorded_steps_are_as_those_that_are_not(make_model, text_file, tmp_path, monkeypatch):
    """Two parts a step, evaluations between: what changes is in tensors."""
    in_float32(monkeypatch)
    convert(make_model("llama", initializer_range=0.05), tmp_path / "relu")
    flags = {"data": [str(text_file)], "seq_len": 64, "batch_size": 8, "micro_batch_size": 4}
    flags |= {"max_steps": 12, "eval_steps": 5, "eval_blocks": 4, "save_steps": 0}
    flags |= {"learning_rate": 1e-3, "compile": True}
    replayed, done = [], {}
    replay = CapturedPart.__call__
    monkeypatch.setattr(
        CapturedPart, "__call__", lambda part, ids: replayed.append(ids) or replay(part, ids)
    )
    for how in (True, False):
        if not how:
            monkeypatch.setattr(build, "_captures", lambda recipe: False)
        out = tmp_path / str(how)
        recipe = resolve_recipe(None, flags)
        done[how] = finetune(tmp_path / "relu", out, recipe)
    assert len(replayed) == 2 * 12 - PARTS_BEFORE_CAPTURE
    assert done[True].cross_entropy == pytest.approx(done[False].cross_entropy, rel=1e-4)
    assert done[True].density_by_layer == pytest.approx(done[False].density_by_layer, rel=0.01)
