"""The README.md of a model that twellctl wrote: what it is, costs and gains, and how to load it.

The card of the model it was made from is not copied, since its scores are not this model's; only
its licence is. Every figure says where it comes from. What was not measured is called unknown.
"""

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.bundle.twell_config import is_silu_form, least_sharpness
from twellctl.errors import TwellError, counted, encodable, reason
from twellctl.files.strict_json import read_json
from twellctl.firing.profiled import Profile
from twellctl.models.card_front import SPARSE, Metric, cell, front_matter, is_plain, table
from twellctl.models.card_speed import UNTIMED, speed
from twellctl.models.carried import CARD, REPORT_FILE, json_object
from twellctl.models.checks import activation_key
from twellctl.models.in_vllm import DENSELY, is_served_over_twell
from twellctl.models.schemes import INT4, scheme_of
from twellctl.models.shards import ORIGINAL
from twellctl.models.verdict import verdict_of

EVALUATION_VERSION = 1
LONGEST_SETTING = 80
WRITTEN = {"tests": "its tests", "answer": "its answer"}  # tasks in the model's own words
LARGEST = 1e6  # no loss and no share is beyond

_CARD = """---
{front}
---

# {name}

{what}, made by twellctl from {base}.{state}

{density}
{sections}
## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({quoted})
tokenizer = AutoTokenizer.from_pretrained({quoted})
```

This loads the stock {stock} of transformers, which computes all neurons.{stock_needs}{over_twell}

With twellctl installed:

```
twellctl generate    {word} "Once upon a time"
twellctl serve-local {word}    # OpenAI's API and a page to chat, on http://127.0.0.1:8000{exact}
```

## In other engines

{engines}
"""
_RELU = "A language model whose gated FFNs use ReLU instead of SiLU"
_ROUNDED = "A language model whose linear layers are rounded to 4 bits, with its own activation"
_PLAIN = """This folder is for transformers and twellctl. Most other engines, such as llama.cpp and
mlx-lm, ignore its `hidden_act: relu`, run it with SiLU without a word, and answer with noise. Give
them what `twellctl export {word} OUT` writes: a form that they can run."""
_ANY = """Its ReLU is written as a sharp SiLU: `silu(k g) (u / k)` of k = {sharpness} is `relu(g) u`
to within {within} of u. Engines that support only SiLU can run it, and compute all neurons:

- vLLM: `vllm serve {word}`. {in_vllm}
- SGLang and mlx-lm: like any model.
- llama.cpp, and engines built on it{from_bf16}:

```
python convert_hf_to_gguf.py {word} --outtype bf16 --outfile model.gguf
llama-quantize model.gguf model-q8_0.gguf Q8_0    # or Q4_K_M
llama-server -m model-q8_0.gguf
```"""
_IN_VLLM = "If twellctl is installed, too, it skips those that do not fire."
_IN_FOUR_BITS = "It has kernels for weights in 4 bits."
_NOT_IN_VLLM = f"If twellctl is installed, too, add `{DENSELY}`."
_OVER_TWELL = """ With
`trust_remote_code=True` transformers 5.17 or newer loads {ours} from this folder
instead, which skips the neurons that do not fire and gives the same logits up to rounding. twellctl
need not be installed."""
_QUANTISED = """
All linear layers except the LM head are in {title}: {numbers}."""
_ROUNDED_LATER = """
The figures below were measured before that rounding."""
_STOCK_NEEDS = """ It needs the
package {package}."""
_QUANTISED_OWN = """ With `trust_remote_code=True` it loads {ours} from this
folder instead, which needs neither that package nor twellctl and computes the same."""
_EXACT = """
twellctl serve-local {word} --exact    # the answers of its original, which is here, too"""
_ALL_NEURONS = "Every neuron is computed for every token."
_AS_IT_IS = (
    "Engines that read compressed-tensors, such as vLLM and SGLang, run this folder as it is."
)
_CONVERTED = """
It was converted but not fine-tuned: fine-tune it before use."""
_FITTED = """
It was fitted to its source layer by layer. Each FFN has {map} extra neurons, which always fire and
are a linear map of its input. They are not counted below."""


