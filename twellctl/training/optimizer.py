"""The optimizer of fine-tuning: Muon for the matrices of the layers, AdamW for the rest.

Muon takes the momentum of a matrix, makes all its singular values about 1 and scales it to the size
of an AdamW step: so rates are of the same order for both. It keeps one number a weight where AdamW
keeps two. The shifts of gates have a rate of their own.

Of several processes each orthogonalises some of the matrices of one shape: the process r of W owns
each W-th of them from the r-th on. Where every process holds all matrices, the owner alone gets its
gradient's mean and moves its momentum, and all-gathers bring together what owners made. Where each
holds some rows of every matrix (and of all state), one all-to-all brings their rows to the owners,
and one brings the rows of what they made of them back.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from twellctl.errors import TwellError
from twellctl.here.processes import dense_of, is_one_of_several
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.loading import read_tensors, refuse_not_finite
from twellctl.training.sharded_weights import local, rows

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13


def owners_of(matrices: Iterable[Tensor]) -> dict[Tensor, int]:
    """Which process steps each of the `matrices`: those of one shape in turn."""
    seen = collections.Counter[torch.Size]()
    owners = {}
    for matrix in matrices:
        owners[matrix] = seen[matrix.shape] % dist.get_world_size()
        seen[matrix.shape] += 1
    return owners


def by_replicas(
    owners: Sequence[int], mine: Sequence[Tensor], like: Tensor, run: Callable[[Tensor], Tensor]
) -> Callable[[], list[Tensor]]:
    """Of matrices as `like` with these `owners`: `run` on `mine`, those of this process.

    `run` takes and gives `[B, M, N]`. What is returned waits for what the others made of theirs,
    and gives all, in order.
    """
    world = dist.get_world_size()
    most = max(map(owners.count, range(world)))
    sent = like.new_zeros(most, *like.shape, dtype=torch.bfloat16 if like.is_cuda else None)
    if mine:
        sent[: len(mine)] = run(torch.stack(list(mine)))
    received = sent.new_empty(most * world, *like.shape)
    gathered = _gather(received, sent, async_op=True)
    places = [owner * most + owners[:i].count(owner) for i, owner in enumerate(owners)]

    def end() -> list[Tensor]:
        gathered.wait()
        return [received[place] for place in places]

    return end


def by_owners(
    parts: Sequence[Tensor], num_rows: int, run: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The rows of `run` on whole matrices, of those matrices whose rows the `parts` are.

    `parts` are this process's rows `[m, N]` of matrices `[num_rows, N]`; `run` takes and gives
    `[B, num_rows, N]`. They travel in bfloat16 on a GPU, else in float32.
    """
    rank, world, count = dist.get_rank(), dist.get_world_size(), len(parts)
    heights = [len(range(num_rows)[rows(num_rows, r, world)]) for r in range(world)]
    owned = [range(r, count, world) for r in range(world)]
    num_mine, width = len(owned[rank]), parts[0].shape[1]
    outward = [len(theirs) * heights[rank] for theirs in owned]
    inward = [num_mine * height for height in heights]

    in_order = torch.cat([parts[i] for theirs in owned for i in theirs])
    sent = in_order.to(torch.bfloat16 if in_order.is_cuda else torch.float32)
    received = sent.new_empty(num_mine * num_rows, width)
    dist.all_to_all_single(received, sent, inward, outward)

    made = received
    if num_mine:
        pieces = zip(received.split(inward), heights, strict=True)
        matrices = torch.cat([piece.view(num_mine, h, width) for piece, h in pieces], 1)
        pieces = run(matrices).to(sent.dtype).split(heights, 1)
        made = torch.cat([piece.reshape(-1, width) for piece in pieces])

    dist.all_to_all_single(sent, made, outward, inward)
    back = sent.to(in_order.dtype).view(count, heights[rank], width)
    order = torch.tensor([i for theirs in owned for i in theirs]).argsort().tolist()
    return [back[place] for place in order]


