"""From a request to the engine's work: prompts as tokens, within the context. No HTTP, no torch."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from twellctl.decoding.engine import Engine, Guide, Sampling
from twellctl.serving.guides import FIELD, Given, Grammar, Guides, schema_grammar
from twellctl.serving.logprobs import TokenSpelling
from twellctl.serving.openai_requests import ChatRequest, CompletionRequest, Options
from twellctl.serving.request_fields import ApiError, invalid, unsupported
from twellctl.serving.tools import TOOLS, call_grammar, knows_tools
from twellctl.text.tokens import chat_text, encode_text, encode_written, longest_token, surely_more

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context


@dataclass(frozen=True)
class ServedModel:
    """The model, under the name that clients call it by.

    `about`: what it runs on and by, for people; a word for each thing, and what there is to say.
    `beside`: engines of other models with the same tokenizer, each by the names that ask for it.
    """

    name: str
    tokenizer: Any
    engine: Engine
    about: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # its other names
    defaults: dict[str, float] = field(default_factory=dict)  # of `openai_requests.DEFAULTS`
    template: dict[str, Any] = field(default_factory=dict)  # what the chat template always knows
    beside: dict[str, Engine] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def by_name(self) -> dict[str, Engine]:
        """The engine of each name that a request may give; the first is that of none."""
        return dict.fromkeys((self.name, *self.names), self.engine) | self.beside

    @cached_property
    def engines(self) -> dict[Engine, str]:
        """Each engine once, with its first name."""
        found: dict[Engine, str] = {}
        for name, engine in self.by_name.items():
            found.setdefault(engine, name)
        return found

    @cached_property
    def spelling(self) -> TokenSpelling:
        """How its tokens are written one by one."""
        return TokenSpelling(self.tokenizer)

    @cached_property
    def guides(self) -> Guides:
        """Answers that follow a schema."""
        return Guides(self.tokenizer, self.engine.vocab_size, self.engine.eos_tokens)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of text that one token stands for, at most."""
        return longest_token(self.tokenizer)


@dataclass(frozen=True)
class Task:
    """One choice to make. `continued`: the tokens whose text it goes on from, none in a chat.

    `echoed`: the answer begins with the prompt, and the engine gets only its first token.
    """

    index: int
    prompt: list[int]
    continued: list[int]
    sampling: Sampling
    echoed: bool = False


@dataclass(frozen=True)
class Plan:
    """All choices of one request, in order; every prompt counts once in `prompt_tokens`."""

    tasks: list[Task]
    prompt_tokens: int
    options: Options
    engine: Engine
    calls: bool = False  # tools may be called
    grammar: Grammar | None = None  # that all choices must follow

    def guided(self, guide: Callable[[], Guide]) -> "Plan":
        """This plan with a guide for each choice."""
        tasks = [replace(task, sampling=replace(task.sampling, guide=guide)) for task in self.tasks]
        return replace(self, tasks=tasks)


def engine_of(model: ServedModel, name: str | None) -> Engine:
    """Of a model by its name, None: the first; 404 for one that is not served."""
    if name is None:
        return model.engine
    if name not in model.by_name:
        served = " and ".join(map(json.dumps, model.engines.values()))
        message = f"no model {json.dumps(name)} here, only {served}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return model.by_name[name]


def plan_chat(model: ServedModel, request: ChatRequest) -> Plan:
    """The work of a chat request; raises `ApiError`."""
    engine = _engine(model, request.options, 1)
    given = model.template | request.template
    if request.calling.tools:
        if not knows_tools(model.tokenizer):
            raise unsupported(TOOLS, "this model's chat template does not call them")
        given |= {"tools": list(request.calling.tools)}
    try:
        text = chat_text(
            model.tokenizer,
            request.messages,
            opens_answer=not request.goes_on,
            continue_final_message=request.goes_on,
            **given,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param=request.param, code="chat_template") from error
    prompt = _encoded(model, text, encode_written, engine, request.param)
    budget = _budget(engine, prompt, request.options.max_tokens, None, request.param)
    tasks = _tasks(0, prompt, [], request.options, budget)
    calls = bool(request.calling.tools)
    return Plan(tasks, len(prompt), request.options, engine, calls, _grammar(model, request))


