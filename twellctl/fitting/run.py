"""A fit from a checkpoint and text to weights: the run folder, the windows, what comes out.

While it runs everything lies in `OUT.run`: the tokens, and each layer that is done. The same call
again goes on behind the last of them.
"""

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import staged
from twellctl.files.strict_json import read_json, to_json
from twellctl.fitting.fit import Fitting, HeldOut, LayerFit, Text, Told
from twellctl.fitting.kept import KeptLayers
from twellctl.fitting.layer import HowToFit
from twellctl.fitting.layerwise import Layerwise
from twellctl.fitting.settings import Fit, rank_of_map, windows_held_out
from twellctl.fitting.source import num_kept
from twellctl.fitting.steps import Steps
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import (
    default_device,
    load_model,
    load_tokenizer,
    quiet_transformers,
    read_tensors,
    stored_dtypes,
)
from twellctl.text.blocks import (
    hold_out,
    in_turn,
    read_blocks,
    token_stream,
    windows_from_starts,
    write_tokens,
)
from twellctl.text.reading import read_texts
from twellctl.text.tokens import end_of_text

SETTINGS_FILE = "fit.json"  # of a run folder
LONGEST_TEXT = 4096  # tokens in a row of one text, for others to come in
LEAST_DIFFERENT = 64  # tokens that a text must have
TOKENS_A_WEIGHT = 4  # the least number of tokens for each of the N + K unknowns of an output


@dataclass(frozen=True)
class Fitted:
    """What a fit came to; `tokens` it was fitted on, `wanted` the density that was asked for.

    `seconds` are those of this call, in which layers that an earlier one `kept` were not fitted.
    """

    map_neurons: int
    tokens: int
    wanted: float
    layers: list[LayerFit]
    held_out: HeldOut
    seconds: float
    kept: int = 0

    @property
    def density(self) -> float:
        """Share of the model's own neurons that fire, a mean over the layers."""
        return sum(layer.fires for layer in self.layers) / len(self.layers)

    def share_read(self, num_neurons: int) -> float:
        """Of the weights that FFNs of `num_neurons` had, those that a step of one token reads.

        That is all gates, up and down of what fires, and the map as two products without gates.
        """
        return (1 + 2 * self.density + 2 * self.map_neurons / num_neurons) / 3


def fit_weights(
    checkpoint: Checkpoint, run: Path, fit: Fit, world: PartialState, told: Told
) -> Fitted:
    """Fit all layers into the run folder that `prepare_fit` made; `told` of each."""
    began = time.monotonic()
    device = default_device()
    rank = rank_of_map(fit, checkpoint.ffn.hidden_size, checkpoint.ffn.intermediate_size)
    dtype = stored_dtypes(checkpoint)(checkpoint.ffn_weights(0)[0])
    fitted, held_out = _windows(run, fit)
    mine = slice(world.process_index, None, world.num_processes)
    with quiet_transformers():
        wide = torch.float32 if device.type == "cpu" else None
        model = load_model(checkpoint, dtype=wide, device=torch.device("cpu"))
        layerwise = Layerwise(model.requires_grad_(False), fit.seq_len, device)
        steps = Steps(fit.steps, fit.step_tokens, fit.step_rate, 0) if fit.steps else None
        text, how = Text(fitted[mine], held_out[mine]), HowToFit(rank, fit.ridge, dtype, steps)
        fitting = Fitting(layerwise, text, how, KeptLayers(run, dtype), fit.seed)
        layers = fitting.run(fit.density, told)
        held = fitting.held_out()
    seconds, kept = time.monotonic() - began, fitting.num_kept
    return Fitted(rank, fitted.numel(), fit.density, layers, held, seconds, kept)


