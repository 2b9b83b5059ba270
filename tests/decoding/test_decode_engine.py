"""The engine as HTTP sees it: generators of tokens that may be closed."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from history_decoder import HistoryDecoder, expected

from twellctl.decoding.decode_engine import DecodeEngine
from twellctl.decoding.engine import EngineClosed, EngineError, QueueFull, Sampling
from twellctl.decoding.pages import PagePool
from twellctl.decoding.scheduler import Scheduler


class Gated(HistoryDecoder):
    """Steps wait while `gate` is not set."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def run(self, tokens, positions, tables, last=1, **how):
        assert int(positions.min()) <= 0 or self.gate.wait(20)  # a prompt does not wait
        return super().run(tokens, positions, tables, last, **how)


@pytest.fixture
def decoder():
    return Gated()


@pytest.fixture
def engine(decoder):
    made = DecodeEngine(Scheduler(decoder, PagePool(30), 4, frozenset()), max_waiting=6)
    yield made
    decoder.gate.set()
    made.close()


async def tokens_of(engine, prompt: list[int], count: int) -> list[int]:
    return [token.id async for token in engine.generate(prompt, Sampling(count, 0))]


def settled(engine) -> None:
    """Wait until nothing runs; all pages must be free then."""
    deadline = time.monotonic() + 10
    while (stats := engine.stats()).running or stats.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    while engine.stats().cache_used:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_many_at_once(engine):
    async def all_at_once():
        jobs = [tokens_of(engine, [i] * (30 * i + 1), 20 + i) for i in range(9)]
        return await asyncio.gather(*jobs)

    for i, tokens in enumerate(asyncio.run(all_at_once())):
        assert tokens == expected([i] * (30 * i + 1), 20 + i)
    settled(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.capacity) == (0, 0, 4)
    assert stats.prompt_tokens == sum(30 * i + 1 for i in range(9))
    assert stats.generated_tokens == sum(20 + i for i in range(9))
    assert stats.densities == (0.25, 0.5)


def test_stats_before_the_first(engine):
    stats = engine.stats()
    assert (stats.generated_tokens, stats.densities, stats.cache_used) == (0, (), 0)


def test_two_event_loops(engine):
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda i: asyncio.run(tokens_of(engine, [i], 200)), range(3))
        assert list(found) == [expected([i], 200) for i in range(3)]


def test_a_closed_generator_frees_its_place(engine, decoder):
    async def leave() -> list[int]:
        decoder.gate.clear()
        async with aclosing(engine.generate([7], Sampling(500, 0))) as tokens:
            first = await anext(tokens)
            assert engine.stats().running == 1
            assert engine.stats().cache_used > 0
        decoder.gate.set()
        return [first.id]

    assert asyncio.run(leave()) == expected([7], 1)
    settled(engine)
    steps = len(decoder.calls)
    assert steps < 10  # of 500
    assert asyncio.run(tokens_of(engine, [8], 5)) == expected([8], 5)


def test_what_waits_can_leave_too(engine, decoder):
    async def leave() -> None:
        decoder.gate.clear()
        running = [asyncio.create_task(tokens_of(engine, [i], 50)) for i in range(4)]
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(tokens_of(engine, [i], 50)) for i in range(4, 8)]
        await asyncio.sleep(0.05)
        assert engine.stats().waiting == 4
        for task in waiting[:3]:
            task.cancel()
        await asyncio.gather(*waiting[:3], return_exceptions=True)
        decoder.gate.set()
        done = await asyncio.gather(*running, waiting[3])
        assert done == [expected([i], 50) for i in (0, 1, 2, 3, 7)]

    asyncio.run(leave())
    settled(engine)
    assert engine.stats().prompt_tokens == 5