def _grammar(model: ServedModel, request: ChatRequest) -> Grammar | None:
    """What the answers must follow; None: nothing. Raises `ApiError`."""
    guides = model.guides
    if request.calling.is_guided:
        guides.check(TOOLS)
        if request.schema is not None:
            raise unsupported(FIELD, "with tools that are strict or must be called")
        return call_grammar(request.calling, guides.mark)
    if request.schema is not None:
        guides.check(FIELD)
        return schema_grammar(request.schema)
    return None


def plan_completion(model: ServedModel, request: CompletionRequest) -> Plan:
    """The work of a completion request: `n` choices for each of its prompts. Raises `ApiError`."""
    options = request.options
    engine = _engine(model, options, len(request.prompts))
    tasks: list[Task] = []
    prompt_tokens = 0
    for given in request.prompts:
        prompt = (
            _encoded(model, given, encode_text, engine, "prompt")
            if isinstance(given, str)
            else given
        )
        budget = _budget(engine, prompt, options.max_tokens, COMPLETION_TOKENS, "prompt")
        made = _tasks(len(tasks), prompt, prompt, options, budget)
        tasks += [_echoed(task, engine.vocab_size) for task in made] if request.echo else made
        prompt_tokens += len(prompt)
    return Plan(tasks, prompt_tokens, options, engine)


def _echoed(task: Task, vocab_size: int) -> Task:
    """The task with a prompt whose tokens are chosen one by one, as if the model wrote them.

    So the engine reports of them what it reports of an answer's tokens. Each takes a step.
    """
    rest = task.prompt[1:]
    sampling = replace(
        task.sampling,
        max_tokens=len(rest) + task.sampling.max_tokens,
        ignore_eos=True,  # the prompt may hold end tokens; `complete` ends the answer
        guide=lambda: Given(rest, vocab_size),
    )
    return Task(task.index, task.prompt, [], sampling, echoed=True)


def _engine(model: ServedModel, options: Options, num_prompts: int) -> Engine:
    """The one that is asked for; `ApiError` for another model, tokens that it has not, more choices
    than there is room for."""
    engine, wanted = engine_of(model, options.model), num_prompts * options.n
    for token, _ in options.sampling.logit_bias:
        if token >= engine.vocab_size:
            raise invalid("logit_bias", f"may only name tokens 0 to {engine.vocab_size - 1}", token)
    if wanted > engine.max_held:  # ever: to come again would not help
        param, what = ("n", "") if num_prompts == 1 else ("prompt", "times n ")
        must = f"{what}must be at most {engine.max_held} (--max-running and --max-waiting together)"
        raise invalid(param, must, wanted)
    return engine


def _encoded(
    model: ServedModel,
    text: str,
    encode: Callable[[Any, str], list[int]],
    engine: Engine,
    param: str,
) -> list[int]:
    """`text` as tokens; `ApiError` where it is so long that they need not be counted."""
    context = engine.context
    if surely_more(model.tokenizer, text, context, model.longest_token):
        message = f"the model's context is {context} tokens, {param} has far more: no token is left"
        raise ApiError(400, f"{message} for an answer", param=param, code="context_length_exceeded")
    return encode(model.tokenizer, text)


def _tasks(
    first: int,
    prompt: list[int],
    continued: list[int],
    options: Options,
    budget: int,
) -> list[Task]:
    made = []
    for i in range(options.n):
        seed = options.sampling.seed
        if seed is not None and i:  # the first choice is the one that n = 1 gives
            seed = (seed + i) % 2**63
        sampling = replace(options.sampling, max_tokens=budget, seed=seed)
        made.append(Task(first + i, prompt, continued, sampling))
    return made


def _budget(
    engine: Engine, prompt: list[int], max_tokens: int | None, default: int | None, param: str
) -> int:
    """How many tokens may follow `prompt`; `ApiError` if it cannot be continued so."""
    if not prompt:
        raise invalid(param, "must hold at least one token", prompt)
    left = engine.context - len(prompt)
    facts = f"the model's context is {engine.context} tokens, {param} has {len(prompt)}"
    code = "context_length_exceeded"
    if left <= 0:
        raise ApiError(400, f"{facts}: no token is left for an answer", param=param, code=code)
    for token in prompt:
        if not 0 <= token < engine.vocab_size:
            raise invalid(param, f"may only hold tokens 0 to {engine.vocab_size - 1}", token)
    if max_tokens is not None and max_tokens > left:
        message = f"{facts}: max_tokens may be at most {left}, got {max_tokens}"
        raise ApiError(400, message, param="max_tokens", code=code)
    return min(default or left, left) if max_tokens is None else max_tokens
