"""Weights of one gated FFN out of plain tensors, as tests make them."""

from torch import Tensor

from twellctl.bundle.twell_weights import FFN, Weight


def ffn_of(
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    s_gate: Tensor | None = None,
    s_up: Tensor | None = None,
    s_down: Tensor | None = None,
) -> FFN:
    """`w_gate` and `w_up` `[N, K]`, `w_down` `[K, N]`; with scales `[N]`, `[N]`, `[K]` of e4m3."""
    kind = "bf16" if s_gate is None else "e4m3"

    def weight(values: Tensor, scales: Tensor | None, bias: Tensor | None) -> Weight:
        return Weight(kind, values, None if scales is None else scales.reshape(-1, 1), bias)

    gate, up = weight(w_gate, s_gate, b_gate), weight(w_up, s_up, b_up)
    return FFN(gate, up, weight(w_down, s_down, b_down))


def ffn_by_neurons(w_gate: Tensor, w_up: Tensor, w_down: Tensor, *rest: Tensor | None) -> FFN:
    """The same of a `w_down` `[N, K]`, by rows of neurons."""
    return ffn_of(w_gate, w_up, w_down.t(), *rest)
