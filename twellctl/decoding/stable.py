"""Stable decoding: which token is chosen does not depend on who is beside, nor on how many tokens a
pass reads.

Sums of floats depend on their order, and the fastest order depends on the number of tokens. A
stable decoder keeps to one: a pass over few tokens gives each of them the same bits, alone or with
others, as a row's next token or as one of several to verify. Of the kernels in bf16 this holds for
dense products of up to `STABLE_ROWS` tokens, whose builds add up slabs of the same size in the same
order; for attention once its splits depend on positions alone (`attention.plan_alike`); for norms
and the choice, which take each token by itself. The scheduler reads prompts one at a time, in
chunks that begin where they always do, and are always filled up alike (prompt_graphs.py).
"""

from transformers import PreTrainedModel

from twellctl.bundle.twell_rounded_linear import weight_of
from twellctl.decoding.kernel_fit import rows_at_once, weights_kind

STABLE_ROWS = 32  # tokens of a pass; products of more have slabs of another size
_INPUTS = 64  # a multiple of which our own products take


def why_not_stable(model: PreTrainedModel) -> str | None:
    """None if the decode kernels, which can drive `model`, can do so stably, else a sentence."""
    name, kind = type(model).__name__, weights_kind(model)
    if kind != "bf16":
        return f"the decode kernels are stable in bf16, not over {kind}"
    if rows_at_once(model) < STABLE_ROWS:
        return f"the decode kernels take no {STABLE_ROWS} tokens on this GPU"
    first = model.model.layers[0]
    for part in (first.self_attn.o_proj, first.mlp.down_proj):
        if weight_of(part).K % _INPUTS:
            return f"a layer of {name} has {weight_of(part).K} inputs, no multiple of {_INPUTS}"
    return None
