"""What /metrics tells Prometheus: requests, latencies, and the engine's own counters."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

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

from twellctl.decoding.engine import Engine
from twellctl.serving.completion import Piece
from twellctl.serving.measured import Measured, current

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The metrics of one server."""

    def __init__(self, engine: Engine):
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
        self._first_token_seconds = seconds("time_to_first_token", about, _SECONDS)
        about = "Between two tokens of a choice."
        self._token_seconds = seconds("time_per_token", about, _TOKEN_SECONDS)
        registry.register(_EngineCollector(engine))

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

    async def timed(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """The same pieces of one choice; its tokens, and when they came, are noted."""
        measured = current()
        before, num_tokens = measured.began, 0
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.num_tokens > num_tokens:
                    now = time.perf_counter()
                    seconds = self._token_seconds if num_tokens else self._first_token_seconds
                    seconds.observe(now - before)
                    measured.new_tokens += piece.num_tokens - num_tokens
                    before, num_tokens = now, piece.num_tokens
                yield piece


class _EngineCollector(Collector):
    """The engine's counters, read when they are asked for."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        counters: dict[str, tuple[str, float]] = {
            "twell_prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "twell_generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "twell_passes": ("Passes over a sequence after its prompt.", stats.passes),
            "twell_drafted_tokens": ("Drafts that these passes read.", stats.drafted),
            "twell_kept_drafts": ("Drafts that were kept.", stats.kept_drafts),
        }
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(name, about, value=value)
        gauges: dict[str, tuple[str, float]] = {
            "twell_sequences_running": ("Sequences being continued.", stats.running),
            "twell_sequences_waiting": ("Sequences that wait for room.", stats.waiting),
            "twell_sequences_capacity": ("Sequences that can run at once.", stats.capacity),
            "twell_cache_used_ratio": ("Share of the cache that is taken.", stats.cache_used),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        densities = GaugeMetricFamily(
            "twell_density_ratio",
            "Mean share of a layer's neurons that fired for a token.",
            labels=["layer"],
        )
        for layer, density in enumerate(stats.densities):
            densities.add_metric([str(layer)], density)
        yield densities
