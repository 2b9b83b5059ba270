"""Who answers: a model by itself, or its original, for which a fit or a draft head drafts.

All commands with `--exact` open their MODEL here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twellctl.errors import TwellError
from twellctl.heads.folder import WITHIN, HeadFolder, is_head, load_head, open_head
from twellctl.models.checkpoint import Checkpoint, checkpoint_in, located, open_checkpoint
from twellctl.models.originals import find_original, load_pair

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from twellctl.heads.head import DraftHead

# of a head, by what an original's config.json calls them
_SIZES = {
    "hidden_size": "K",
    "num_attention_heads": "H",
    "num_key_value_heads": "Hkv",
    "head_dim": "D",
}


@dataclass(frozen=True)
class Answerer:
    """What was found in the folder that the user named: nothing is loaded yet.

    `checkpoint`: the model, whose tokenizer and chat template count; of a draft head, which has
    neither, its original. `original`: whose answers are wanted, None: those of `checkpoint`.
    `head`: what drafts for it, None: `checkpoint`, where there is an original.
    """

    checkpoint: Checkpoint
    original: Checkpoint | None = None
    head: HeadFolder | None = None

    @property
    def named(self) -> Checkpoint | HeadFolder:
        """What the user named."""
        return self.head or self.checkpoint

    @property
    def answering(self) -> Checkpoint:
        """The model whose answers are wanted."""
        return self.original or self.checkpoint


def open_answerer(
    model: str | Path,
    exact: bool = False,
    original: str | Path | None = None,
    revision: str | None = None,
) -> Answerer:
    """`model` by itself; with `exact` its `original`, None: the one that it was made from or for,
    or the model itself, if a draft head is in its folder.

    `TwellError` as in `checkpoint_in` and `find_original`; for a draft head without `exact`, for
    one of another model, as far as its files say, and for one whose original is not found.
    """
    name, path = located(model, revision)
    if exact and is_head(path):
        head = open_head(name, path)
        return _with_head(head, _original_of(head) if original is None else original)
    checkpoint = checkpoint_in(name, path)
    if exact and is_head(path / WITHIN):
        return _with_head(open_head(name, path / WITHIN), original or checkpoint)
    return Answerer(checkpoint, find_original(checkpoint, exact, original))


def _with_head(head: HeadFolder, original: str | Path | Checkpoint) -> Answerer:
    found = open_checkpoint(original)
    found.require_unquantised()
    _refuse_other(head, found)
    return Answerer(found, found, head)


def _original_of(head: HeadFolder) -> Checkpoint:
    """The model that it names, in the revision for which it was trained."""
    if head.source is None:
        raise TwellError(
            f"{head.name} does not say for which model it drafts: name that with --original MODEL"
        )
    try:
        return open_checkpoint(head.source, revision=head.revision)
    except TwellError as error:
        raise TwellError(
            f"the model that {head.name} drafts for cannot be taken ({error}): name it with "
            "--original MODEL"
        ) from error


def _refuse_other(head: HeadFolder, original: Checkpoint) -> None:
    """`TwellError` for a model of other sizes, or another activation, than the one of `head`."""
    sizes, config = head.facts["sizes"], original.config
    given = {key: config[key] for key in _SIZES if isinstance(config.get(key), int)}
    others = [f"{key} {size}" for key, size in given.items() if sizes.get(_SIZES[key]) != size]
    vocabulary, known = config.get("vocab_size"), sizes.get("V")
    if not isinstance(known, int) or (isinstance(vocabulary, int) and known > vocabulary):
        others.append(f"vocab_size {vocabulary}")
    if not original.is_silu:  # a fit has the norms of its original, for which the head may be
        others.append(f"{original.activation_key} {original.activation}")
    if others:
        raise TwellError(
            f"{head.name} was trained for another model than {original.name}, which has "
            f"{', '.join(others)}"
        )


def load_models(
    answerer: Answerer, device: "torch.device | None" = None
) -> tuple["PreTrainedModel", "PreTrainedModel | DraftHead | None"]:
    """The model whose answers are wanted, and what drafts for it, None without an original.

    On `device`, None: the default one, but a head on the CPU; layers in 4 bits packed. `TwellError`
    as in `load_model`, `load_pair` and `load_head`.
    """
    from twellctl.models.loading import load_model

    original, head = answerer.original, answerer.head
    if original is None:
        return load_model(answerer.checkpoint, device=device, packed=True), None
    if head is None:
        return load_pair(original, answerer.checkpoint, device)
    model = load_model(original, device=device)
    return model, load_head(head, model, original.name)
