"""From a loaded model to its engine: which decoder, how much room, which tokens end a sequence."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from twellctl.decoding.coded_decoder import CodedDecoder
from twellctl.decoding.coded_linear import expand_layers
from twellctl.decoding.decode_engine import DecodeEngine
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.drafting import ModelDrafter
from twellctl.decoding.engine import WHOLE
from twellctl.decoding.head_drafter import HeadDrafter
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.lone_decoder import LoneDecoder
from twellctl.decoding.lookup import LookupDrafter
from twellctl.decoding.paged_cache import PagedCache, page_bytes
from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.rounds import Drafter, Drafts
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.stable import why_not_stable
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.errors import TwellError
from twellctl.heads.head import DraftHead
from twellctl.models.loading import gpu_memory

logger = logging.getLogger(__name__)
DECODERS = (KernelDecoder, TorchDecoder)  # the best first; LoneDecoder takes what they do not
DESCRIPTIONS = {
    KernelDecoder: "twellctl's kernels",
    TorchDecoder: "transformers' own code",
    LoneDecoder: "transformers' own code, one sequence at a time",
}
# kernels/LAB.md, "Which tables are older": Granite-3-8B and Falcon3-3B, dense and at 5 %
SLOW = ", some two to five times slower than the kernels"
MAX_RUNNING, MAX_WAITING = 64, 256
GPU_SHARE = 0.6  # of the memory that is free once the model is loaded
CPU_CACHE_BYTES = 1 << 30


def open_engines(
    model: PreTrainedModel,
    extra_eos: Iterable[int | None] = (),
    *,
    max_waiting: int = MAX_WAITING,
    **how: Any,
) -> list[DecodeEngine]:
    """An `Engine` (engine.py) whose worker has started, and with a `draft` one of that alone, by
    the same worker; `how`: as of `open_schedulers`.

    Of each, more than `max_waiting` generations that wait for room are refused.
    """
    first, *others = open_schedulers(model, extra_eos, draft_alone=True, **how)
    engine = DecodeEngine(first, max_waiting)
    return [engine, *(DecodeEngine(other, max_waiting, engine) for other in others)]


def open_scheduler(
    model: PreTrainedModel, extra_eos: Iterable[int | None] = (), **how: Any
) -> Scheduler:
    """What continues sequences of `model`; `how`: as of `open_schedulers`."""
    return open_schedulers(model, extra_eos, **how)[0]


def open_schedulers(
    model: PreTrainedModel,
    extra_eos: Iterable[int | None] = (),
    *,
    cache_bytes: int | None = None,
    max_running: int = MAX_RUNNING,
    gates: str = WHOLE,
    decoder: Decoder | None = None,
    stable: bool = False,
    draft: PreTrainedModel | DraftHead | None = None,
    drafts: Drafts | None = None,
    draft_alone: bool = False,
) -> list[Scheduler]:
    """What continues sequences of `model`, up to `max_running` at once, in the calling thread.

    `extra_eos`: tokens that end a text, like the tokenizer's, with those that the model's configs
    name. `cache_bytes` bounds the key-value cache; None: a share of the GPU's free memory, or
    `CPU_CACHE_BYTES`. `gates` as of `KernelDecoder`. `decoder`: another one than
    `open_decoder` would choose. `stable`: tokens do not depend on who is beside (stable.py).
    Layers of a model that was loaded packed are expanded, unless the decoder takes codes alone.

    `draft`: a model with the attention of `model`, a fit of it, that drafts (drafting.py), or a
    draft head of it (head_drafter.py); the tokens are those of `model`, stably, by a decoder that
    is chosen here. What the text repeats is drafted, too (lookup.py). `drafts`: those of each
    round, None: what pays. `draft_alone`: a second scheduler continues sequences of a `draft` that
    is a model, by the same decoder and in the same cache. `TwellError` for models that no decoder
    can drive so.
    """
    decoders: list[Decoder] = [] if decoder is None else [decoder]
    if isinstance(draft, DraftHead):
        decoders = [_open_for_head(model)]
    elif draft is not None:
        decoders = open_pair(model, draft, gates)
    elif not decoders:
        alone = max_running == 1
        decoders = [open_decoder(model, gates, stable=stable, alone=alone)]
    decoder, *others = decoders
    pages = num_pages(decoder, cache_bytes, max_running, decoder.context)
    with torch.inference_mode():
        cache = PagedCache(decoder.shapes, pages, decoder.device)
        # the drafter first: it may lay the head anew, which both share
        for each in (*others, decoder):
            each.attach(cache)
        drafters: list[Drafter] = [*map(ModelDrafter, others)]
        if isinstance(draft, DraftHead):
            drafters.append(_head_drafter(draft, decoder))
        if drafters:
            drafters.append(LookupDrafter(max_running, decoder.context, decoder.device))
    on_gpu = decoder.device.type == "cuda"
    pool, stream = PagePool(pages), torch.cuda.Stream(decoder.device) if on_gpu else None
    ends = list(extra_eos)
    how = pool, max_running, eos_tokens(model, ends)
    made = [Scheduler(decoder, *how, drafters, drafts, stream)]
    if isinstance(draft, PreTrainedModel) and draft_alone:
        how = pool, max_running, eos_tokens(draft, ends)
        made += [Scheduler(other, *how, stream=stream) for other in others]
    return made


def open_decoder(
    model: PreTrainedModel, gates: str = WHOLE, *, stable: bool = False, alone: bool = False
) -> Decoder:
    """The best decoder that can drive `model`; a slow one is logged. `alone`: for one sequence at a
    time, which needs no weights beside codes of 4 bits."""
    if alone and not stable and CodedDecoder.why_not(model) is None:
        return CodedDecoder(model)
    expand_layers(model)
    kind = _chosen(model, stable=stable)
    how: dict[str, Any] = {} if kind is LoneDecoder else {"stable": stable}
    return kind(model, **how, **_gates_of(kind, gates))


def open_pair(model: PreTrainedModel, draft: PreTrainedModel, gates: str = WHOLE) -> list[Decoder]:
    """Two for one cache: a stable one of `model`, and one of `draft`, of the same kind or over
    codes alone."""
    kind, why = _choose(model, draft, stable=True)
    if kind is LoneDecoder:
        raise TwellError(f"exact answers need a cache that two models share: {why}")
    _chosen(model, draft, stable=True)
    first: Decoder = kind(model, stable=True)
    found = [first, _open_draft(kind, draft, gates)]
    if found[0].shapes != found[1].shapes:
        raise TwellError("the two models do not cache keys and values of the same shapes")
    return found


def _open_for_head(model: PreTrainedModel) -> Decoder:
    """A stable decoder of `model` that tells its states. `TwellError` if there is none."""
    kind, why = _choose(model, stable=True)
    if kind is LoneDecoder:
        raise TwellError(f"exact answers need a cache in pages: {why}")
    return open_decoder(model, stable=True)


def _head_drafter(head: DraftHead, decoder: Decoder) -> HeadDrafter:
    assert isinstance(decoder, KernelDecoder | TorchDecoder)  # _open_for_head
    return HeadDrafter(head, decoder)


def _open_draft(kind: Any, draft: PreTrainedModel, gates: str) -> Decoder:
    """Beside a decoder of `kind`, whose head it reads."""
    if kind is KernelDecoder and CodedDecoder.why_not(draft) is None:
        return CodedDecoder(draft)
    expand_layers(draft)
    return kind(draft, **_gates_of(kind, gates))


def _gates_of(kind: Any, gates: str) -> dict[str, Any]:
    return {"gates": gates} if kind is KernelDecoder else {}


def why_no_gain(model: PreTrainedModel, draft: PreTrainedModel | DraftHead) -> str | None:
    """None if drafts may make answers of `model` faster here, else a sentence."""
    models = (model, draft) if isinstance(draft, PreTrainedModel) else (model,)
    kind, _ = _choose(*models, stable=True)
    if kind is KernelDecoder:
        return None
    return f"drafts gain no speed here: {describe_decoder(model, draft, stable=True)}"


def describe_decoder(*drafted: PreTrainedModel | DraftHead, stable: bool = False) -> str:
    """In words: the decoder that is taken for the models among them together, and why not a better
    one."""
    models = [one for one in drafted if isinstance(one, PreTrainedModel)]
    kind, why = _choose(*models, stable=stable)
    slow = SLOW if models[0].device.type == "cuda" else ""
    return DESCRIPTIONS[kind] if why is None else f"{DESCRIPTIONS[kind]}{slow} ({why})"


def _chosen(*models: PreTrainedModel, stable: bool) -> Any:
    """The best decoder's class; a slow one is logged."""
    kind, why = _choose(*models, stable=stable)
    if kind is LoneDecoder or (why and models[0].device.type == "cuda"):
        logger.warning("the engine runs %s", describe_decoder(*models, stable=stable))
    return kind


