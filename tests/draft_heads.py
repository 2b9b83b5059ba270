"""Draft heads of tiny models, with random weights, and what they should guess."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twellctl.bundle.twell_e4m3 import round_weight
from twellctl.decoding.head_drafter import HeadPass
from twellctl.heads.folder import save_head
from twellctl.heads.head import DraftHead, HeadSizes
from twellctl.heads.last_layer import lower_layers
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.models.lower_states import lower_states


def random_head(model: PreTrainedModel, num_tokens: int | None = None) -> DraftHead:
    """For a model like Llama; it can guess `num_tokens` of its tokens, None: all."""
    config = model.config
    V = num_tokens or config.vocab_size
    torch.manual_seed(7)
    head = DraftHead(
        HeadSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            V,
            config.rms_norm_eps,
            qkv_bias=model.model.layers[-1].self_attn.q_proj.bias is not None,
            q_k_norms=hasattr(model.model.layers[-1].self_attn, "q_norm"),
            lower=lower_layers(config.num_hidden_layers),
        )
    )
    for parameter in head.parameters():
        if parameter.dim() == 1:  # norms and biases: each its own
            parameter.data += 0.3 * torch.randn_like(parameter)
    head.tokens = torch.randperm(config.vocab_size)[:V].sort().values
    return head.requires_grad_(False).eval().to(model.dtype)


def rounded(weight: Tensor, *sizes: int) -> Tensor:
    """As kernels read it, where all `sizes` are multiples of 128."""
    if any(size % 128 for size in sizes):
        return weight
    values, scales = round_weight(weight)
    return (values.float() * scales).to(weight.dtype)


def rounded_head(head: DraftHead, layer: bool = True) -> DraftHead:
    """With the weights that kernels read; of heads of 256 in one kernel the `layer` is bf16."""
    head = copy.deepcopy(head)
    merge = [head.merge] if head.sizes.lower else []
    for linear in (*merge, head.join, *((head.q, head.k, head.v, head.out) if layer else ())):
        linear.weight.data = rounded(linear.weight, linear.in_features)
    for linear in (head.gate, head.up, head.down) if layer else ():
        linear.weight.data = rounded(linear.weight, head.sizes.K, head.sizes.N)
    return head


@torch.inference_mode()
def guessed(head: DraftHead, model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """The greedy drafts behind `tokens`, of which the model has read all but the last one, one
    after the other over transformers' own cache."""
    device = model.device
    head = copy.deepcopy(head).to(device)
    read = torch.tensor([tokens[:-1]], device=device)
    with lower_states(model, head.sizes.lower) as lower:
        found = model.base_model(read, use_cache=True)
    cached = found.past_key_values.layers[-1]
    keys, values = (part[0].transpose(0, 1) for part in (cached.keys, cached.values))
    state = torch.cat((*lower, found.last_hidden_state), -1)[0, -1]
    token, drafts = tokens[-1], []
    rows = model.get_output_embeddings().weight[head.tokens]
    for position in range(len(tokens) - 1, len(tokens) - 1 + count):
        where = torch.tensor([[position]], device=device)
        cos, sin = (
            part[0, 0]
            for part in model.base_model.rotary_emb(read.new_zeros((), dtype=model.dtype), where)
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal keys, values
            keys, values = torch.cat((keys, k[None])), torch.cat((values, v[None]))
            shared = q.shape[0] // k.shape[0]
            wide = [part.repeat_interleave(shared, 1) for part in (keys, values)]
            scores = torch.einsum("hd,phd->hp", q, wide[0]) / q.shape[-1] ** 0.5
            return torch.einsum("hp,phd->hd", scores.softmax(-1), wide[1])

        embedded = model.get_input_embeddings().weight[token]
        state = head(embedded, state, (cos, sin), attend)
        token = int(head.tokens[(rows @ state).argmax()])
        drafts.append(token)
    return drafts


def head_folder(source: Path, folder: Path, **facts: Any) -> Path:
    """`folder` with a head of random weights for the model in `source`, which it names."""
    model = load_model(open_checkpoint(source))
    folder.mkdir(parents=True)
    save_head(random_head(model), model, folder, {"source": str(source)} | facts)
    return folder


def assert_alike(
    judge: HeadPass, ours: HeadPass, tables: Tensor, position: int, states: Tensor, count: int
) -> None:
    """That both make the same of `count` tokens from `position` on, each from what the judge made
    before it; `states` `[1, (1 + n) K]` are of the token before them, and lie among others."""
    device = states.device
    at = torch.tensor([position], dtype=torch.int32, device=device)
    read = torch.cat((at, at - 1, at - 2))
    for each in (judge, ours):
        each.begin(tables, at, count, torch.cat((-states, states, 2 * states)), read)
    for number in range(count):
        token = torch.tensor([7 + number], dtype=torch.int32, device=device)
        wanted, found = (each(number, token, at + number) for each in (judge, ours))
        assert (ours.states - judge.states).float().std() < 0.02 * judge.states.float().std()
        assert (found - wanted).std() < 0.02 * wanted.std()
        assert wanted[0, found.argmax()] > wanted.max() - 0.1 * wanted.std()
        ours.states = judge.states