SHIFT_RATE = 1e-2  # a step; gates are of order 1 wherever SiLU was their activation
REST_RATE = 0.5  # AdamW's rate for the rest, in rates of Muon
EMBEDDINGS_EPS = 0.1  # AdamW's eps for embeddings and head, in even shares of a clipped gradient
MOMENTUM = 0.95
ADAMW_SIZE = 0.2  # root mean square of a usual AdamW step, in learning rates
RATE_BY_SIZE = 0.015  # over the rms of weights: 0.3 % of a matrix a step (LAB.md)
OF_WHAT_WORKS = 0.1  # of that, for a model that works already: more costs it rare knowledge
AT_ONCE = 1 << 26  # weights that are orthogonalised together
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5: steep at 0, five times within 0.7-1.2


class Muon(torch.optim.AdamW):
    """AdamW, except for groups with `matrices` true: they take Muon's step."""

    param_groups: list[dict[str, Any]]
    _owners: dict[Tensor, int] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step; groups of matrices keep `momentum` as their state."""
        groups = self.param_groups
        for group in groups:
            if group["matrices"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        begun: Callable[[], None] | None = None
        for shape in sorted({p.shape for p in weights}):
            same = [p for p in weights if p.shape == shape]
            least = dist.get_world_size() if is_one_of_several() else 1  # one for each process
            size = max(least, AT_ONCE // math.prod(shape))
            for start in range(0, len(same), size):
                before, begun = begun, self._begin(same[start : start + size], group)
                if before is not None:  # its steps have travelled while the next ones were made
                    before()
        if begun is not None:
            begun()

    def _begin(self, weights: list[Tensor], group: dict) -> Callable[[], None]:
        """Begin a step of some of one shape; what is returned ends it."""
        steps = self._begin_steps(weights)
        size = ADAMW_SIZE * math.sqrt(max(weights[0].shape))

        def end() -> None:
            held = [local(p) for p in weights]
            if group["weight_decay"]:
                torch._foreach_mul_(held, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(held, steps(), alpha=-group["lr"] * size)

        return end

    def _begin_steps(self, weights: list[Tensor]) -> Callable[[], list[Tensor]]:
        """What is returned gives the orthogonal matrices that are `weights`' steps."""
        if isinstance(weights[0], DTensor):
            made = by_owners(self._ahead(weights), len(weights[0]), orthogonal)
            return lambda: made
        turned = not weights[0].is_contiguous()  # W_down, where kernels read it in training

        def laid(matrices: Iterable[Tensor]) -> list[Tensor]:
            return [m.mT for m in matrices] if turned else list(matrices)

        if not is_one_of_several():
            found = laid(orthogonal(torch.stack(laid(self._ahead(weights)))))
            return lambda: found
        for p in weights:
            self._momentum(p)  # for `bring_together` all processes must have one
        owners = [self.owners()[p] for p in weights]
        mine = [p for p, owner in zip(weights, owners, strict=True) if owner == dist.get_rank()]
        (like,) = laid(weights[:1])
        end = by_replicas(owners, laid(self._ahead(mine)), like, orthogonal)
        return lambda: laid(end())

    def _ahead(self, weights: list[Tensor]) -> list[Tensor]:
        """The momenta of `weights` after this step's gradients, and Nesterov's look ahead."""
        if not weights:
            return []
        gradients = [local(p.grad) for p in weights]
        momenta = [local(self._momentum(p)) for p in weights]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        return torch._foreach_lerp(gradients, momenta, MOMENTUM)

    def owners(self) -> dict[Tensor, int]:
        """The process that steps each matrix for all, where all hold it whole."""
        groups = [group["params"] for group in self.param_groups if group["matrices"]]
        if self._owners is None:
            held = [p for params in groups for p in params if not isinstance(p, DTensor)]
            self._owners = owners_of(held) if is_one_of_several() else {}
        return self._owners

    def bring_together(self) -> None:
        """For a checkpoint: every process gets the momenta of the owners."""
        for p, owner in self.owners().items():
            if "momentum" in self.state.get(p, {}):
                dist.broadcast(dense_of(self._momentum(p)), owner)

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum" not in state:
            state["step"] = torch.zeros(())  # AdamW looks for one when it loads a state
            state["momentum"] = torch.zeros_like(weight)
        return state["momentum"]

    def allocate(self) -> None:
        """Make the state that steps keep, of zeros, for a checkpoint to be read into."""
        for group in self.param_groups:
            for p in group["params"]:
                if group["matrices"]:
                    self._momentum(p)
                elif not self.state[p]:
                    on = p.device if group["fused"] else "cpu"
                    self.state[p]["step"] = torch.zeros((), device=on)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)


