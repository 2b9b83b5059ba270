"""twellctl convert: makes a gated model ReLU, by fitting it layer by layer or by swapping only; or
rounds it to 4 bits and keeps its activation.

In a fitted model (twellctl/fitting), each FFN has its own neurons and a linear map of its input.
It works without end-to-end training. Its weights may be rounded to 4 bits inside the fit. In a
swapped model, only config.json changes. It talks noise until it is fine-tuned.
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
from twellctl.files.strict_json import json_text, read_json
from twellctl.fitting.chart import chart_of
from twellctl.fitting.settings import Fit, Progress, quickened
from twellctl.fitting.source import group_size_for, open_source
from twellctl.models.bytes_read import bytes_read
from twellctl.models.card import write_card
from twellctl.models.carried import copy_side_files, copy_weights, has_chat_template, write_config
from twellctl.models.checkpoint import FIT_FILE, Checkpoint, open_checkpoint
from twellctl.models.schemes import INT4
from twellctl.report.charts import Curves
from twellctl.report.notebook import Shown
from twellctl.settings import chosen, flag_name
from twellctl.text.reading import text_files
from twellctl.training.recipe import run_folder

if TYPE_CHECKING:
    from accelerate import PartialState

    from twellctl.fitting.run import Fitted

Doing = Callable[[str], None]


@dataclass(frozen=True)
class Converted(Shown):
    """What `convert` wrote; `is_chat_model`: the model has a chat template.

    `is_relu` unless its activation was kept; `bits`, if its linear layers were rounded.
    `intermediate_size` counts the model's own neurons; `fitted` is None for a swapped one. Of a
    fitted one a step of one token reads `bytes_read` of linear layers in its blocks, of the model
    that it was made from `source_bytes_read`.
    """

    out: Path
    num_layers: int
    hidden_size: int
    intermediate_size: int
    source_act: str
    is_chat_model: bool
    is_relu: bool = True
    bits: int | None = None
    fitted: "Fitted | None" = None
    bytes_read: int | None = None
    source_bytes_read: int | None = None

    def to_chart(self) -> Curves:
        """How each layer of a fitted model came out."""
        if self.fitted is None:
            raise TwellError(f"{self.out} was not fitted: there is nothing to plot")
        return chart_of(read_json(self.out / FIT_FILE), self.out.name)


def convert(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    doing: Doing = lambda text: None,
    progress: Progress = lambda done, total, differ, left: None,
    **settings: Any,
) -> Converted:
    """Write to `out` the `model` (a folder or hub id) as a ReLU model.

    `settings` are the fields of `Fit`. With `data`, the model is fitted; with `bits`, it is also
    rounded, and with `keep_activation` nothing else is changed. Repeat the call to
    continue after an interruption. Under torchrun, all processes share the text. Without `data`,
    the weight files are copied. `progress` is called with (layers fitted, of how many, how far
    hidden states differ, seconds left) after each layer, on a CPU also before the first. The result
    loads with plain `AutoModelForCausalLM.from_pretrained(out)`. Raises `TwellError`.
    """
    out, fit = from_home(out), chosen(Fit, settings)
    if fit.data:
        return _fitted(model, out, fit, revision, overwrite, doing, progress)
    if given := settings.keys() - {"data"}:
        raise UsageError(f"{flag_name(min(given))} is for a fit: give it text with data")
    with claimed(out, overwrite=overwrite, inputs=(from_home(model),)) as claim:
        checkpoint = open_source(model, revision, fit)
        with claim.staged() as stage:
            copy_weights(checkpoint, stage)
            return _written(checkpoint, out, stage, fit, None)


def _fitted(
    model: str | Path,
    out: Path,
    fit: Fit,
    revision: str | None,
    overwrite: bool,
    doing: Doing,
    progress: Progress,
) -> Converted:
    import torch
    from accelerate import PartialState

    from twellctl.fitting.folder import prepare_fit
    from twellctl.fitting.plan import require_room
    from twellctl.here.processes import in_all, in_the_first

    run, inputs = run_folder(out), [*map(from_home, (model, *fit.data)), *text_files(fit.data)]
    world = PartialState(cpu=not torch.cuda.is_available())
    with contextlib.ExitStack() as held:
        claiming = claimed(out, overwrite=overwrite, inputs=inputs, run=run)
        claim = in_the_first(world, lambda: held.enter_context(claiming))
        checkpoint = in_all(lambda: open_source(model, revision, fit))
        fit = quickened(fit, checkpoint.ffn)
        in_all(lambda: require_room(checkpoint, fit, world.num_processes))
        doing("reading and tokenising the text")
        goes_on = in_the_first(world, lambda: prepare_fit(run, checkpoint, fit, overwrite))
        world.wait_for_everyone()
        doing(f"going on with the layers in {run}" if goes_on else "fitting the first layer")
        if not goes_on and world.device.type == "cpu":  # where a layer can take an hour
            _guess(checkpoint, fit, progress)
        fitted = _fit(checkpoint, run, fit, world, progress)
        if not world.is_main_process:
            return _result(checkpoint, out, fit, fitted, False)
        doing(f"writing {out}")
        with claim.staged() as stage:
            _write_fit(checkpoint, run, stage, fit, fitted)
            made = _written(checkpoint, out, stage, fit, fitted)
        shutil.rmtree(run, ignore_errors=True)
        return made


def _guess(checkpoint: Checkpoint, fit: Fit, progress: Progress) -> None:
    """Say what the whole fit is thought to take."""
    from twellctl.fitting.plan import plan_of

    progress(0, checkpoint.ffn.num_layers, 0.0, plan_of(checkpoint, fit).seconds)


def _fit(
    checkpoint: Checkpoint, run: Path, fit: Fit, world: "PartialState", progress: Progress
) -> "Fitted":
    import torch

    from twellctl.fitting.run import fit_weights

    try:
        return fit_weights(checkpoint, run, fit, world, progress)
    except torch.OutOfMemoryError as error:
        raise TwellError("out of GPU memory: give fewer --tokens, or more GPUs") from error


def _write_fit(checkpoint: Checkpoint, run: Path, stage: Path, fit: Fit, fitted: "Fitted") -> None:
    """The weights, and the report: settings without paths of this machine, and what came of it."""
    from twellctl.fitting.run import fitted_tensors
    from twellctl.models.shard_writer import write_shards

    write_shards(fitted_tensors(checkpoint, run), stage)
    figures = dataclasses.asdict(fitted)
    settings = dataclasses.asdict(fit) | {"density": figures.pop("wanted")}
    del settings["data"]
    (stage / FIT_FILE).write_text(json_text({"settings": settings} | figures), encoding="utf-8")


def _written(
    checkpoint: Checkpoint, out: Path, stage: Path, fit: Fit, fitted: "Fitted | None"
) -> Converted:
    """Put what belongs to the weights into `stage`."""
    copy_side_files(checkpoint, stage)
    write_config(stage, _config(checkpoint, fit, fitted))
    write_card(stage, out.name, checkpoint.path)
    made = _result(checkpoint, out, fit, fitted, has_chat_template(stage))
    if fitted is None:
        return made
    return dataclasses.replace(
        made,
        bytes_read=bytes_read(open_checkpoint(stage), fitted.density),
        source_bytes_read=bytes_read(checkpoint),
    )


def _config(checkpoint: Checkpoint, fit: Fit, fitted: "Fitted | None") -> dict[str, Any]:
    """config.json of the converted model."""
    named = checkpoint.hub_id, checkpoint.activation, checkpoint.revision
    twell = new_twell(checkpoint.ffn.num_layers, *named)
    config = checkpoint.config | {"twell": twell}
    if not fit.keep_activation:
        config[checkpoint.activation_key] = "relu"
    if fitted and fitted.map_neurons:
        twell["map_neurons"] = fitted.map_neurons
        config["intermediate_size"] = checkpoint.ffn.intermediate_size + fitted.map_neurons
    if fit.bits:
        config["quantization_config"] = _quantization_config(checkpoint, fit)
    config.pop("auto_map", None)  # the stock class serves, and the code is not carried over
    return config


def _quantization_config(checkpoint: Checkpoint, fit: Fit) -> dict[str, Any]:
    from twellctl.models.loading import skeleton
    from twellctl.models.quantised import linears_outside_of_layers

    kept = linears_outside_of_layers(skeleton(checkpoint))
    return INT4.quantization_config(kept, group_size_for(checkpoint, fit))


def _result(
    checkpoint: Checkpoint,
    out: Path,
    fit: Fit,
    fitted: "Fitted | None",
    is_chat_model: bool,
) -> Converted:
    ffn = checkpoint.ffn
    return Converted(
        out=out,
        num_layers=ffn.num_layers,
        hidden_size=ffn.hidden_size,
        intermediate_size=ffn.intermediate_size,
        source_act=checkpoint.activation,
        is_chat_model=is_chat_model,
        is_relu=not fit.keep_activation,
        bits=fit.bits,
        fitted=fitted,
    )
