"""What /metrics tells Prometheus: requests, latencies, and the engine's own counters."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from operator import attrgetter
from typing import TypeAlias

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twellctl.decoding.engine import Engine, EngineStats
from twellctl.serving.completion import Piece
from twellctl.serving.measured import Measured, current

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The metrics of one server. `engines`: each with the name of its model."""

    def __init__(self, engines: dict[Engine, str]):
        self._models = engines
        registry = self._registry = CollectorRegistry()

        def seconds(name: str, about: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            name = f"twell_{name}_seconds"
            return Histogram(name, about, labels, buckets=buckets, registry=registry)

        about = "Requests answered; status 499: the client left before the end."
        labels = ["endpoint", "status"]
        self._requests = Counter("twell_requests", about, labels, registry=registry)
        about = "From a request's headers to the end of its answer."
        self._request_seconds = seconds("request", about, _SECONDS, "endpoint")
        about = "From a request's headers to the first token of each choice."
        self._first_token_seconds = seconds("time_to_first_token", about, _SECONDS, "model")
        about = "Between two tokens of a choice."
        self._token_seconds = seconds("time_per_token", about, _TOKEN_SECONDS, "model")
        registry.register(_EngineCollector(engines))

    async def response(self, http: web.Request) -> web.Response:
        """All of it in Prometheus' text format."""
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(self._registry), headers=headers)

    def count(self, http: web.Request, measured: Measured) -> None:
        """Which endpoint answered with what, and how long it took."""
        resource = http.match_info.route.resource
        endpoint = resource.canonical if resource else "unknown"  # one word, or anyone makes labels
        self._requests.labels(endpoint, measured.status).inc()
        self._request_seconds.labels(endpoint).observe(measured.seconds)

    async def timed(
        self, pieces: AsyncGenerator[Piece, None], engine: Engine
    ) -> AsyncGenerator[Piece, None]:
        """The same pieces of one choice of `engine`; its tokens, and when they came, are noted, and
        what became of drafts."""
        measured, model = current(), self._models[engine]
        before, num_tokens, num_seen = measured.began, 0, 0
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.num_tokens > num_tokens:
                    now = time.perf_counter()
                    seconds = self._token_seconds if num_tokens else self._first_token_seconds
                    seconds.labels(model).observe(now - before)
                    measured.new_tokens += piece.num_tokens - num_tokens
                    before, num_tokens = now, piece.num_tokens
                for placed in piece.tokens:
                    if num_seen:  # the first came of the prompt
                        measured.drafted.see(placed.token.draft)
                    num_seen += 1
                yield piece


class _EngineCollector(Collector):
    """The engines' counters, by model, read when they are asked for."""

    def __init__(self, engines: dict[Engine, str]):
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        found = {model: engine.stats() for engine, model in self._engines.items()}
        for name, about, value in _COUNTERS:
            counter = CounterMetricFamily(f"twell_{name}", about, labels=["model"])
            for model, stats in found.items():
                counter.add_metric([model], value(stats))
            yield counter
        for name, about, counts in _DRAFTS:
            counter = CounterMetricFamily(f"twell_{name}", about, labels=["model", "drafter"])
            for engine, model in self._engines.items():
                for drafter in engine.drafters:
                    counter.add_metric([model, drafter], counts(found[model])[drafter])
            yield counter
        for name, about, value in _GAUGES:
            gauge = GaugeMetricFamily(f"twell_{name}", about, labels=["model"])
            for model, stats in found.items():
                gauge.add_metric([model], value(stats))
            yield gauge
        about = "Mean share of a layer's neurons that fired for a token."
        densities = GaugeMetricFamily("twell_density_ratio", about, labels=["model", "layer"])
        for model, stats in found.items():
            for layer, density in enumerate(stats.densities):
                densities.add_metric([model, str(layer)], density)
        yield densities


# of each engine: the name, what it is, and where to read it
_Read: TypeAlias = tuple[str, str, Callable[[EngineStats], float]]
_COUNTERS: tuple[_Read, ...] = (
    ("prompt_tokens", "Tokens of prompts.", attrgetter("prompt_tokens")),
    ("generated_tokens", "Tokens generated.", attrgetter("generated_tokens")),
    ("passes", "Passes over a sequence after its prompt.", attrgetter("drafted.passes")),
)
_DRAFTS = (
    ("drafted_tokens", "Drafts that passes read.", attrgetter("drafted.read")),
    ("kept_drafts", "Drafts that were kept.", attrgetter("drafted.kept")),
)
_GAUGES: tuple[_Read, ...] = (
    ("sequences_running", "Sequences being continued.", attrgetter("running")),
    ("sequences_waiting", "Sequences that wait for room.", attrgetter("waiting")),
    ("sequences_capacity", "Sequences that can run at once.", attrgetter("capacity")),
    ("cache_used_ratio", "Share of the cache that is taken.", attrgetter("cache_used")),
)