@dataclass(frozen=True)
class Figures:
    """What is known of a model: how its fine-tuning ended, its profile, and the JSON of `eval` and
    of `bench decode`."""

    report: dict[str, Any]
    profile: Profile | None = None
    evaluation: dict[str, Any] | None = None
    bench: dict[str, Any] | None = None


def write_card(folder: Path, name: str, source: Path, **measured: Any) -> None:
    """Write the card of the model in `folder`, which is called `name` and was made from `source`.

    Its figures come from what was `measured`, fields of `Figures`, else from what `folder` holds.
    """
    name = " ".join(encodable(name).splitlines())
    word = shlex.quote(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    figures = Figures(_report(folder), **measured)
    base = config["twell"].get("source")
    scheme = scheme_of(config)
    metrics = [] if scheme and scheme.by_export else _metrics(figures)
    tags, relation = SPARSE, "finetune"
    if not _is_sparse(config):  # then all neurons fire, which is no figure
        tags, relation = [], "quantized"
        metrics = [metric for metric in metrics if metric.kind != "density"]
    card = _CARD.format(
        front=front_matter(name, base, relation, source, tags, metrics),
        name=name,
        quoted=json.dumps(name, ensure_ascii=False),
        what=_RELU if _is_sparse(config) else _ROUNDED,
        word=word,
        base=f"[{base}](https://huggingface.co/{base})" if base else "a local model",
        state=_state(config, figures),
        density=_density(config["twell"], figures) if _is_sparse(config) else _ALL_NEURONS,
        sections="".join(_sections(figures)),
        stock=f"`{_stock_class(config)}`",
        stock_needs=_STOCK_NEEDS.format(package=scheme.package) if scheme else "",
        over_twell=_over_twell(config),
        engines=_engines(config, word),
        exact=_EXACT.format(word=word) if (folder / ORIGINAL).is_dir() else "",
    )
    (folder / CARD).write_text(card, encoding="utf-8")


def _report(folder: Path) -> dict[str, Any]:
    """What fine-tuning ended with; nothing for a model that was not fine-tuned."""
    report = json_object(folder / REPORT_FILE) or {}
    return report if _is_number(report.get("density")) else {}


def _state(config: dict[str, Any], figures: Figures) -> str:
    """What was done to the weights, beyond making the model ReLU."""
    twell, scheme = config["twell"], scheme_of(config)
    state = _QUANTISED.format(title=scheme.title, numbers=scheme.numbers) if scheme else ""
    state += _ROUNDED_LATER if scheme and scheme.by_export else ""
    if not _is_sparse(config):
        return state
    if num_mapped := twell.get("map_neurons"):
        return _FITTED.format(map=num_mapped) + state
    is_converted = not figures.report and twell["source_act"] != "relu"
    return (_CONVERTED if is_converted else "") + state


def _is_sparse(config: dict[str, Any]) -> bool:
    """Whether its FFNs are ReLU, as written or in SiLU form."""
    return config[activation_key(config)] == "relu" or is_silu_form(config["twell"])


def _stock_class(config: dict[str, Any]) -> str:
    """The name of the class of transformers, or "class" if config.json has no such name."""
    stock = next(map(str, config.get("architectures") or ()), "")
    return stock if stock.isidentifier() and stock.isascii() else "class"


def _over_twell(config: dict[str, Any]) -> str:
    """What transformers does with the code in the folder; nothing if it has none."""
    ours = config.get("auto_map", {}).get("AutoModelForCausalLM", "").split(".")[-1]
    if not ours:
        return ""
    return (_QUANTISED_OWN if scheme_of(config) else _OVER_TWELL).format(ours=f"`{ours}`")


def read_evaluation(path: Path, fingerprint: str) -> dict[str, Any]:
    """An 'eval --json' file; `TwellError` if it is none, or of other weights than `fingerprint`."""
    again = "write it again with 'twellctl eval MODEL --json FILE'"
    found = read_json(path, again)
    if found.get("eval_schema_version") != EVALUATION_VERSION:
        raise TwellError(f"{path} is not an evaluation that this twellctl can read: {again}")
    if found.get("fingerprint") != fingerprint:
        raise TwellError(f"{path} is for another model: {again}")
    try:
        figures = Figures({}, None, found)
        list(_sections(figures))
        _density({}, figures)
        _metrics(figures)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TwellError(
            f"{path} is not a complete evaluation ({reason(error)}): {again}"
        ) from error
    return found


def _engines(config: dict[str, Any], word: str) -> str:
    """How others run the model of this config.json, in the folder `word`."""
    if not _is_sparse(config):
        return _AS_IT_IS
    if not is_silu_form(config["twell"]):
        return _PLAIN.format(word=word)
    k, scheme = least_sharpness(config["twell"]), scheme_of(config)
    in_vllm = _IN_VLLM if is_served_over_twell(config) else _NOT_IN_VLLM
    return _ANY.format(
        word=word,
        sharpness=k,
        within=f"{0.28 / k:.1g}",
        in_vllm=_IN_FOUR_BITS if scheme is INT4 else in_vllm,
        from_bf16=", from an export in bf16" if scheme and scheme.by_export else "",
    )


def _sections(figures: Figures) -> Iterable[str]:
    named = {
        "What it writes": _written(figures),
        "Losses": _losses(figures),
        "Tasks": _tasks(figures.evaluation),
        "Speed": speed(figures.bench) if figures.bench else figures.profile and UNTIMED,
        "Recipe": _recipe(figures.report),
    }
    return (f"\n## {title}\n\n{text}\n" for title, text in named.items() if text)


def _density(twell: dict, figures: Figures) -> str:
    share = "of the neurons of an FFN fire for a token, on average over the layers"
    profile, report = figures.profile, figures.report
    if profile is not None:
        how = f"measured by `twellctl profile` over {profile.distinct_tokens} tokens"
        low, high = (end(layer.density for layer in profile.layers) for end in (min, max))
        return (
            f"{profile.density:.2%} {share}: {how}.\nLayers lie between {low:.2%} and {high:.2%}; "
            f"{profile.dead_fraction:.2%} of the neurons fired on none of them."
        )
    if densities := twell.get("densities"):
        return f"{sum(densities) / len(densities):.2%} {share}, as a profile measured."
    if "density" in report:
        where = _text_of(report)
        return f"{report['density']:.2%} {share}: measured on {where} when fine-tuning ended."
    if (density := _judged_text(figures).get("density")) is not None:
        return f"{density:.2%} {share}: measured on the text of its evaluation."
    return "How many of its neurons fire has not been measured."


def _written(figures: Figures) -> str:
    """The verdict on its answers, by its evaluation or else when fine-tuning ended."""
    evaluation = figures.evaluation or {}
    answers = evaluation.get("answers") or figures.report.get("answers")
    verdict = verdict_of(evaluation, answers)
    if verdict is None:
        return "This has not been measured. Loss and density do not show what answers lose."
    said = [f"{verdict.words[0].upper()}{verdict.words[1:]}: {verdict.because}."]
    if answers:
        said.append(
            f"Of {counted(int(answers['tokens']), 'token')} that the reference wrote it gives "
            f"{float(answers['same_top']):.1%} the same; of {float(answers['flips']):.2%} the "
            f"reference is sure and it takes another. {int(answers['agree'])} of "
            f"{int(answers['answers'])} answers agree to the end."
        )
    return "\n".join(said)


def _losses(figures: Figures) -> str | None:
    """Cross-entropies of this model and of what it came from, on the same text where it is."""
    report = figures.report
    held_out = "held-out text of fine-tuning"
    rows: list[tuple[str, str, Any]] = [
        ("the model it learnt from", held_out, report.get("teacher_cross_entropy")),
        ("this model", held_out, report.get("cross_entropy")),
        ("KL to the model it learnt from", "the same", report.get("teacher_kl")),
    ]
    if judged := _judged_text(figures):
        score = judged["score"]
        rows.append(("this model", "text of its evaluation", float(score["cross_entropy"])))
        rows.append(("the reference", "the same", score.get("reference_cross_entropy")))
    shown = [(who, text, f"{loss:.4f}") for who, text, loss in rows if _is_number(loss)]
    return table(("", "text", "nats a token"), shown)


def _tasks(evaluation: dict[str, Any] | None) -> str | None:
    """Accuracies with their standard errors, with those of the reference and of guessing."""
    tasks = (evaluation or {}).get("tasks") or []
    rows = []
    for task in tasks:
        by = _judged_by(task)
        marks = (_accuracy(task.get(whose), by) for whose in ("accuracy", "reference"))
        how = WRITTEN.get(task.get("kind"), by)
        rows.append((task["task"], how, task["questions"], f"{task['chance']:.1%}", *marks))
    return table(("task", "by", "questions", "chance", "this model", "reference"), rows)


def _judged_by(task: dict[str, Any]) -> str:
    """Which figure of a task is shown, as lm-evaluation-harness calls it: that of characters."""
    return "acc_norm" if task["accuracy"]["acc_norm"] else "acc"


def _accuracy(found: dict[str, Any] | None, by: str) -> str:
    mean = found and found[by]
    if not mean:
        return "-"
    error = f" ± {mean['stderr']:.1%}" if mean["stderr"] else ""
    return f"{mean['mean']:.1%}{error}"


def _recipe(report: dict[str, Any]) -> str | None:
    """The settings of fine-tuning, and how much it read."""
    recipe = report.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    lines = [f"{key}: {value}" for key, value in recipe.items()]
    lines = [line for line in lines if len(line) <= LONGEST_SETTING and is_plain(line)]
    if not lines:
        return None
    counts = [report.get(key) for key in ("num_steps", "num_tokens")]
    ran = ", {} steps, {} tokens".format(*counts) if {*map(type, counts)} == {int} else ""
    return "\n".join([f"`twellctl finetune`{ran}:", "", "```yaml", *lines, "```"])


def _metrics(figures: Figures) -> list[Metric]:
    """The figures that hubs show: loss, share of neurons that fire, accuracies."""
    report = figures.report
    found: list[tuple[str, str, str, Any]] = []
    texts = {_text_of(report): (report.get("cross_entropy"), report.get("density"))}
    if figures.profile is not None:
        texts["text of its profile"] = (None, figures.profile.density)
    if judged := _judged_text(figures):
        score = judged["score"]["cross_entropy"]
        texts["text of its evaluation"] = (score, judged.get("density"))
    for text, (loss, density) in texts.items():
        found.append((text, "cross-entropy", "cross-entropy, nats a token", loss))
        found.append((text, "density", "share of the neurons that fire", density))
    for task in (figures.evaluation or {}).get("tasks") or []:
        by = _judged_by(task)
        found.append((cell(task["task"]), by, by, task["accuracy"][by]["mean"]))
    return [Metric(text, by, about, value) for text, by, about, value in found if _is_number(value)]


def _judged_text(figures: Figures) -> dict[str, Any]:
    """What `eval` found of text, if it read any."""
    return (figures.evaluation or {}).get("text") or {}


def _text_of(report: dict[str, Any]) -> str:
    """What the figures were measured on with which fine-tuning ended."""
    return "the last step" if report.get("cross_entropy") is None else "held-out text"


def _is_number(value: Any) -> bool:
    """Whether a figure is one that a card can show."""
    return isinstance(value, float) and abs(value) < LARGEST  # NaN is not
