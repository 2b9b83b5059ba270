"""The original of a fit: which one it is, that the fit is its own, and both loaded as one.

`convert --data` changes FFNs alone. So a fit can draft for its original (decoding/drafting.py): its
attention, embeddings and head are the original's, byte for byte, and are in memory once. Where
`--bits 4` has rounded the linear layers, attention is the fit's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twellctl.errors import TwellError, UsageError, shown
from twellctl.files.made_of import contents_of
from twellctl.models.checkpoint import FIT_FILE, REPORT_FILE, Checkpoint, open_checkpoint
from twellctl.models.checks import ACTIVATION_KEYS
from twellctl.models.shards import ORIGINAL

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# what a fit changes in config.json, and what says nothing about what a model computes
_NOT_COMPARED = {
    *ACTIVATION_KEYS,
    "intermediate_size",
    "twell",
    "quantization_config",
    "auto_map",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
}
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def find_original(
    fit: Checkpoint,
    wanted: bool = True,
    original: str | Path | None = None,
    flag: str = "--exact",
) -> Checkpoint | None:
    """The model that `fit` was made from: `original`, or the one in its folder, or what its
    config.json names; None unless `wanted`, which `flag` says.

    `TwellError` for what is no fit, for a fit of another model, and where none is named. Weights
    are compared by `load_pair`.
    """
    if not wanted:
        if original is not None:
            raise UsageError(f"original {original} is for exact answers: add {flag}")
        return None
    _refuse_no_fit(fit)
    found = open_checkpoint(original) if original else opened_source(fit)
    if found is None:
        raise TwellError(
            f"{fit.name} does not say from which model it was made: name that with --original MODEL"
        )
    found.require_unquantised()
    _refuse_other(fit, found)
    return found


def opened_source(model: Checkpoint) -> Checkpoint | None:
    """What `model` was made from: the original in its folder, or what its config.json names, in the
    revision that it names; None: it names none."""
    within, twell = model.path / ORIGINAL, model.twell
    if within.is_dir():
        return open_checkpoint(within)
    if "source" not in twell:
        return None
    return open_checkpoint(twell["source"], revision=twell.get("source_revision"))


def _refuse_no_fit(fit: Checkpoint) -> None:
    if (fit.path / REPORT_FILE).exists():
        raise TwellError(
            f"{fit.name} was fine-tuned, so its attention is not its original's: exact answers "
            "need a model as 'twellctl convert --data' makes it"
        )
    if "twell" not in fit.config or not (fit.path / FIT_FILE).exists():
        raise TwellError(
            f"{fit.name} is not a fit (no {FIT_FILE}): exact answers need a model as 'twellctl "
            "convert --data' makes it"
        )


def _refuse_other(fit: Checkpoint, original: Checkpoint) -> None:
    """`TwellError` for a model that `fit` was not made from, as far as its files say."""
    ours, theirs = fit.config, original.config
    both = (ours.keys() & theirs.keys()) - _NOT_COMPARED
    others = sorted(key for key in both if ours[key] != theirs[key])
    if fit.own_neurons != original.ffn.intermediate_size:
        others.append("intermediate_size")
    if fit.twell["source_act"] != original.activation:
        others.append(original.activation_key)
    if others:
        raise TwellError(
            f"{fit.name} was not made from {original.name}: their config.json differ in "
            f"{', '.join(map(shown, others))}"
        )
    for name in _VOCABULARIES:
        files = [checkpoint.path / name for checkpoint in (fit, original)]
        if all(file.is_file() for file in files):
            one, other = contents_of(files)
            if one != other and not _same_tokens(fit, original):
                raise TwellError(f"{fit.name} has other tokens than {original.name} ({name})")
            return


def _same_tokens(*checkpoints: Checkpoint) -> bool:
    from twellctl.models.loading import load_tokenizer

    one, other = (load_tokenizer(checkpoint).get_vocab() for checkpoint in checkpoints)
    return one == other


def load_pair(
    original: Checkpoint, fit: Checkpoint, device: "torch.device | None" = None
) -> tuple["PreTrainedModel", "PreTrainedModel"]:
    """Both models on `device`, None: the default one; what is equal in them is one tensor. Layers
    of the fit in 4 bits are packed.

    `TwellError` for a fit that differs in more than FFNs, and rounded layers.
    """
    import torch

    from twellctl.models.loading import default_device, load_model

    cpu = torch.device("cpu")
    models = load_model(original, device=cpu), load_model(fit, device=cpu, packed=True)
    may_differ = is_of_layers if fit.scheme else lambda name: False
    if (name := share_equal(*models, may_differ)) is not None:
        raise not_made_from(fit, original, name)
    one, other = (model.to(device or default_device()) for model in models)
    return one, other


def not_made_from(fit: Checkpoint, original: Checkpoint, name: str) -> TwellError:
    """Because of the tensor of that name."""
    return TwellError(
        f"{fit.name} was not made from {original.name}, or changed after that: {name} differs"
    )


def share_equal(
    model: "PreTrainedModel", fit: "PreTrainedModel", may_differ: Callable[[str], bool]
) -> str | None:
    """Let `fit` use the parameters of `model` that hold the same bytes; the name of the first one
    outside of FFNs that does not and may not differ, None if there is none."""
    from twellctl.bundle.twell_model import gated_ffns

    of_ffns = {id(part) for ffn in gated_ffns(fit) for part in ffn.modules()}
    theirs = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in fit.named_modules():
        if id(module) in of_ffns:
            continue
        for last, own in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{last}" if prefix else last
            if are_equal(own, theirs.get(name)):
                module.register_parameter(last, theirs[name])
            elif not may_differ(name):
                return name
    return None


def are_equal(one, other) -> bool:
    """Whether two tensors hold the same bytes."""
    import torch

    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(part.detach().contiguous().view(torch.uint8) for part in (one, other)))


def is_of_layers(name: str) -> bool:
    """Whether a parameter is of a linear layer in a block, which rounding changes: `q_proj`, or
    `kv_a_proj_with_mqa`."""
    return "_proj" in name
