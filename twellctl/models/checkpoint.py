"""A model folder without torch: its config, what its weights are called, what its FFNs look like.

Every command opens its MODEL here, so that a folder which cannot work is refused before anything is
loaded or written. Nothing here reads a weight, but to compare a head with the embeddings.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from twellctl.bundle import twell_config
from twellctl.errors import TwellError, UsageError, bounded, encodable, reason, shown
from twellctl.files.home import from_home
from twellctl.files.strict_json import read_json
from twellctl.files.workspace import workspace_of
from twellctl.heads.folder import WEIGHTS, WITHIN, is_head
from twellctl.models import checks
from twellctl.models.defaults import completed, context_of, refuse_wrapped
from twellctl.models.schemes import INT4, Scheme, scheme_of
from twellctl.models.shards import ORIGINAL, TensorInfo, other_weights, read_shards, with_weights

SILU = ("silu", "swish")
GATED = (*SILU, "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "mish")
REPORT_FILE = "twell_finetune.json"  # what a fine-tuning run ended with
FIT_FILE = "twell_fit.json"  # what a fit came to
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Checkpoint:
    """A checked model folder. `name` is what the user called it, `path` where it lies; `revision`
    of the hub's model, None: its newest one, or a local folder.

    `corrections` are the entries of `config` that the folder's config.json lacks, or in which it
    differs. `config` is that of the plain ReLU model, even if the folder holds it in SiLU form with
    the numbers of `silu_form` (twell_config.py); code that reads weights undoes that form.
    """

    name: str
    path: Path
    config: dict
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    ffn: checks.FfnShape
    corrections: dict = field(default_factory=dict)
    silu_form: dict | None = None
    revision: str | None = None

    @property
    def context(self) -> int | None:
        """How many tokens the model reads; None: config.json does not say."""
        return context_of(self.config)

    @property
    def activation(self) -> str:
        return self.config[self.activation_key]

    @property
    def activation_key(self) -> str:
        """What config.json calls the activation."""
        return checks.activation_key(self.config)

    @property
    def map_neurons(self) -> int:
        """How many of the last neurons of each FFN always fire, those of a fitted model's map."""
        return self.twell.get("map_neurons", 0)

    @property
    def own_neurons(self) -> int:
        """Neurons of each FFN without those of a map."""
        return self.ffn.intermediate_size - self.map_neurons

    @property
    def stored(self) -> dict[str, TensorInfo]:
        """The tensors that its files hold: of packed weights their parts."""
        parts = (part for tensor in self.tensors.values() for part in tensor.parts or (tensor,))
        return {part.name: part for part in parts}

    def ffn_weights(self, layer: int) -> list[str]:
        """The names of the weights of a layer's FFN; layers count from 0."""
        ffns = checks.ffns_of(self.tensors)
        in_order = sorted(ffns, key=lambda ffn: [int(number) for number in re.findall(r"\d+", ffn)])
        return [tensor.name for tensor in ffns[in_order[layer]].values()]

    def ffn_tensors(self, layer: int) -> list[str]:
        """The names of the weights of a layer's FFN, and of those biases that are there."""
        weights = self.ffn_weights(layer)
        biases = [name.removesuffix("weight") + "bias" for name in weights]
        return [*weights, *(name for name in biases if name in self.tensors)]

    def layer_name(self, layer: int) -> str:
        """What the names of a layer's tensors begin with, those of its FFN among them."""
        return self.ffn_weights(layer)[0].rsplit(".", 3)[0]

    @property
    def hub_id(self) -> str | None:
        """The id under which the hub has this model; None for a local folder."""
        return None if self.path == from_home(self.name) else self.name

    @property
    def is_silu(self) -> bool:
        return self.activation in SILU

    @property
    def is_only_converted(self) -> bool:
        """Whether it is ReLU with the weights of another model, neither fitted nor trained."""
        changed = any((self.path / name).exists() for name in (REPORT_FILE, FIT_FILE))
        return self.activation == "relu" and self.twell["source_act"] != "relu" and not changed

    @property
    def is_only_rounded(self) -> bool:
        """Whether it is in 4 bits with the activation that it had: every neuron fires."""
        return self.is_gated_source and self.scheme is INT4

    def beware_of_noise(self, note: Callable[[str], None]) -> None:
        """Say so if the model was only converted."""
        if self.is_only_converted:
            note(f"beware: {self.name} was converted and not fine-tuned: what it writes is noise")

    @property
    def is_gated_source(self) -> bool:
        """Whether its activation is of a kind that ReLU can stand for."""
        return self.activation in GATED

    @property
    def _kind(self) -> str:
        return f"{'SiLU' if self.is_silu else self.activation} model"

    def say_if_dense(self, note: Callable[[str], None]) -> None:
        """Say so if no neuron can be left out: the activation is not ReLU."""
        if self.activation != "relu":
            note(f"{self.name} is a {self._kind}: every neuron is computed for every token")

    @property
    def scheme(self) -> Scheme | None:
        """What the linear layers of a quantised model are stored in; None for plain floats."""
        return scheme_of(self.config)

    @property
    def twell(self) -> dict:
        """The "twell" block of config.json, checked; a default one for a model that has none.

        A `source` that is no hub id, but a folder of some machine, is left out.
        """
        if "twell" not in self.config:
            named = self.hub_id, self.activation, self.revision
            return twell_config.new_twell(self.ffn.num_layers, *named)
        try:
            twell = twell_config.check_twell(self.config["twell"], self.ffn.num_layers)
        except ValueError as error:
            raise TwellError(f"{self.name}: config.json's {error}") from error
        is_public = _HUB_ID.fullmatch(str(twell.get("source")))
        of_source = {"source", "source_revision"}
        return twell if is_public else {k: v for k, v in twell.items() if k not in of_source}

    def require_unquantised(self) -> None:
        """Refuse a quantised model, whose weights are for inference only."""
        if (scheme := self.scheme) is not None:
            twell = self.config["twell"]
            origin = twell.get("rounded_from") or twell.get("source")
            made = "exported" if scheme.by_export else "made"
            raise TwellError(
                f"{self.name} is quantised already ({scheme.title}): take the model that it was "
                f"{made} from{f', {shown(origin)}' if origin else ''}"
            )

    def require_gated_source(self) -> None:
        """Refuse an activation that ReLU cannot stand for."""
        if not self.is_gated_source:
            raise TwellError(
                f"{self.name} has {self.activation_key} {self.activation!r}: take a model with one "
                f"of {', '.join(GATED)}"
            )

    def require_relu(self) -> None:
        """Refuse a model whose FFNs are not ReLU (yet)."""
        if self.is_only_rounded:  # which convert refuses
            raise TwellError(
                f"{self.name} is a {self._kind} in 4 bits, made with --keep-activation: every "
                "neuron fires, and other engines run the folder as it is; for a ReLU model in 4 "
                "bits, convert its source without that flag"
            )
        if self.is_gated_source:
            raise TwellError(
                f"{self.name} is a {self._kind}: make it ReLU with "
                f"'twellctl convert {self.name} OUT', then fine-tune"
            )
        if self.activation != "relu":
            raise TwellError(
                f"{self.name} has {self.activation_key} {self.activation!r}: twellctl works on "
                "models made ReLU by 'twellctl convert'"
            )

    def require_tokenizer(self) -> None:
        """Refuse a folder without a tokenizer."""
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
        if not any((self.path / name).is_file() for name in names):
            raise TwellError(
                f"{self.name} has no tokenizer (no {' or '.join(names[:2])}): "
                "copy the tokenizer files of its original into its folder"
            )


