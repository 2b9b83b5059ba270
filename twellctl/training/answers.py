"""What a run is worth, by answers: the teacher's to prompts out of the text that was held out."""

from pathlib import Path

import torch

from twellctl.errors import TwellError
from twellctl.evaluation.agreement import MAX_TOKENS, compare_answers, prompts_in
from twellctl.evaluation.results import AnswerScore
from twellctl.evaluation.windows import dtype_for
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import default_device, load_model, load_tokenizer
from twellctl.text.blocks import Blocks
from twellctl.training.progress import Progress
from twellctl.training.teacher import Teacher


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
