"""The Trainer of sparsification: losses, gradients, the schedule of the penalty, checkpoints.

Per optimizer step: `loss = (1 - w) * cross_entropy + w * KL(teacher || student)`, each a mean over
the tokens of the step, plus what `PricedGates` (or `FfnPenalty`) and `LayerStates` add in the
backward pass. Of several processes each has a replica of the model, and its share of the step's
tokens, and their gradients are averaged (`replicas`).
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from twellctl.errors import TwellError
from twellctl.models.head_loss import HeadLoss, Losses
from twellctl.training.captured_part import CapturedPart
from twellctl.training.l1_schedule import L1Schedule
from twellctl.training.layer_states import LayerStates
from twellctl.training.priced_gates import PricedGates
from twellctl.training.replicas import Replicas
from twellctl.training.runs import drop_old_checkpoints, mark_complete
from twellctl.training.sharded_checkpoints import is_sharded_checkpoint, read_training_state
from twellctl.training.sharded_weights import local
from twellctl.training.sparsity import FfnPenalty

SCHEDULER_FILE = "scheduler.pt"  # in a checkpoint, as transformers calls it
PARTS_BEFORE_CAPTURE = 2  # parts of steps: the first compiles


@dataclass(frozen=True)
class StepReport:
    """Means over one optimizer step and all processes; `l1` is the coefficient the step used."""

    cross_entropy: float
    teacher_kl: float
    density_by_layer: list[float]
    l1: float

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)


@contextlib.contextmanager
def full_disk_as_oserror() -> Iterator[None]:
    """`OSError` for the RuntimeError by which torch's writer says that a disk is full."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise OSError(f"torch did not write a checkpoint, is there room left? {error}") from error


