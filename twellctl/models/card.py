"""The README.md of a model that twellctl wrote: what it is, how sparse, how to load it.

The card of the model it was made from does not go along, since its scores are not this model's.
Only what it says of the licence does.
"""

import json
import re
from pathlib import Path

from twellctl.errors import TwellError
from twellctl.firing.profiled import Profile
from twellctl.models.carried import CARD, REPORT_FILE, own_file

_LICENCE_LINE = re.compile(r"(license|license_name|license_link): *([\"']?)([\w.+:/ -]{1,200})\2 *")
_CARD = """---
{front}
---

# {name}

A language model whose gated FFNs use ReLU in place of SiLU, made by twellctl from {base}.{state}

{density}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

This loads the stock {stock} of transformers, which computes all neurons.{over_twell}

Some tools do not read `hidden_act` in config.json:

- llama.cpp and mlx-lm run SiLU in every Llama. They load this model, and its text is wrong.
- vLLM's own Llama classes and SGLang refuse ReLU. vLLM runs it by
  `vllm serve {name} --model-impl transformers`.
"""
_OVER_TWELL = """ With
`trust_remote_code=True` it loads {ours} from this folder instead, which skips the neurons
that do not fire and gives the same logits up to rounding. twellctl need not be installed."""
_CONVERTED = """
It was converted and not fine-tuned since: fine-tune it before use."""


def write_card(folder: Path, name: str, source: Path, profile: Profile | None = None) -> None:
    """Write the card of the model in `folder`, which is called `name` and was made from `source`.

    Density comes from `profile`, else from what `folder` itself holds.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    report = _report(folder)
    base = config["twell"].get("source")
    front = [f"base_model: {base}"] if base else []
    front += [*_licence(source), "library_name: transformers", "pipeline_tag: text-generation"]
    ours = config.get("auto_map", {}).get("AutoModelForCausalLM", "").split(".")[-1]
    card = _CARD.format(
        front="\n".join(front),
        name=name,
        base=f"[{base}](https://huggingface.co/{base})" if base else "a local model",
        state="" if report or config["twell"]["source_act"] == "relu" else _CONVERTED,
        density=_density(config["twell"], report, profile),
        stock=f"`{(config.get('architectures') or ['class'])[0]}`",
        over_twell=_OVER_TWELL.format(ours=f"`{ours}`") if ours else "",
    )
    (folder / CARD).write_text(card, encoding="utf-8")


def _density(twell: dict, report: dict, profile: Profile | None) -> str:
    share = "of the neurons of an FFN fire for a token, on average over the layers"
    if profile is not None:
        how = f"measured by `twellctl profile` over {profile.tokens} tokens"
        return f"{profile.density:.2%} {share}: {how}."
    if densities := twell.get("densities"):
        return f"{sum(densities) / len(densities):.2%} {share}, as a profile measured."
    if "density" in report:
        text = "the last step" if report.get("cross_entropy") is None else "held-out text"
        return f"{report['density']:.2%} {share}: measured on {text} when fine-tuning ended."
    return "How many of its neurons fire has not been measured."


def _report(folder: Path) -> dict:
    """What fine-tuning ended with; nothing for a model that was not fine-tuned."""
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) and isinstance(report.get("density"), float) else {}


def _licence(source: Path) -> list[str]:
    """The lines on the licence that stand in the front matter of the card of `source`."""
    try:
        with own_file(source / CARD).open(encoding="utf-8", errors="replace") as file:
            opening, *lines = file.read(1 << 16).splitlines() or [""]
    except (OSError, TwellError):
        return []
    if opening.strip() != "---" or "---" not in lines:
        return []
    front = lines[: lines.index("---")]
    return [line.strip() for line in front if _LICENCE_LINE.fullmatch(line)]
