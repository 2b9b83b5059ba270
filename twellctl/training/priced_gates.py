"""Gates with a price on every neuron that fires, with shifts that are trained.

    gate'  = gate - shift * (direction . x)      a shift a neuron, a direction a layer
    active = relu(gate')
    loss  += price * mean over layers and tokens of the sum over neurons of [gate' > 0]

A gate becomes sparse when all of it moves down, as by a bias. Stock FFNs have none, and the weights
alone are slow to act as one: such a change of all neurons by one direction is the largest there is
by its norm, which bounds each step of Muon. But what an FFN reads is normalised and far from
centred. There is a direction whose product with it is nearly 1 for every token (in a 29M Llama 1 to
within 0.05 to 0.16, by layer). A shift along it does what a bias would, and at the end becomes part
of the weights, exactly: `W_gate -= shift direction^T`. So what is stored is a plain ReLU model.

Gradients are those of the soft ReLU `gate * soft` with `soft = sigmoid(gate / SLOPE)`, and the
price is that of `soft`: a gate near zero feels what its neuron is worth and what it costs,
whichever side it is on. What fires keeps its value: unlike an L1 penalty the price does not shrink
it.

The price is never part of the loss tensor. It is added in the backward pass, which is right under
every kind of gradient checkpointing, where a sum collected on the side would be counted twice.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from twellctl.bundle.twell_model import activation_name, activation_of, gate_and_up, gated_ffns
from twellctl.here.processes import same_in_all
from twellctl.models.head_loss import whole
from twellctl.models.linear_map import num_mapped

SLOPE = 0.05  # width of the sigmoid of the backward pass
RIDGE = 1e-2  # of the mean square of an input, added to each when a direction is fitted
TOKENS_A_WEIGHT = 8  # tokens for each weight of a direction that is fitted


class PricedGate(nn.Module):
    """Takes the place of an FFN's activation, after a product that `shifted` corrects."""

    def __init__(self, num_neurons: int, hidden_size: int, map_neurons: int, price: Tensor):
        super().__init__()
        self.num_own = num_neurons - map_neurons
        self.num_apart = num_neurons  # that have a gate of their own; the others share one
        device = price.device
        self.shift = nn.Parameter(torch.zeros(num_neurons, device=device))
        direction = torch.zeros(hidden_size, device=device)
        self.register_buffer("direction", direction, persistent=False)
        self.price = price  # of one neuron, the same in all layers
        self.fired = torch.zeros((), device=device)

    def shifted(self, product: nn.Module, args: tuple[Tensor], gate: Tensor) -> Tensor:
        """The forward hook of the gate product, whose last columns may be those of up."""
        by = (args[0].float() @ self.direction)[..., None] * self.shift
        if gate.shape[-1] > len(self.shift):
            by = nn.functional.pad(by, (0, gate.shape[-1] - len(self.shift)))
        return (gate.float() - by).to(gate.dtype)

    def forward(self, gate: Tensor) -> Tensor:
        fires = gate > 0
        self.fired = fires[..., : self.num_own].sum(dtype=torch.float32)
        if not self.training:
            return torch.where(fires, gate, 0)
        return _Fire.apply(gate, self.price, self.num_apart)


class _Fire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, price: Tensor, num_apart: int) -> Tensor:
        ctx.save_for_backward(gate, price)
        ctx.num_apart = num_apart
        return gate.relu()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        stored, price = ctx.saved_tensors
        gate, grad = stored.float(), grad.float()
        soft = torch.sigmoid(gate / SLOPE)
        slope = soft * (1 - soft) / SLOPE * (grad * gate + price)
        found = grad * soft + slope
        if ctx.num_apart < found.shape[-1]:  # the neurons of a map have one gate, and keep it
            found[..., ctx.num_apart :] = found[..., ctx.num_apart :].mean(-1, keepdim=True)
        return found.to(stored.dtype), None, None