def open_checkpoint(model: str | Path | Checkpoint, *, revision: str | None = None) -> Checkpoint:
    """Read and check what `located` finds; `TwellError` as there and in `checkpoint_in`."""
    if isinstance(model, Checkpoint):
        return model
    return replace(checkpoint_in(*located(model, revision)), revision=revision)


def located(model: str | Path, revision: str | None = None) -> tuple[str, Path]:
    """What the user calls it, and where it lies: a local folder, or a hub id (downloaded to the
    hub's cache).

    `TwellError` if it is neither. `UsageError` for a revision of a local folder.
    """
    name, path = str(model) or ".", from_home(model)
    if not path.exists():
        path = _download(name, revision)
    elif revision is not None:
        raise UsageError(f"{name} is a local folder, which has no --revision {revision}")
    if encodable(str(path)) != str(path):
        raise TwellError(f"{name}: safetensors reads no path that is not UTF-8: rename the folder")
    return name, path


def checkpoint_in(name: str, path: Path) -> Checkpoint:
    """Read and check the folder `path`.

    `TwellError` names what is wrong: no model of its own, no config, no safetensors, a missing or
    truncated shard, a quantised, MoE, multimodal or non-gated model, remote code, a "twell" block
    of another version.
    """
    _refuse_adapter(name, path)
    if is_head(path):
        raise TwellError(
            f"{name} is a draft head, which answers nothing alone: generate, chat, serve-local and "
            "write take it with --exact, and bench exact as it is"
        )
    if not (path / "config.json").is_file():
        why = other_weights(path) or "has no config.json: give a model folder of transformers"
        raise TwellError(f"{name} {why}")
    stored = read_json(path / "config.json")
    config = completed(stored)
    scheme = scheme_of(config)
    if scheme is None:
        checks.refuse_quantised(name, config)
    checks.refuse_unsupported(name, config)
    tensors, shards = read_shards(name, path)
    if scheme is INT4:
        group_size = twell_config.group_size_of(config["quantization_config"])
        tensors = with_weights(name, path, tensors, group_size)
    checks.refuse_dtypes(name, tensors, set(scheme.dtypes) if scheme else set())
    refuse_wrapped(name, tensors)
    ffn = checks.ffn_shape(name, config, tensors)
    checks.compare_sizes(name, config, tensors, ffn)
    both = [tensors[weight] for weight in (checks.EMBEDDINGS, checks.HEAD) if weight in tensors]
    tied = len(both) == 2 and config.get("tie_word_embeddings") is not False
    if tied and not _are_equal(path, *both):  # readers part here: some write one over the other
        config = config | {"tie_word_embeddings": False}
    corrections = {key: config[key] for key in config if config[key] != stored.get(key, ...)}
    checkpoint = Checkpoint(name, path, config, tensors, shards, ffn, corrections)
    twell = checkpoint.twell  # refuses a block that is not sound
    return _read_as_relu(checkpoint) if twell_config.is_silu_form(twell) else checkpoint


