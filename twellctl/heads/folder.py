"""The folder of a draft head: its weights, its sizes, and which model it drafts for.

It may lie in the folder of that model, as `WITHIN`: readers of the model do not look there.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.errors import TwellError, reason, shown
from twellctl.files.outputs import NOT_OURS
from twellctl.files.strict_json import json_text, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from twellctl.heads.head import DraftHead

FACTS, WEIGHTS = "draft_head.json", "draft_head.safetensors"
WITHIN = "draft_head"
FORMAT = 1


@dataclass(frozen=True)
class HeadFolder:
    """`name` is what the user called it, `path` where it lies, `facts` what `FACTS` says."""

    name: str
    path: Path
    facts: dict[str, Any]

    @property
    def source(self) -> str | None:
        """The hub id of the model that it drafts for; None: `FACTS` says none."""
        return self._named("source")

    @property
    def revision(self) -> str | None:
        """That of the source; None: the newest one."""
        return self._named("revision")

    def _named(self, key: str) -> str | None:
        value = self.facts.get(key)
        return value if isinstance(value, str) else None


def is_head(folder: Path) -> bool:
    return (folder / FACTS).is_file()


def not_ours_in_head(folder: Path) -> str | None:
    """What twellctl did not write: the head in `folder`, or more than a head; None: nothing."""
    if not is_head(folder):
        return NOT_OURS
    others = sorted({path.name for path in folder.iterdir()} - {FACTS, WEIGHTS})
    return f"holds {others[0]}, which was not written by twellctl" if others else None


def head_files(folder: Path) -> list[Path]:
    """Those that say what it guesses."""
    return [path for path in (folder / FACTS, folder / WEIGHTS) if path.is_file()]


def open_head(name: str, path: Path) -> HeadFolder:
    """`TwellError` for a folder of another format, or one that is not whole."""
    facts = read_json(path / FACTS, "train the draft head again")
    if facts.get("format") != FORMAT or not isinstance(facts.get("sizes"), dict):
        raise TwellError(
            f"{name} is a draft head of format {shown(facts.get('format'))}, this version reads "
            f"{FORMAT}: train it again"
        )
    if not (path / WEIGHTS).is_file():
        raise TwellError(f"{name} has no {WEIGHTS}: copy it again")
    return HeadFolder(name, path, facts)


def save_head(
    head: "DraftHead", model: "PreTrainedModel", folder: Path, facts: dict[str, Any]
) -> None:
    """Write to `folder`, which is there, what `load_head` reads; `model` is whom it drafts for."""
    import torch
    from safetensors.torch import save_file

    floats = {
        name: part.detach().to("cpu", torch.bfloat16).contiguous()
        for name, part in head.named_parameters()
    }
    save_file(floats | {"tokens": head.tokens.int().cpu()}, folder / WEIGHTS)
    known = {"format": FORMAT, "sizes": dataclasses.asdict(head.sizes), "norm": norm_of(model)}
    (folder / FACTS).write_text(json_text(known | facts))


def load_head(folder: HeadFolder, model: "PreTrainedModel", original: str) -> "DraftHead":
    """On the CPU, in the dtype of the `model` for which it drafts; the user calls that `original`.

    `TwellError` for one that was trained for another model, and for weights that do not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from twellctl.heads.head import DraftHead, HeadSizes

    norm = norm_of(model)
    if norm is None or folder.facts.get("norm") != norm:
        raise TwellError(f"{folder.name} was trained for another model than {original}")
    num_layers = model.config.num_hidden_layers
    try:
        with torch.device("meta"):  # else random weights are drawn, for seconds
            sizes = folder.facts["sizes"]
            lower = tuple(sizes.get("lower", ()))  # heads of before read none
            if not all(type(layer) is int and 0 <= layer < num_layers for layer in lower):
                raise TypeError(f"it reads layers {lower} of {num_layers}")
            head = DraftHead(HeadSizes(**sizes | {"lower": lower}))
        head = head.to(model.dtype).to_empty(device="cpu")
        head.load_state_dict(load_file(folder.path / WEIGHTS))
    except (TypeError, RuntimeError, OSError, SafetensorError) as error:
        said = reason(error)
        raise TwellError(f"{folder.name} cannot be loaded ({said}): train it again") from error
    return head.requires_grad_(False).eval()


def norm_of(model: "PreTrainedModel") -> str | None:
    """A digest of the weight of the last norm, by which a model is known, whatever dtype it has;
    None of a model that has no such weight, for which there is no head."""
    weight = getattr(getattr(model.base_model, "norm", None), "weight", None)
    if weight is None:
        return None
    weight = weight.detach().bfloat16().float().cpu()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()
