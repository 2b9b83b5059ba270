"""The model that fine-tuning distils from: which one, that it fits, how alike a run answers."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from twellctl.errors import TwellError, UsageError
from twellctl.evaluation.agreement import MAX_TOKENS, compare_answers, prompts_in
from twellctl.evaluation.results import AnswerScore
from twellctl.evaluation.windows import dtype_for
from twellctl.models.checkpoint import Checkpoint, open_checkpoint
from twellctl.models.loading import default_device, load_model, load_tokenizer
from twellctl.models.originals import opened_source
from twellctl.text.blocks import Blocks
from twellctl.training.progress import Progress
from twellctl.training.recipe import UNNAMED_TEACHER, Recipe
from twellctl.training.sharded_weights import load_sharded


@dataclass(frozen=True)
class Teacher:
    """A checkpoint, and the activation to run it with if not its own."""

    checkpoint: Checkpoint
    activation: str | None = None

    def load(self, sharded: bool = False) -> PreTrainedModel:
        """The frozen model; `sharded` over all processes, each has some rows of it."""
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        if sharded:
            model = load_sharded(self.checkpoint, default_device(), dtype, self.activation)
        else:
            model = load_model(self.checkpoint, dtype=dtype, activation=self.activation)
        return model.requires_grad_(False)


def choose_teacher(student: Checkpoint, recipe: Recipe) -> Teacher | None:
    """Whom `student` learns from; nothing is loaded yet.

    "auto": a freshly converted model learns from itself with the activation it had, a fine-tuned
    one from its source on the hub. Of a fine-tuned one from elsewhere the source is not known:
    `UsageError`.
    """
    if recipe.teacher == "none" or not recipe.teacher_weight:
        return None
    if recipe.teacher == UNNAMED_TEACHER:
        raise UsageError("the run of this recipe had a teacher of its own: name it with --teacher")
    if recipe.teacher != "auto":
        return _checked(student, open_checkpoint(recipe.teacher))
    if student.is_only_converted:
        return Teacher(student, student.twell["source_act"])
    if student.twell["source_act"] == "relu":
        return None
    source = opened_source(student)
    if source is None:
        raise UsageError(
            f"{student.name} does not say from which model it was made: name that with --teacher "
            "MODEL, to learn from it, or give --teacher none"
        )
    return _checked(student, source)


def may_be_source(student: Checkpoint, teacher: Checkpoint) -> bool:
    """Whether `student` may have been made from it, as far as its config.json says."""
    ids = {student.twell.get("source"), teacher.hub_id} - {None}
    kinds = {model.config["model_type"] for model in (student, teacher)}
    ffns = {teacher.ffn, replace(student.ffn, intermediate_size=student.own_neurons)}
    return "twell" not in student.config or all(len(found) < 2 for found in (ids, kinds, ffns))


def _checked(student: Checkpoint, teacher: Checkpoint) -> Teacher:
    theirs, ours = teacher.config.get("vocab_size"), student.config.get("vocab_size")
    if theirs != ours:
        raise TwellError(
            f"teacher {teacher.name} has {theirs} tokens, the model has {ours}: "
            "give one with the same tokenizer, or --teacher none"
        )
    return Teacher(teacher)


def answers_of_run(
    folder: Path, teacher: Teacher, held_out: Blocks, progress: Progress
) -> AnswerScore | None:
    """Of the model in `folder`, as others will load it; None, with a note, where it fails.

    Answers are no longer than a block, so that a run of short ones ends soon.
    """
    progress.doing("comparing answers with the teacher's")
    device = default_device()
    try:
        checkpoint = open_checkpoint(folder)
        tokenizer = load_tokenizer(checkpoint)
        blocks = [held_out[i]["input_ids"] for i in range(len(held_out))]
        prompts = prompts_in(tokenizer, blocks)
        if not prompts:
            return None
        model = load_model(checkpoint, dtype=dtype_for(device), device=device)
        most = min(MAX_TOKENS, len(blocks[0]))
        return compare_answers(model, teacher.load(), tokenizer, prompts, most)
    except (TwellError, torch.OutOfMemoryError) as error:  # the model is worth more
        progress.note(f"answers were not compared ({error}): twellctl eval --reference does it")
        return None