def _read_as_relu(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` of a folder in SiLU form; `TwellError` if the form is not that of its FFNs."""
    name, config = checkpoint.name, checkpoint.config
    form = {key: config["twell"][key] for key in twell_config.SILU_FORM}
    counts = {len(k) for k in form["sharpness"] if isinstance(k, list)}
    partly = any(map(twell_config.stays_silu, form["sharpness"])) and not checkpoint.is_silu
    fits = counts <= {checkpoint.ffn.intermediate_size} and checkpoint.activation in GATED
    if partly or not fits:
        raise TwellError(
            f"{name}: config.json's sharpness is not that of its hidden_act "
            f"{checkpoint.activation!r} or of its FFNs: export the model again"
        )
    twell = {key: value for key, value in config["twell"].items() if key not in form}
    plain = {checkpoint.activation_key: "relu", "twell": twell}
    corrections = checkpoint.corrections | plain
    return replace(checkpoint, config=config | plain, corrections=corrections, silu_form=form)


def open_config_file(config: str | Path) -> tuple[Path, dict]:
    """A config.json without weights, a file or a folder with one: where it lies, what it holds.

    `TwellError` if there is none. `auto_map` is left out: no code of it is run.
    """
    file = Path(config)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise TwellError(f"{file} does not exist: give a config.json, or a folder with one")
    return file, {key: value for key, value in read_json(file).items() if key != "auto_map"}


def _are_equal(path: Path, one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors of a folder hold the same; reads them up to where they part."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.shape:
        return False
    import torch
    from safetensors import safe_open

    with (
        safe_open(path / one.shard, framework="pt") as left,
        safe_open(path / other.shard, framework="pt") as right,
    ):
        parts = left.get_slice(one.name), right.get_slice(other.name)
        rows = (slice(start, start + 4096) for start in range(0, one.shape[0], 4096))
        return all(torch.equal(*(part[some] for part in parts)) for some in rows)


def _refuse_adapter(name: str, path: Path) -> None:
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {shown(base)}" if base else ""
        raise TwellError(
            f"{name} holds an adapter{of}: merge it into its model first (PEFT's merge_and_unload, "
            "then save_pretrained)"
        )


def _download(name: str, revision: str | None) -> Path:
    if (old := workspace_of(Path(name)) / "old").exists():
        raise TwellError(f"{name} was being replaced by a command that was killed: move {old} back")
    if not _HUB_ID.fullmatch(name):
        raise TwellError(f"{name} does not exist: give a model folder or a hub id like owner/model")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "model*.safetensors", "*.model", "*.jinja", "*.txt", "*.md"]
    wanted += ["LICEN[SC]E*", "NOTICE*", f"{ORIGINAL}/*", f"{WITHIN}/*", WEIGHTS]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:
        parent = Path(name).parent
        siblings = [] if parent == Path() else sorted(path.name for path in parent.glob("*/"))
        there = f" ({parent} holds {', '.join(siblings[:9])})" if siblings else ""
        raise TwellError(
            f"{name} is not a local folder{there} and could not be fetched from the hub "
            f"(check the id and the network): {bounded(reason(error), 160)}"
        ) from error
