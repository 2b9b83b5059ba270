"""How many neurons fire in a forward of a model of transformers, counted by hooks."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from twellctl.bundle.twell_config import mapped_neurons
from twellctl.bundle.twell_format import fires
from twellctl.bundle.twell_model import activation_of, gate_and_up, gated_ffns


class FiredCounts:
    """Counts at the activations of a model's gated FFNs, in forwards inside `counted`.

    A model with several FFNs in a layer (experts), or with an activation that is not zero below
    zero (SiLU), is not metered. An FFN that runs over TwELL's kernels never shows its activation:
    the gates of the tokens that count are computed a second time.
    `neurons`: how many each layer has, known from the first counted forward on. `mapped`: how many
    of them always fire (twell_config.py), and are no news.
    """

    def __init__(self, model: nn.Module, num_hidden_layers: int):
        ffns, device = gated_ffns(model), next(model.parameters()).device
        below = torch.tensor([-1.0], device="cpu" if device.type == "meta" else device)
        is_metered = not any(activation_of(ffn)(below).any() for ffn in ffns)
        self._ffns = ffns if is_metered and len(ffns) <= num_hidden_layers else []
        self.neurons = [1] * len(self._ffns)
        self.mapped = mapped_neurons(model.config)
        self._counts: list[Tensor] = []

    @contextlib.contextmanager
    def counted(self, num_rows: int, last: int, places: Tensor | None = None) -> Iterator[None]:
        """A forward of `num_rows` rows, whose `last` tokens each count, is made inside.

        `places` int64 `[num_rows last]`: where they are among all tokens; None: rows are of one
        length.
        """
        pick = partial(_at, places) if places is not None else partial(_last_of, num_rows, last)
        self._counts = [torch.empty(0)] * len(self._ffns)
        with contextlib.ExitStack() as hooks:
            for i, ffn in enumerate(self._ffns if last else ()):
                hooks.callback(self._hook(i, ffn, pick).remove)
            yield

    def found(self, num_rows: int, last: int, device: torch.device) -> Tensor:
        """int32 `[L, num_rows, last]`, of the forward counted last."""
        if not self._ffns or not last:
            size = (len(self._ffns), num_rows, last)
            return torch.empty(size, dtype=torch.int32, device=device)
        return torch.stack(self._counts).view(-1, num_rows, last)

    def _count(self, i: int, fired: Tensor) -> None:
        own = fired[..., : fired.shape[-1] - self.mapped]
        self._counts[i] = own.sum(-1, dtype=torch.int32) + self.mapped
        self.neurons[i] = fired.shape[-1]

    def _hook(self, i: int, ffn: nn.Module, pick: Callable[[Tensor], Tensor]) -> RemovableHandle:
        activation = activation_of(ffn)

        def look_at_activation(module: nn.Module, inputs: tuple[Tensor], active: Tensor) -> None:
            self._count(i, pick(active) != 0)

        def compute_gates(module: nn.Module, inputs: tuple[Tensor]) -> None:
            x = pick(inputs[0])
            first, *second = gate_and_up(ffn)
            gate = first(x) if second else first(x).chunk(2, -1)[0]
            self._count(i, fires(gate))

        if getattr(ffn, "twell_sources", ""):
            return ffn.register_forward_pre_hook(compute_gates)
        return activation.register_forward_hook(look_at_activation)


def _last_of(num_rows: int, last: int, tokens: Tensor) -> Tensor:
    return tokens.reshape(num_rows, -1, tokens.shape[-1])[:, -last:]


def _at(places: Tensor, tokens: Tensor) -> Tensor:
    return tokens.reshape(-1, tokens.shape[-1])[places]