def orthogonal(matrices: Tensor) -> Tensor:
    """`[B, M, N]` with singular values of about 1 and the directions of `matrices`; contiguous."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    wide = x.shape[-2] <= x.shape[-1]
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT if wide else x.mT @ x  # symmetric, of the smaller side
        odd = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.baddbmm(x, *((odd, x) if wide else (x, odd)), beta=first)
    return x


def make_optimizer(
    model: nn.Module, gates: Sequence[nn.Module], arguments: TrainingArguments, kind: str = "muon"
) -> Muon:
    """Of all that is trained in `model`; with kind "adamw" matrices are like the rest.

    The rows of tokens that the text hardly has get hardly any gradient. AdamW would divide that by
    its own size and move them as far as all others; with a large eps they hardly move. It is made
    for gradients of norm 1, or as they are clipped: while they are smaller, all embeddings move
    less.
    """
    shifts = [p for gate in gates for p in gate.parameters()]
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    trained = [(n, p) for n, p in trained if not any(p is shift for shift in shifts)]
    inside = [p for n, p in trained if kind == "muon" and _is_inside(n, p)]
    rest = [(n, p) for n, p in trained if kind != "muon" or not _is_inside(n, p)]
    embeddings = [p for n, p in rest if p.ndim > 1 and ".layers." not in n]
    others = [p for n, p in rest if p.ndim > 1 and ".layers." in n]
    rate, decay = arguments.learning_rate, arguments.weight_decay
    rest_rate = rate * (REST_RATE if kind == "muon" else 1)
    size = max((p.numel() for p in embeddings), default=1)
    eps = EMBEDDINGS_EPS * min(1.0, arguments.max_grad_norm) / math.sqrt(size)
    groups = [
        {"params": inside, "matrices": True, "lr": rate, "weight_decay": decay},
        {"params": embeddings, "lr": rest_rate, "weight_decay": decay, "eps": eps},
        {"params": others, "lr": rest_rate, "weight_decay": decay},
        {"params": [p for _, p in rest if p.ndim < 2], "lr": rest_rate},
        {"params": shifts, "lr": SHIFT_RATE},
    ]
    return Muon(
        [{"matrices": False} | group for group in groups if group["params"]],
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        weight_decay=0.0,
        fused=torch.cuda.is_available(),
    )


def default_rate(checkpoint: Checkpoint) -> float:
    """`RATE_BY_SIZE` times the rms of the middle layer's FFN weights, or `OF_WHAT_WORKS` of it.

    The former for a model whose activation was swapped. To two digits, so
    that all processes have the same. What a layer gives after a norm does not depend on the size of
    its weights, so a step is a share of that. `TwellError` for weights that are all zero, or not
    finite.
    """
    layer = checkpoint.ffn.num_layers // 2
    squares, count = 0.0, 0
    for name, weight in read_tensors(checkpoint, checkpoint.ffn_weights(layer)):
        refuse_not_finite(checkpoint, [(name, weight)])
        squares += float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2
        count += weight.numel()
    if not squares:
        raise TwellError(
            f"the FFN weights of layer {layer} are all zero, so give --learning-rate: the default "
            "is a share of their size"
        )
    share = 1.0 if checkpoint.is_only_converted else OF_WHAT_WORKS
    return float(f"{share * RATE_BY_SIZE * math.sqrt(squares / count):.1e}")


def _is_inside(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix of a layer; the factors of an adapter are none."""
    return parameter.ndim == 2 and ".layers." in name and "lora_" not in name