class PricedGates:
    """Puts a `PricedGate` into every gated FFN of `model`, and counts what fires.

    The penalty is `l1 * mean over layers and tokens of the number of neurons that fire`. The last
    `map_neurons`, which always fire, are not counted, and so far from zero that no price reaches
    them. They have one gate, by whose equal rows engines know them: each takes the mean of their
    gradients, which moves all rows alike, and leaves the gradient of what the FFN reads as it is.
    Where a trainer has made rows differ, each stays a gate of its own.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, map_neurons: int = 0):
        self.ffns = gated_ffns(model)
        self.hidden_size, num_neurons = self.ffns[0].down_proj.weight.shape
        self.num_neurons = num_neurons - map_neurons
        self._price = torch.zeros((), device=next(model.parameters()).device)
        sizes = num_neurons, self.hidden_size, map_neurons
        self.gates = [PricedGate(*sizes, self._price) for _ in self.ffns]
        self._num_tokens = 0
        self._stock = [activation_of(ffn) for ffn in self.ffns]
        self._hooks = []
        for ffn, gate in zip(self.ffns, self.gates, strict=True):
            setattr(ffn, activation_name(ffn), gate.train(ffn.training))
            product = gate_and_up(ffn)[0]
            self._hooks.append(product.register_forward_hook(gate.shifted))
            if map_neurons:  # all processes gather
                parts = (p for p in (product.weight, product.bias) if p is not None)
                gate.num_apart -= num_mapped(*(whole(part)[:num_neurons] for part in parts))

    @torch.no_grad()
    def find_directions(self, model: nn.Module, batches: Iterable[Tensor]) -> None:
        """Fit each layer's direction on `batches` of ids `[B, L]`, some 8 tokens a weight."""
        moments = [_Moments(ffn, self.hidden_size) for ffn in self.ffns]
        wanted = TOKENS_A_WEIGHT * self.hidden_size
        for ids in batches:
            self.begin(ids.numel())
            model(input_ids=ids, use_cache=False)
            if (wanted := wanted - ids.numel()) <= 0:
                break
        for gate, seen in zip(self.gates, moments, strict=True):
            gate.direction.copy_(same_in_all(seen.direction()))

    @property
    def state(self) -> list[dict[str, list[float]]]:
        """What a checkpoint must hold of each layer."""
        return [
            {"shift": gate.shift.tolist(), "direction": gate.direction.tolist()}
            for gate in self.gates
        ]

    @state.setter
    def state(self, layers: list[dict[str, list[float]]]) -> None:
        for gate, values in zip(self.gates, layers, strict=True):
            gate.shift.data.copy_(torch.tensor(values["shift"]))
            gate.direction.copy_(torch.tensor(values["direction"]))

    @torch.no_grad()
    def fold(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Make the shifts part of those gate weights that `state` of `model` has; take them out.

        Rows of a map, which may differ by rounding, become one.
        """
        names = {id(module): name for name, module in model.named_modules()}
        for ffn, gate in zip(self.ffns, self.gates, strict=True):
            state.pop(f"{names[id(ffn)]}.{activation_name(ffn)}.shift", None)
            product, count = names[id(gate_and_up(ffn)[0])], len(gate.shift)
            if (name := f"{product}.weight") in state:
                weight = state[name].clone()
                moved = weight[:count].float()
                moved -= torch.outer(gate.shift, gate.direction).to(moved.device)
                weight[:count] = moved
                state[name] = weight
            if gate.num_apart < count:
                for name in {f"{product}.weight", f"{product}.bias"} & state.keys():
                    state[name] = state[name].clone()
                    state[name][gate.num_apart : count] = state[name][gate.num_apart].clone()

    def remove(self) -> None:
        """Give the FFNs back their own activation."""
        for hook in self._hooks:
            hook.remove()
        for ffn, stock in zip(self.ffns, self._stock, strict=True):
            setattr(ffn, activation_name(ffn), stock)

    def begin(self, num_tokens: int, l1: float = 0.0) -> None:
        """Before a forward pass.

        `l1` is the price of a neuron that fires, times what the rest of the loss is multiplied by.
        """
        self._price.fill_(l1 / (len(self.gates) * num_tokens))
        self._num_tokens = num_tokens

    def follow(self, densities: list[float]) -> None:
        """Nothing: what fired changes nothing of how they compute."""

    def densities(self) -> Tensor:
        """Of the last forward pass, `[layers]`."""
        fired = torch.stack([gate.fired for gate in self.gates])
        return fired / (self._num_tokens * self.num_neurons)


class _Moments:
    """The sums of what an FFN reads and of its products, while it is hooked."""

    def __init__(self, ffn: nn.Module, hidden_size: int):
        device = next(ffn.parameters()).device
        self.count, self.sum = 0, torch.zeros(hidden_size, device=device)
        self.products = torch.zeros(hidden_size, hidden_size, device=device)
        self._hook = ffn.register_forward_pre_hook(self._add)

    def _add(self, ffn: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].flatten(0, -2).float()
        self.count += len(x)
        self.sum += x.sum(0)
        self.products.addmm_(x.T, x)

    def direction(self) -> Tensor:
        """`[K]`: its product with what was read is nearest to 1, by least squares."""
        self._hook.remove()
        products, mean = self.products / self.count, self.sum / self.count
        products.diagonal().add_(RIDGE * products.diagonal().mean() + 1e-20)
        return torch.linalg.solve(products, mean)
