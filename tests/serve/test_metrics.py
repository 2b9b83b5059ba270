"""serve-local: /metrics, read as Prometheus reads it."""

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_client import Scripted, chat, complete, get, post, running, serving

from twellctl.serving.plan import ServedModel


def metrics(client) -> dict:
    """(name, labels without `le`) -> value; the buckets are left out."""
    answer = get(client, "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_requests_and_latencies(tokenizer):
    engine = Scripted(tokenizer.encode("print(x)"), delay=0.01)
    with serving(tokenizer, engine) as client:
        chat(client, n=2)
        list(complete(client, stream=True))
        with pytest.raises(openai.BadRequestError):
            complete(client, max_tokens=-1)
        post(client, b"{}", "/v1/none")
        post(client, b"{}", "/v1/none/other")
        found = metrics(client)
    chats, texts = "/v1/chat/completions", "/v1/completions"
    assert found["twell_requests_total", chats, "200"] == 1
    assert found["twell_requests_total", texts, "200"] == 1
    assert found["twell_requests_total", texts, "400"] == 1
    assert found["twell_requests_total", "unknown", "404"] == 2
    assert found["twell_request_seconds_count", texts] == 2
    count = len(engine.tokens)
    assert found[("twell_time_to_first_token_seconds_count",)] == 3
    assert 0.03 <= found[("twell_time_to_first_token_seconds_sum",)] < 3
    assert found[("twell_time_per_token_seconds_count",)] == 3 * (count - 1)
    assert found[("twell_time_per_token_seconds_sum",)] >= 3 * (count - 1) * 0.009
    assert found["twell_request_seconds_sum", chats] >= count * 0.009


def test_the_engines_counters(tokenizer):
    engine = Scripted(tokenizer.encode("print"), num_layers=2)
    with serving(tokenizer, engine) as client:
        assert ("twell_density_ratio", "0") not in metrics(client)
        complete(client)
        found = metrics(client)
    stats = engine.stats()
    assert found[("twell_prompt_tokens_total",)] == stats.prompt_tokens
    assert found[("twell_generated_tokens_total",)] == stats.generated_tokens == len(engine.tokens)
    assert found[("twell_sequences_running",)] == 0
    assert found[("twell_sequences_waiting",)] == stats.waiting
    assert found[("twell_sequences_capacity",)] == stats.capacity
    assert found[("twell_cache_used_ratio",)] == stats.cache_used
    assert found["twell_density_ratio", "0"] == 0.001
    assert found["twell_density_ratio", "1"] == 0.002


def test_two_servers_do_not_share_their_metrics(tokenizer):
    served = ServedModel("model", tokenizer, Scripted([5]))
    with running(served) as one, running(served) as other:
        complete(one)
        assert ("twell_requests_total", "/v1/completions", "200") in metrics(one)
        assert ("twell_requests_total", "/v1/completions", "200") not in metrics(other)