class SparseTrainer(Trainer):
    """A Trainer for blocks of `input_ids` that penalises and counts what fires."""

    is_sharded = False

    def __init__(
        self,
        *,
        penalty: PricedGates | FfnPenalty,
        schedule: L1Schedule,
        teacher: nn.Module | None,
        teacher_weight: float,
        states: LayerStates | None,
        compiled: bool,
        captures: bool,
        note: Callable[[str], None],
        **kwargs: Any,
    ):
        """`captures`: replay parts of a step as a CUDA graph; `note` says why that failed."""
        # what `Blocks` gives is a batch already
        super().__init__(data_collator=lambda batch: batch, **kwargs)
        # nothing is to be wrapped around the model
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)
        # our loss is a mean: Trainer divides by accumulation
        self.model_accepts_loss_kwargs = False
        self.muon = self.optimizer
        self.penalty = penalty
        self.schedule = schedule
        self.head = HeadLoss(self.model, compiled)
        self.teacher = None if teacher is None else HeadLoss(teacher)
        self.teacher_weight = teacher_weight if teacher is not None else 0.0
        self.states = states
        self.note = note
        self._captures, self._parts_run = captures, 0
        self._captured: CapturedPart | None = None
        self.report: StepReport | None = None
        self.held_out_by_layer: list[float] | None = None
        several = self.args.world_size > 1 and not self.is_sharded
        self.replicas = Replicas(self.model, self.muon.owners()) if several else None
        self._sums: list[Tensor] = []
        self._norm: Tensor = torch.tensor(math.nan)  # of the last step's gradients
        self._checked: tuple[list[str], Tensor] = [], torch.full([1], -1.0)
        self._counted: tuple[int, list[int], Tensor] | None = None

    def tell_first(self, callback: TrainerCallback) -> None:
        """Let `callback` come before all others."""
        self.callback_handler.callbacks.insert(0, callback)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        ids = inputs["input_ids"]
        self._set_penalty(ids)
        loss, measured = self._losses(model, ids)
        self._sums.append(measured)
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any) -> Tensor:
        ids, num_parts = inputs["input_ids"], self.current_gradient_accumulation_steps
        is_last = self.accelerator.sync_gradients
        captured = self._captured
        recorded = captured is not None and captured.takes(ids, num_parts)
        if captured is not None and recorded:
            self._set_penalty(ids)
            loss, measured = captured(ids)
            self._sums.append(measured)
        else:
            with self._sending(is_last):
                loss = super().training_step(model, inputs, *args)
            self._parts_run += 1
            if self._captures and self._parts_run == PARTS_BEFORE_CAPTURE:
                self._capture(model, ids)
        if is_last:
            self._average_gradients(large_sent=not recorded or num_parts == 1)
            self._checked = self._check_gradients()  # clipping would spread what is not finite
        return loss

    def _sending(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a part of a step: its backward pass may send gradients, if it is the last."""
        return contextlib.nullcontext() if self.replicas is None else self.replicas.sending(is_last)

    def _average_gradients(self, large_sent: bool) -> None:
        """Over all processes, at the end of a step: what has not been averaged on the way."""
        if self.replicas is not None:
            self.replicas.average_rest(large_sent)

    def _check_gradients(self) -> tuple[list[str], Tensor]:
        """(names of parameters with gradients, `[1]`: number of the last not finite one, or -1).

        Gradients go from the last layer to the first, so it is there that they went wrong.
        """
        trained = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        squares = self._squares(list(trained.values()))
        self._norm = squares.sum().sqrt()
        bad = ~squares.isfinite()
        numbers = torch.arange(len(bad), dtype=torch.float32, device=bad.device)
        return list(trained), torch.where(bad, numbers, -1.0).amax().view(1)

    def _squares(self, trained: list[nn.Parameter]) -> Tensor:
        """`[trained]`: the squared norm of each gradient, over all processes."""
        if self._counted is None or self._counted[0] != len(trained):
            places = [i for i, p in enumerate(trained) if self._counts(p)]
            on_device = torch.tensor(places, dtype=torch.long, device=self.args.device)
            self._counted = len(trained), places, on_device
        _, places, on_device = self._counted
        squares = torch.zeros(len(trained), device=self.args.device)
        if places:
            gradients = [local(trained[i].grad) for i in places]
            norms = torch.stack(torch._foreach_norm(gradients, 2, torch.float32))
            squares.index_copy_(0, on_device, norms.square())
        return self.accelerator.reduce(squares, reduction="sum")

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this process counts the gradient of `parameter`, or its rows of it."""
        return self.replicas is None or self.replicas.counts(parameter)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """By the norm that `_check_gradients` has found."""
        trained = [p for p in model.parameters() if p.grad is not None]
        if self.replicas is not None:
            trained = [p for p in trained if self.replicas.has_mean(p)]
        factor = (self.args.max_grad_norm / (self._norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(p.grad) for p in trained], factor)
        return self._norm

    def _capture(self, model: nn.Module, ids: Tensor) -> None:
        num_parts = self.current_gradient_accumulation_steps

        def part(ids: Tensor) -> tuple[Tensor, Tensor]:
            with self.compute_loss_context_manager():
                loss, measured = self._losses(model, ids)
            loss = loss / num_parts
            with self._sending(num_parts == 1):
                self.accelerator.backward(loss)
            return loss.detach(), measured

        try:
            ids = ids.to(self.args.device)
            self._captured = CapturedPart(part, ids, num_parts, self.model.parameters())
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self.note(f"steps are slower, because no CUDA graph is recorded: {reason}")

    def _set_penalty(self, ids: Tensor) -> None:
        scale = 1 / self.current_gradient_accumulation_steps
        self.penalty.begin(ids.numel(), self.schedule.l1 * scale)
        if self.states is not None:
            self.states.scale = scale

    def _losses(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(the loss, what a step's report is made of)."""
        losses = self.head.losses(ids, self.teacher, self.teacher_weight, model)
        parts = torch.stack([losses.cross_entropy, losses.teacher_kl])
        return losses.loss, torch.cat([parts, self.penalty.densities()])

    def finish_step(self, interrupted: bool) -> bool:
        """After an optimizer step: move the schedule; True if a process was interrupted."""
        means = torch.stack(self._sums).mean(0)
        names, odd = self._checked
        summed = torch.cat([means, odd, means.new_tensor([float(interrupted)])])
        self._sums.clear()
        cross_entropy, teacher_kl, *densities, odd, stop = self.accelerator.reduce(
            summed, reduction="mean"
        ).tolist()
        self.report = StepReport(cross_entropy, teacher_kl, densities, self.schedule.l1)
        if not math.isfinite(self.report.cross_entropy):
            raise TwellError(
                f"the loss became {self.report.cross_entropy} at step {self.state.global_step}: "
                "start again with a lower --learning-rate and --overwrite"
            )
        if odd >= 0:
            raise TwellError(
                f"the gradient of {names[round(odd)]} was not finite at step "
                f"{self.state.global_step}: start again with a lower --learning-rate and "
                "--overwrite"
            )
        self.penalty.follow(self.report.density_by_layer)
        group = self.optimizer.param_groups[0]
        share = group["lr"] / group["initial_lr"]
        progress = self.state.global_step / self.state.max_steps
        self.schedule.update(self.report.density, progress, share)
        return stop > 0

    def drop_captured(self) -> None:
        """Forget the part that was recorded. To be called at the end of every run.

        A process ends its NCCL groups as it ends, and NCCL (from 2.26 on) waits there for graphs
        that hold its calls.
        """
        self._captured, self._parts_run = None, 0

    def sparsity_state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the Trainer's own."""
        return {
            "schedule": dict(vars(self.schedule)),
            "report": vars(self.report),
            "gates": self.penalty.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `sparsity_state()`."""
        vars(self.schedule).update(state["schedule"])
        self.report = StepReport(**state["report"])
        self.penalty.state = state["gates"]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.replicas is not None:
            self.muon.bring_together()
        with full_disk_as_oserror():
            super()._save_checkpoint(model, trial)

    def checkpoint_saved(self) -> None:
        """The checkpoint of this step is written: it counts."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            self.complete(folder, self.sparsity_state())

    def complete(self, folder: Path, state: dict[str, Any]) -> None:
        """Make a checkpoint count, with the `sparsity_state` of its step; drop older ones."""
        mark_complete(folder, state)
        drop_old_checkpoints(folder.parent)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_sharded_checkpoint(Path(checkpoint)):  # else it comes with the optimizer
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded_checkpoint(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        read_training_state(Path(checkpoint), self.model, self.muon)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_FILE))
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.muon.param_groups, rates, strict=True):
            group["lr"] = rate

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.report is not None:
            logs = logs | vars(self.report) | {"density": self.report.density}
            del logs["density_by_layer"]  # trackers take scalars
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Held-out cross-entropy (`eval_loss`), KL to the teacher if there is one, and density.

        Over all processes. The densities of the layers are left in `held_out_by_layer`: trackers
        take scalars.
        """
        self.model.eval()
        found = []
        for ids, counts in self._my_held_out():
            self.penalty.begin(ids.numel())
            losses = self._held_out(self.head, ids, self.teacher)
            parts = torch.stack([losses.cross_entropy, losses.teacher_kl])
            if counts:
                found.append(torch.cat([parts, self.penalty.densities()]))
        loss, kl, *self.held_out_by_layer = self._means(found, 2 + len(self.penalty.ffns))
        density = sum(self.held_out_by_layer) / len(self.held_out_by_layer)
        metrics = {"eval_loss": loss, "eval_density": density}
        if self.teacher is not None:
            metrics["eval_teacher_kl"] = kl
        _check_held_out(metrics["eval_loss"], "lower --learning-rate, and --overwrite")
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def evaluate_teacher(self) -> float | None:
        """The teacher's held-out cross-entropy on the same blocks."""
        if self.teacher is None or self.eval_dataset is None:
            return None
        found = [
            (self._held_out(self.teacher, ids).cross_entropy.view(1), counts)
            for ids, counts in self._my_held_out()
        ]
        (loss,) = self._means([loss for loss, counts in found if counts], 1)
        _check_held_out(loss, "take another --teacher, or none")
        return loss

    def _held_out(self, head: HeadLoss, ids: Tensor, teacher: HeadLoss | None = None) -> Losses:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.bf16):
            return head.losses(ids, teacher, teacher_weight=1.0)

    def _my_held_out(self):
        """(ids, whether they count) of single blocks, so that every one weighs the same.

        However many processes share them, that is.
        """
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for index in range(rank, len(self.eval_dataset), world):
            yield self.eval_dataset[index]["input_ids"][None].to(self.args.device), True

    def _means(self, found: list[Tensor], size: int) -> list[float]:
        """Of vectors `[size]`, over those of all processes; one may have none."""
        device = self.args.device
        total = torch.stack(found).sum(0) if found else torch.zeros(size, device=device)
        summed = torch.cat([total, torch.tensor([float(len(found))], device=device)])
        *sums, count = self.accelerator.reduce(summed, reduction="sum").tolist()
        return [value / count for value in sums]


def _check_held_out(loss: float, remedy: str) -> None:
    if not math.isfinite(loss):
        raise TwellError(f"the held-out loss became {loss}: {remedy}")
