"""serve-local: which functions must and may be called, and calls that follow their parameters."""

import copy
import json

import openai
import pytest
from conftest import CHAT_TEMPLATE
from serving_client import chat, running
from tokenizers import AddedToken

from twellctl.models.answerer import open_answerer
from twellctl.serve_local import load_served_model
from twellctl.serving.guides import Guides
from twellctl.serving.tools import call_grammar, parse_tools

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/Number"}, "b": {"$ref": "#/$defs/Number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"Number": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
}
SAY = {"name": 'say "it"'}
TOOLS = [{"type": "function", "function": function} for function in (ADD, SAY)]
STRICT = [{"type": "function", "function": ADD | {"strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "add"}}


def call(name: str, arguments: str) -> str:
    inside = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    return f"<tool_call>\n{inside}\n</tool_call>"


GOOD, SAID = call("add", '{"a": 3, "b": 4}'), call('say "it"', "{}")
THOUGHTS = "<think>x</think>", "[THINK]x[/THINK] y"
WRONG, OTHER = call("add", '{"a": 3, "b": "4"}'), call("sub", "{}")
# what a request says: the answers that may be given, and those that may not
GRAMMARS = {
    "required": (
        {"tools": TOOLS, "tool_choice": "required"},
        [GOOD, SAID, f"{GOOD}\n{SAID}"],
        ["", "text", WRONG, OTHER, f"So {GOOD}", f"{GOOD} so"],
    ),
    "required, one": (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        [GOOD, SAID],
        ["", "text", WRONG, f"{GOOD}\n{SAID}"],
    ),
    "named": (
        {"tools": TOOLS, "tool_choice": NAMED},
        [GOOD],
        ["", SAID, WRONG, f"{GOOD}\n{GOOD}"],
    ),
    "strict": (
        {"tools": STRICT},
        ["", "text", "a <tool", GOOD, f"So {GOOD}", f"{GOOD} and {SAID} so", *THOUGHTS],
        [WRONG, OTHER, f"So {WRONG}"],
    ),
    "one": (
        {"tools": TOOLS, "parallel_tool_calls": False},
        ["", "text", f"So {GOOD}"],
        [f"{GOOD}\n{GOOD}", f"So {WRONG}"],
    ),
}


@pytest.fixture(params=["text", "tokens"])
def marked(request, tokenizer):
    """A tokenizer with and without a token for each mark."""
    made = copy.deepcopy(tokenizer)
    if request.param == "tokens":
        marks = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]")
        made.add_tokens([AddedToken(mark, special=mark[0] == "[") for mark in marks])
    return made


def may_be(guides: Guides, body: dict, tokens: list[int]) -> bool:
    """Whether an answer may be `tokens` and end there."""
    guide = guides.build(call_grammar(parse_tools(body), guides.mark))()
    for token in [*tokens, 0]:
        mask = int.from_bytes(guide.compute_bitmask(), "little")
        if not mask >> token & 1:
            return False
        if token:
            assert guide.consume_token(token)
    return True


@pytest.mark.parametrize(("body", "good", "bad"), GRAMMARS.values(), ids=GRAMMARS.keys())
def test_answers_call_as_the_request_says(marked, body, good, bad):
    guides = Guides(marked, len(marked), [0])
    for text in good:
        assert may_be(guides, body, marked.encode(text)), text
    for text in bad:
        assert not may_be(guides, body, marked.encode(text)), text


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS}, {"tools": STRICT, "tool_choice": "none"}])
def test_other_answers_follow_no_grammar(body):
    assert not parse_tools(body).is_guided


@pytest.fixture(scope="module")
def calling(relu_llama, tmp_path_factory):
    """A server whose template has tools."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% if tools %}<tool_call>{% endif %}" + CHAT_TEMPLATE)
    with running(load_served_model(open_answerer(relu_llama), chat_template=template)) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_model_that_would_not_call_calls(calling, choice, stream):
    asked = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(calling, **asked, max_tokens=200, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (calls,) = [chunk.delta.tool_calls for chunk in chunks if chunk.delta.tool_calls]
        text, ended = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        message, ended = answer.choices[0].message, answer.choices[0].finish_reason
        calls, text = message.tool_calls, message.content or ""
    (made,) = calls
    assert (made.function.name, ended, text) == ("add", "tool_calls", "")
    arguments = json.loads(made.function.arguments)
    assert arguments.keys() == {"a", "b"}
    assert all(type(value) is int and 0 <= value <= 99 for value in arguments.values())


def tool(**changes) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f"} | changes}]}


REFUSED = [  # what a request says, and the parameter that the error names
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, 'tools[0].type "web_search"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [*TOOLS, {"type": "function", "function": {}}]}, "tools[2].function.name"),
    ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading"),
    (tool(name=""), "tools[0].function.name"),
    (tool(name=3), "tools[0].function.name"),
    (tool(description=3), "tools[0].function.description"),
    (tool(parameters=[]), "tools[0].function.parameters"),
    (tool(strict="yes"), "tools[0].function.strict"),
    (tool(returns={}), "tools[0].function.returns"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED | {"mode": "auto"}}, "tool_choice.mode"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": STRICT, "response_format": {"type": "json_object"}}, "response_format"),
    (tool(parameters={"type": "strange"}, strict=True), "tools"),
    (tool(parameters={"x-guidance": {"lenient": True}}), "tools[0].function.parameters.x-guidance"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_a_request_says_of_tools_is_read_strictly(calling, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(calling, **body)
    assert caught.value.param == param