def fitted_tensors(checkpoint: Checkpoint, run: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the fitted model, one after the other."""
    kept = KeptLayers(run, stored_dtypes(checkpoint)(checkpoint.ffn_weights(0)[0]))
    layer_of = {}
    for index in range(checkpoint.ffn.num_layers):
        layer_of |= {name: index for name in checkpoint.ffn_tensors(index)}
    held: tuple[int, dict[str, Tensor]] = (-1, {})
    for name, tensor in read_tensors(checkpoint):
        index = layer_of.get(name)
        if index is None:
            yield name, tensor
            continue
        if held[0] != index:
            held = index, kept.stored(kept.get(index, torch.device("cpu"))[0])
        yield name, _part_of(held[1], name).to(tensor.dtype)


def _part_of(weights: dict[str, Tensor], name: str) -> Tensor:
    """The weight or bias that is called `name` in the checkpoint."""
    *_, projection, kind = name.split(".")
    suffix = "_bias" if kind == "bias" else ""
    if projection == "gate_up_proj":
        return torch.cat([weights["gate" + suffix], weights["up" + suffix]])
    return weights[projection.removesuffix("_proj") + suffix]


def prepare_fit(run: Path, checkpoint: Checkpoint, fit: Fit, overwrite: bool) -> bool:
    """Make the run folder, or find the one of the same call; True if it goes on with layers."""
    # as JSON has them: its lists are no tuples
    settings = dataclasses.asdict(fit) | {"data": list(fit.data), "model": checkpoint.origin}
    if run.exists() and not overwrite:
        if not (run / SETTINGS_FILE).is_file():
            raise TwellError(
                f"{run} is not a run of twellctl (no {SETTINGS_FILE} in it): remove it"
            )
        if read_json(run / SETTINGS_FILE, "start again with --overwrite") == settings:
            return num_kept(run) > 0
        if num_kept(run):
            raise UsageError(
                f"{run} holds a fit with other settings, or of another version: repeat those, or "
                "start again with --overwrite"
            )
    with staged(run, overwrite=True, not_ours=_not_ours) as stage:
        tokenizer = load_tokenizer(checkpoint)
        vocabulary = checkpoint.config.get("vocab_size")
        wanted = fit.tokens + (windows_held_out(fit) + 1) * fit.seq_len

        def stream(path: str) -> Iterator[np.ndarray]:
            texts = read_texts([path], fit.text_column, tokenizer)
            return token_stream(texts, tokenizer, vocabulary)

        texts = in_turn((stream(path) for path in fit.data), LONGEST_TEXT)
        windows = windows_from_starts(texts, fit.seq_len, end_of_text(tokenizer))
        write_tokens(windows, stage / "tokens.bin", wanted)
        _check_enough(checkpoint, stage, fit)
        (stage / SETTINGS_FILE).write_text(to_json(settings, indent=2), encoding="utf-8")
    return False


def _not_ours(run: Path) -> str | None:
    return None if (run / SETTINGS_FILE).is_file() else "is not a run of twellctl"


def _check_enough(checkpoint: Checkpoint, run: Path, fit: Fit) -> None:
    fitted, _ = _windows(run, fit)
    unknowns = checkpoint.ffn.intermediate_size + checkpoint.ffn.hidden_size
    if fitted.numel() < TOKENS_A_WEIGHT * unknowns:
        raise TwellError(
            f"{fitted.numel()} tokens are too few to fit {unknowns} weights an output on: give "
            f"{TOKENS_A_WEIGHT * unknowns} or more with --data and --tokens"
        )
    different = len(fitted.unique())
    if different < LEAST_DIFFERENT:
        raise TwellError(
            f"the text is all alike, {different} different tokens: give text of the kind that the "
            "model is for"
        )


def _windows(run: Path, fit: Fit) -> tuple[Tensor, Tensor]:
    """(to fit on, held out) `[W, L]` and `[H, L]`."""
    count = (run / "tokens.bin").stat().st_size // (4 * fit.seq_len)
    num_held = windows_held_out(fit, count)
    if count < num_held + 1:
        raise TwellError(
            f"the text makes {count} windows of {fit.seq_len} tokens, and {num_held} are "
            "held out: give more text, or lower --seq-len"
        )
    blocks = read_blocks(run / "tokens.bin", fit.seq_len)
    train, held = hold_out(len(blocks), num_held / len(blocks))
    train = train[: max(1, fit.tokens // fit.seq_len)]
    return tuple(torch.from_numpy(blocks[part].astype(np.int64)) for part in (train, held))
