"""How far two models agree on answers: on what the reference writes, token by token.

Text that others wrote hides what an answer loses: there a right token follows each wrong one.
So the reference answers prompts greedily, both models read these answers, and each writes its own.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twellctl.errors import TwellError
from twellctl.evaluation.answers import Answer, answers
from twellctl.evaluation.results import AnswerScore, Mean
from twellctl.evaluation.settings import Progress
from twellctl.evaluation.windows import batches
from twellctl.models.head_loss import HeadLoss
from twellctl.text.tokens import chat_text

CONFIDENT = 0.9
MAX_TOKENS = 256  # of an answer that is written for agreement alone
PROMPTS = 16  # out of a text that was held out
_OPENING = 128  # tokens of such a text that are continued, where it holds no chats
_MARK = "\N{LEFT WHITE SQUARE BRACKET}"


def compare_answers(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_tokens: int = MAX_TOKENS,
    progress: Progress = lambda done, total: None,
) -> AnswerScore:
    """Let both answer `prompts`, and score their answers."""
    theirs, ours = (
        answers(one, tokenizer, prompts, max_tokens, progress) for one in (reference, model)
    )
    return score_answers(model, reference, prompts, theirs, ours)


def score_answers(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    prompts: Sequence[list[int]],
    theirs: Sequence[Answer],
    ours: Sequence[Answer],
) -> AnswerScore:
    """`theirs` are the reference's answers to `prompts`, which both read; `ours` the model's own.

    Prompts to which there is no answer are left out. `TwellError` for a model that computes NaN.
    """
    answered = [i for i, one in enumerate(theirs) if one.tokens]
    prompts = [prompts[i] for i in answered]
    theirs, ours = [theirs[i] for i in answered], [ours[i] for i in answered]
    read = [[*prompt, *one.tokens] for prompt, one in zip(prompts, theirs, strict=True)]
    columns = _read(model, reference, read, [len(one.tokens) for one in theirs])
    kl, same, sure, flipped = torch.cat(columns).T
    if not kl.isfinite().all():
        raise TwellError("KL on answers is not finite: the model or its reference is broken")
    pairs = list(zip(theirs, ours, strict=True))
    agree = [a.tokens == b.tokens for a, b in pairs]
    parted = [a.agreeing(b) for a, b in pairs]
    others = [place for place, whole in zip(parted, agree, strict=True) if not whole]
    return AnswerScore(
        answers=len(theirs),
        tokens=len(kl),
        kl=_mean_of_parts([part[:, 0] for part in columns]),
        kl_p99=float(kl.quantile(0.99)),
        same_top=float(same.mean()),
        confident=float(sure.mean()),
        flips=float(flipped.mean()),
        agree=sum(agree),
        part_after=statistics.median(others) if others else None,
        ended=sum(answer.ended for answer in ours),
        reference_ended=sum(answer.ended for answer in theirs),
        repeat=sum(answer.repeats for answer in ours),
        reference_repeat=sum(answer.repeats for answer in theirs),
    )


def _read(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    sequences: Sequence[list[int]],
    sizes: Sequence[int],
) -> list[Tensor]:
    """As `_columns`, by both models, whose heads are replaced meanwhile."""
    heads = [HeadLoss(model), HeadLoss(reference)]
    try:
        return _columns(heads, sequences, sizes)
    finally:
        for head in heads:
            head.remove()


@torch.no_grad()
def _columns(
    heads: Sequence[HeadLoss], sequences: Sequence[list[int]], sizes: Sequence[int]
) -> list[Tensor]:
    """For the last `sizes[i]` tokens of each sequence, float64 `[size, 4]` on the CPU.

    The columns are KL(reference || model), same token, reference sure, and reference sure while
    the model ranks another token first.
    """
    found: list[Tensor] = [torch.empty(0)] * len(sequences)
    for batch in batches([len(sequence) for sequence in sequences]):
        longest = len(sequences[batch[0]])
        # padding after a text is not seen by its tokens
        ids = torch.tensor([sequences[i] + [0] * (longest - len(sequences[i])) for i in batch])
        states = [head.states(ids.to(head.model.device)) for head in heads]
        for row, i in enumerate(batch):
            last = row * (longest - 1) + len(sequences[i]) - 1
            rows = range(last - sizes[i], last)
            parts = [torch.empty(0, 4, dtype=torch.float64)]
            for some in heads[0].logit_rows(sizes[i]):
                picked = slice(rows[some].start, rows[some].stop)
                log_p, log_q = (
                    head.logits(of[picked]).float().log_softmax(-1)
                    for head, of in zip(heads, states, strict=True)
                )
                parts.append(_of_tokens(log_p, log_q.to(log_p.device)))
            found[i] = torch.cat(parts)
    return found


def _of_tokens(log_p: Tensor, log_q: Tensor) -> Tensor:
    q, chosen = log_q.exp().max(-1)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    same, sure = log_p.argmax(-1) == chosen, q > CONFIDENT
    return torch.stack([part.double() for part in (kl, same, sure, sure & ~same)], 1).cpu()


def _mean_of_parts(parts: Sequence[Tensor]) -> Mean:
    """The mean over all tokens. Its error is over answers, since tokens of one answer are alike."""
    total = sum(map(len, parts))
    mean = float(torch.cat(list(parts)).sum()) / total
    if len(parts) < 2:
        return Mean(mean, None)
    squares = sum((float(part.sum()) - mean * len(part)) ** 2 for part in parts)
    return Mean(mean, math.sqrt(squares * len(parts) / (len(parts) - 1)) / total)


def prompts_in(tokenizer: PreTrainedTokenizerBase, blocks: Sequence[Tensor]) -> list[list[int]]:
    """`PROMPTS` prompts at even strides out of `blocks` of tokens `[S]`, one of a block.

    A prompt is the text before the first answer of a chat that begins in the block. If no block
    holds one, the prompts are the beginnings of blocks.
    """
    found = []
    if marks := _marks(tokenizer):
        found = list(filter(None, (_chat_in(block.tolist(), *marks) for block in blocks)))
    if not found:
        found = [block[: min(_OPENING, len(block) // 2)].tolist() for block in blocks]
        found = [tokens for tokens in found if tokens]
    return spread(found, PROMPTS)


def question_in(tokenizer: PreTrainedTokenizerBase, prompt: list[int]) -> str:
    """The text of a prompt, without what the chat template puts around the last question."""
    opening, answer = _marks(tokenizer) or ([], [])
    size = len(opening)
    starts = [i for i in range(len(prompt)) if size and prompt[i : i + size] == opening]
    if starts and prompt[-len(answer) :] == answer:
        prompt = prompt[starts[-1] + size : -len(answer)]
    return tokenizer.decode(prompt, skip_special_tokens=True)


def spread(found: Sequence[Any], count: int) -> list[Any]:
    """`count` of them, at even strides, or all if there are fewer."""
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """The tokens before the first question of a chat, and those before an answer.

    None if the template has neither.
    """
    try:
        text = chat_text(tokenizer, [{"role": "user", "content": _MARK}], opens_answer=True)
    except ValueError:
        return None
    before, _, after = text.partition(_MARK)
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
    return (ids[0], ids[1]) if all(ids) else None


def _chat_in(block: list[int], opening: list[int], answer: list[int]) -> list[int] | None:
    if (start := _find(block, opening, 0)) is None:
        return None
    end = _find(block, answer, start + len(opening))
    again = _find(block, opening, start + len(opening))
    if end is None or (again is not None and again < end):
        return None
    return block[start : end + len(answer)]


def _find(tokens: list[int], wanted: list[int], start: int) -> int | None:
    """The place of `wanted` in `tokens`, from `start` on; None if it is not there."""
    size = len(wanted)
    places = range(start, len(tokens) - size + 1)
    return next((i for i in places if tokens[i : i + size] == wanted), None)