def test_a_full_queue_refuses(engine, decoder):
    async def flood() -> list:
        decoder.gate.clear()
        running = [asyncio.create_task(tokens_of(engine, [i], 5)) for i in range(4)]
        await asyncio.sleep(0.1)
        more = [asyncio.create_task(tokens_of(engine, [i], 5)) for i in range(4, 10)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull, match="6 generations wait already"):
            await tokens_of(engine, [1], 5)
        decoder.gate.set()
        return await asyncio.gather(*running, *more)

    assert asyncio.run(flood()) == [expected([i], 5) for i in range(10)]
    settled(engine)


def test_what_can_never_fit_is_refused_at_once(engine):
    assert engine.context == HistoryDecoder.context
    with pytest.raises(EngineError, match="room for 1025 tokens, there is room for 1024"):
        asyncio.run(tokens_of(engine, [1] * 1000, 25))
    assert engine.stats().waiting == 0


def test_a_failure_is_raised_where_it_was_asked_for(engine, decoder, monkeypatch):
    async def ask() -> None:
        assert await tokens_of(engine, [1], 5) == expected([1], 5)
        with monkeypatch.context() as patched:

            def fail(*inputs, **how):
                raise IndexError("no such\nlayer")

            patched.setattr(decoder, "run", fail)
            for failed in (1, 2, 3):
                with pytest.raises(EngineError, match="IndexError: no such layer"):
                    await tokens_of(engine, [1], 5)
                assert engine.stats().failed == failed
        assert await tokens_of(engine, [1], 5) == expected([1], 5)
        assert engine.stats().failed == 0

    asyncio.run(ask())
    settled(engine)


def test_a_failure_between_generations_fails_those_there_are(engine, monkeypatch, caplog):
    async def ask() -> None:
        with monkeypatch.context() as patched:

            def fail(*inputs, **how):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            patched.setattr(engine._scheduler._batch, "load", fail)
            with pytest.raises(EngineError, match="illegal memory access"):
                await tokens_of(engine, [1], 5)
        assert await tokens_of(engine, [1], 5) == expected([1], 5)

    asyncio.run(ask())
    settled(engine)
    assert "the engine failed" in caplog.text


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


def test_no_failure_in_a_capture_ends_the_engine(engine, monkeypatch):
    async def ask() -> None:
        with monkeypatch.context() as patched:

            def panic(*inputs, **how):
                raise Panic("called `Option::unwrap()` on a `None` value")

            patched.setattr(engine._scheduler._batch, "_prepared", panic)
            with pytest.raises(EngineError, match=r"Panic: called `Option::unwrap\(\)`"):
                await asyncio.wait_for(tokens_of(engine, [1], 5), 10)
        assert await asyncio.wait_for(tokens_of(engine, [1], 5), 10) == expected([1], 5)

    asyncio.run(ask())
    settled(engine)


def test_who_had_ended_before_a_failure_hears_of_it(engine, monkeypatch):
    """The round that gave the last token has failed later on."""

    def fail(*inputs, **how):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._scheduler._batch, "load", fail)
    assert asyncio.run(asyncio.wait_for(tokens_of(engine, [1], 1), 10)) == expected([1], 1)


def test_closing_ends_what_runs_and_takes_nothing_new(engine, decoder):
    async def ask() -> None:
        tokens = engine.generate([1], Sampling(900, 0))
        await anext(tokens)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        with pytest.raises(EngineClosed, match="stopping"):
            async for _ in tokens:
                pass
        await closing
        with pytest.raises(EngineClosed):
            await tokens_of(engine, [1], 5)

    asyncio.run(ask())
    assert not engine._worker.thread.is_alive()
    engine.close()  # again


def test_a_loop_that_is_gone_leaves_no_work(engine, decoder):
    decoder.gate.clear()
    loop = asyncio.new_event_loop()
    tokens = engine.generate([1], Sampling(900, 0))
    loop.run_until_complete(anext(tokens))
    loop.close()
    decoder.gate.set()
    settled(engine)
    assert len(decoder.calls) < 10