def _choose(*models: PreTrainedModel, stable: bool = False) -> tuple[Any, str | None]:
    """The best decoder's class for all `models`, the first `stable`, and what stands against the
    next better one."""
    why = None
    for kind in DECODERS:
        said = next(filter(None, map(kind.why_not, models)), None)
        if said is None and stable and kind is KernelDecoder:
            said = why_not_stable(models[0])
        if said is None:
            return kind, why
        why = said
    return LoneDecoder, why


def eos_tokens(model: PreTrainedModel, extra_eos: Iterable[int | None] = ()) -> frozenset[int]:
    """The tokens that end a text, by the model's configs, and `extra_eos`."""
    found = [*extra_eos]
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found += eos if isinstance(eos, list) else [eos]
    for token in found:
        if not isinstance(token, int | None):
            raise TwellError(f"eos_token_id must be a token or a list of tokens, got {token!r}")
    return frozenset(token for token in found if token is not None)


def num_pages(decoder: Decoder, cache_bytes: int | None, max_running: int, longest: int) -> int:
    """No more than sequences of `longest` tokens can use, and what `cache_bytes` hold."""
    if cache_bytes is None:
        on_gpu = decoder.device.type == "cuda"
        cache_bytes = int(GPU_SHARE * gpu_memory(decoder.device)[0]) if on_gpu else CPU_CACHE_BYTES
    most = min(max_running, decoder.max_rows or max_running) * pages_for(longest) + 1
    if not (size := page_bytes(decoder.shapes)):
        return most
    if (held := cache_bytes // size) < 2:
        raise TwellError(f"cache_bytes must hold two pages of {size} bytes, got {cache_bytes}")
    return min(held, most)
