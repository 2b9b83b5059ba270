"""twellctl convert: makes a gated model ReLU, by fitting it layer by layer or by swapping only.

In a fitted model (twellctl/fitting), each FFN has its own neurons and a linear map of its input.
It works without end-to-end training. In a swapped model, only config.json changes. It talks noise
until it is fine-tuned.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellctl.bundle.twell_config import new_twell
from twellctl.errors import TwellError, UsageError
from twellctl.files.home import from_home
from twellctl.files.outputs import claimed
from twellctl.files.strict_json import json_text
from twellctl.fitting.settings import Fit
from twellctl.fitting.source import open_source
from twellctl.models.card import write_card
from twellctl.models.carried import copy_side_files, copy_weights, has_chat_template, write_config
from twellctl.models.checkpoint import FIT_FILE, Checkpoint
from twellctl.report.notebook import Shown
from twellctl.settings import chosen
from twellctl.text.reading import text_files
from twellctl.training.recipe import run_folder

if TYPE_CHECKING:
    from twellctl.fitting.run import Fitted

Told = Callable[[int, int, float, float], None]


@dataclass(frozen=True)
class Converted(Shown):
    """What `convert` wrote; `is_chat_model`: the model has a chat template.

    `intermediate_size` counts the model's own neurons; `fitted` is None for a swapped one.
    """

    out: Path
    num_layers: int
    hidden_size: int
    intermediate_size: int
    source_act: str
    is_chat_model: bool
    fitted: "Fitted | None" = None


def convert(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    doing: Callable[[str], None] = lambda text: None,
    told: Told = lambda done, total, differ, left: None,
    **settings: Any,
) -> Converted:
    """Write to `out` the `model` (a folder or hub id) as a ReLU model.

    `settings` are the fields of `Fit`. With `data`, the model is fitted. Repeat the call to
    continue after an interruption. Under torchrun, all processes share the text. Without `data`,
    the weight files are copied. `told` gets (layers fitted, of, how far hidden states differ,
    seconds left) after each layer, on a CPU also before the first. The result loads with plain
    `AutoModelForCausalLM.from_pretrained(out)`. Raises `TwellError`.
    """
    out, fit = from_home(out), chosen(Fit, settings)
    if not fit.data and settings.keys() - {"data"}:
        raise UsageError(f"{min(settings.keys() - {'data'})} is for a fit: give it text with data")
    if not fit.data:
        with claimed(out, overwrite=overwrite, inputs=(from_home(model),)) as claim:
            checkpoint = open_source(model, revision, fit)
            with claim.staged() as stage:
                copy_weights(checkpoint, stage)
                return _written(checkpoint, out, stage, None)
    return _fitted(model, out, fit, revision, overwrite, doing, told)


def _fitted(
    model: str | Path,
    out: Path,
    fit: Fit,
    revision: str | None,
    overwrite: bool,
    doing: Callable[[str], None],
    told: Told,
) -> Converted:
    import torch
    from accelerate import PartialState

    from twellctl.fitting.plan import plan_of, require_room
    from twellctl.fitting.run import fit_weights, fitted_tensors, prepare_fit
    from twellctl.here.processes import in_all, in_the_first
    from twellctl.models.shard_writer import write_shards

    run, inputs = run_folder(out), [*map(from_home, (model, *fit.data)), *text_files(fit.data)]
    world = PartialState(cpu=not torch.cuda.is_available())
    with contextlib.ExitStack() as held:
        claiming = claimed(out, overwrite=overwrite, inputs=inputs, run=run)
        claim = in_the_first(world, lambda: held.enter_context(claiming))
        checkpoint = in_all(lambda: open_source(model, revision, fit))
        in_all(lambda: require_room(checkpoint, fit, world.num_processes))
        doing("reading and tokenising the text")
        goes_on = in_the_first(world, lambda: prepare_fit(run, checkpoint, fit, overwrite))
        world.wait_for_everyone()
        doing(f"going on with the layers in {run}" if goes_on else "fitting the first layer")
        if not goes_on and world.device.type == "cpu":  # where a layer can take an hour
            told(0, checkpoint.ffn.num_layers, 0.0, plan_of(checkpoint, fit).seconds)
        try:
            fitted = fit_weights(checkpoint, run, fit, world, told)
        except torch.OutOfMemoryError as error:
            raise TwellError("out of GPU memory: give fewer --tokens, or more GPUs") from error
        if not world.is_main_process:
            return _result(checkpoint, out, fitted, False)
        doing(f"writing {out}")
        with claim.staged() as stage:
            write_shards(fitted_tensors(checkpoint, run), stage)
            # what the fit was told, without paths of this machine, and what it came to
            settings = {k: v for k, v in dataclasses.asdict(fit).items() if k != "data"}
            report = {"settings": settings} | dataclasses.asdict(fitted)
            (stage / FIT_FILE).write_text(json_text(report), encoding="utf-8")
            made = _written(checkpoint, out, stage, fitted)
        shutil.rmtree(run, ignore_errors=True)
        return made


def _written(checkpoint: Checkpoint, out: Path, stage: Path, fitted: "Fitted | None") -> Converted:
    """Put what belongs beside the weights into `stage`."""
    copy_side_files(checkpoint, stage)
    twell = new_twell(checkpoint.ffn.num_layers, checkpoint.hub_id, checkpoint.activation)
    config = checkpoint.config | {checkpoint.activation_key: "relu", "twell": twell}
    if fitted and fitted.map_neurons:
        twell["map_neurons"] = fitted.map_neurons
        config["intermediate_size"] = checkpoint.ffn.intermediate_size + fitted.map_neurons
    config.pop("auto_map", None)  # the stock class serves, and the code is not carried over
    write_config(stage, config)
    write_card(stage, out.name, checkpoint.path)
    return _result(checkpoint, out, fitted, has_chat_template(stage))


def _result(
    checkpoint: Checkpoint, out: Path, fitted: "Fitted | None", is_chat_model: bool
) -> Converted:
    ffn = checkpoint.ffn
    sizes = ffn.num_layers, ffn.hidden_size, ffn.intermediate_size
    return Converted(out, *sizes, checkpoint.activation, is_chat_model, fitted)
