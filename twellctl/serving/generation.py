"""The engine over transformers' `generate`: one worker thread, one generation at a time."""

import asyncio
import gc
import queue
import random
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from twellctl.bundle.twell_model import gated_ffns
from twellctl.serving.engine import (
    EngineClosed,
    EngineError,
    EngineStats,
    OutOfMemory,
    Sampling,
    Token,
)


class _Stopped(Exception):
    """Raised inside `generate` when nobody waits for its tokens any more."""


class _Job(BaseStreamer):
    """One generation: what was asked, and the way back to the event loop that asked."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling):
        self.prompt, self.sampling = list(prompt), sampling
        self.stopped = threading.Event()
        self.events: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._prompt_seen = False

    def emit(self, event: int | Exception | None) -> None:
        """A token, a failure, or None for the end; called from the worker thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop was closed meanwhile
            self.stopped.set()

    def put(self, value: torch.Tensor) -> None:
        """What `generate` hands to a streamer: the prompt first, then each token."""
        if self._prompt_seen:
            self.emit(int(value))
        self._prompt_seen = True

    def end(self) -> None:
        """`generate` is through; the worker says so itself."""


class GenerateEngine:
    """An `Engine` (engine.py) for a loaded model; generations wait for each other in order."""

    def __init__(self, model: PreTrainedModel, extra_eos: int | None = None):
        """`extra_eos`: the tokenizer's end token, beside those the model's configs name."""
        self.context = model.config.max_position_embeddings
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.eos_tokens = _eos_tokens(model, extra_eos)
        # Only the request shall say how tokens are chosen, not a generation_config.json.
        model.generation_config = GenerationConfig()
        self._model = model
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: _Job | None = None
        self._closed = False
        for ffn in gated_ffns(model):
            ffn.register_forward_pre_hook(self._leave_if_stopped)
        self._worker = threading.Thread(target=self._work, name="generation", daemon=True)
        self._worker.start()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Token, None]:
        if self._closed:
            raise EngineClosed("the server is stopping")
        job = _Job(prompt, sampling)
        self._jobs.put(job)
        try:
            while (event := await job.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield Token(event)
        finally:
            job.stopped.set()

    def stats(self) -> EngineStats:
        return EngineStats(int(self._running is not None), self._jobs.qsize(), 1, 0, 0, 0.0, ())

    def close(self, drain_seconds: float = 0) -> None:
        self._closed = True
        self._jobs.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._running = job
            job.emit(self._outcome(job))

    def _outcome(self, job: _Job) -> Exception | None:
        """Run the job; its failure as a new exception, which holds no frame and so no tensor."""
        try:
            self._generate(job)
        except _Stopped:
            return EngineClosed("the server is stopping") if self._closed else None
        except Exception as error:
            failure = _failure(error)
        else:
            return None
        if isinstance(failure, OutOfMemory):
            gc.collect()
            torch.cuda.empty_cache()
        return failure

    def _generate(self, job: _Job) -> None:
        self._leave_if_stopped()
        device = self._model.device
        prompt = torch.tensor([job.prompt], device=device)
        seed = job.sampling.seed
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(random.getrandbits(63) if seed is None else seed)
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=_generation_config(job.sampling, self.eos_tokens),
                streamer=job,
            )

    def _leave_if_stopped(self, *_: Any) -> None:
        # Runs before every layer's FFN, so that a long prompt can be left half-way too.
        if self._closed or self._running.stopped.is_set():
            raise _Stopped


def _generation_config(sampling: Sampling, eos_tokens: frozenset[int]) -> GenerationConfig:
    common = {
        "max_new_tokens": sampling.max_tokens,
        "eos_token_id": sorted(eos_tokens) or None,
        "pad_token_id": min(eos_tokens, default=0),
    }
    if sampling.temperature < 1e-5:
        return GenerationConfig(do_sample=False, **common)
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        **common,
    )


def _eos_tokens(model: PreTrainedModel, extra_eos: int | None) -> frozenset[int]:
    found = {extra_eos}
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.update(eos if isinstance(eos, list) else [eos])
    return frozenset(token for token in found if token is not None)


def _failure(error: Exception) -> EngineError:
    text = " ".join(str(error).split())
    # The CPU's allocator raises a plain RuntimeError.
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if no_memory or "can't allocate memory" in text:
        return OutOfMemory("out of memory: shorten the prompt or lower max_tokens")
    return EngineError(f"{type(error).__name__}: {text}")
