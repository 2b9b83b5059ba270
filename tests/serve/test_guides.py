"""serve-local: answers that follow a JSON schema, and that leave others as they are."""

import importlib.metadata
import json

import openai
import pytest
import torch
from attached import attached
from serving_client import chat, complete, get

from twellctl.decoding.engine import Sampling
from twellctl.decoding.pages import PagePool
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.serving.guides import Guides, schema_grammar
from twellctl.serving.openai_server import FAILING

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["list", "tuple"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "good": {"type": "boolean"},
    },
    "required": ["name", "count", "good"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def follows(text: str) -> bool:
    made = json.loads(text)
    in_range = type(made["count"]) is int and 0 <= made["count"] <= 9
    good = made["name"] in ("list", "tuple") and in_range and type(made["good"]) is bool
    return good and made.keys() == {"name", "count", "good"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_follow_a_schema(client, temperature):
    how = {"temperature": temperature, "seed": 1, "n": 3, "max_tokens": 200, "logprobs": True}
    got = chat(client, response_format=FORM, **how)
    assert all(follows(choice.message.content) for choice in got.choices)
    assert {choice.finish_reason for choice in got.choices} == {"stop"}
    assert len({choice.message.content for choice in got.choices}) == (1 if not temperature else 3)
    stream = chat(client, response_format=FORM, stream=True, **how | {"n": 1})
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == got.choices[0].message.content


def test_an_object_of_any_kind_and_the_form_of_responses(client):
    bias = {"1": -1.0}  # a guide goes with biases and penalties
    how = {"max_tokens": 60, "temperature": 1, "seed": 3, "frequency_penalty": 0.5}
    text = chat(client, response_format={"type": "json_object"}, logit_bias=bias, **how)
    assert text.choices[0].message.content.startswith("{")
    own = {"type": "json_object", "schema": SCHEMA}  # as llama.cpp and others take it
    assert follows(chat(client, response_format=own, max_tokens=200).choices[0].message.content)
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    made = client.responses.create(model="model", input="x", text={"format": form}, temperature=0)
    assert follows(made.output_text)


@pytest.mark.parametrize("schema", [{"type": "strange"}, {"$ref": "#/nowhere"}])
def test_a_schema_that_is_none_is_refused(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, response_format=form)
    assert refused.value.body["code"] == "json_schema"
    assert refused.value.body["message"].startswith("response_format: ")
    assert complete(client, max_tokens=1).choices  # the server goes on


@pytest.mark.parametrize("version", [None, "1.7.6"])
def test_without_the_library_or_with_an_old_one_it_is_refused(client, monkeypatch, version):
    def installed(name: str) -> str:
        assert name == "llguidance"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(openai.BadRequestError, match=r"response_format .* 'llguidance>=1\.9'"):
        chat(client, response_format=FORM)


def test_a_schema_that_is_too_complex_to_go_on_with_is_its_client_s_fault(client):
    """It ends its own answer; a server that failed so often would say that it is ill."""
    names = [f"p{number}" for number in range(1000)]
    schema = {"type": "object", "properties": {name: {} for name in names}}
    form = {"type": "json_object", "schema": schema}
    for _ in range(FAILING):
        with pytest.raises(
            openai.BadRequestError, match=r"Current row has .* items.* make it simpler"
        ) as caught:
            chat(client, response_format=form)
        assert caught.value.code == "json_schema"
    assert get(client, "/health").status == 200
    with pytest.raises(openai.APIError, match=r"Current row has .* items.* make it simpler"):
        list(chat(client, response_format=form, stream=True))


def test_errors_in_schemas_are_shown_without_the_library_s_grammar(client):
    for schema, said in [
        ({"if": {}}, 'failed to compile JSON schema: Unimplemented keys: ["if"]'),
        (
            {"type": "string", "pattern": "["},
            "failed to compile JSON schema: regex parse error: [ ^ error: unclosed character class",
        ),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, response_format={"type": "json_object", "schema": schema})
        assert caught.value.body["message"] == f"response_format: {said}"


def test_texts_in_a_batch_with_guided_ones_are_unchanged(relu_llama, tokenizer):
    """Guided ones are evicted and come again too: there is room for little."""
    model = load_model(open_checkpoint(relu_llama))
    prompts = [tokenizer.encode(text) for text in ("x = [1, 2, 3]\n", "def f(", "import ")]
    ends = frozenset({tokenizer.eos_token_id})

    def written(guided: bool) -> list[list[int]]:
        scheduler = Scheduler(attached(TorchDecoder(model), 9), PagePool(9), 4, ends)
        guides = Guides(tokenizer, scheduler.decoder.vocab_size, ends)
        guide = guides.build(schema_grammar(SCHEMA))
        made = [Sequence(prompt, Sampling(40, 0)) for prompt in prompts]
        how = [Sampling(60, 1, seed=seed, guide=guide) for seed in (0, 1)]
        beside = [Sequence(prompts[0], sampling) for sampling in how]
        for sequence in [*made, *(beside if guided else [])]:
            scheduler.add(sequence)
        while scheduler.busy:
            scheduler.advance()
        for sequence in beside if guided else []:
            tokens = sequence.tokens[sequence.num_prompt : -1]
            assert sequence.tokens[-1] in ends
            assert follows(tokenizer.decode(tokens))
        return [sequence.tokens for sequence in made]

    with torch.inference_mode():
        assert written(guided=True) == written(guided=False)
