"""Random models for the decoder over kernels on a GPU, and what judges their steps and texts."""

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": MIXED,
    "sliding_window": 40,
    "vocab_size": 1001,
}
GRANITE = {
    "vocab_size": 1003,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.02,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
HEADS_OF_96 = {"hidden_size": 576, "num_attention_heads": 6, "num_key_value_heads": 6}
ODD_HEADS = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
IN_PART = {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 40, "num_key_value_heads": 4},
    "phi3": HEADS_OF_96 | {"sliding_window": 40},
    "odd heads": ODD_HEADS | {"head_dim": 64},
    "granite": GRANITE,
    "falcon3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256},
    "gemma": {"head_dim": 256, "num_key_value_heads": 1, "vocab_size": 1001},
    "gemma2": GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA | {"tie_word_embeddings": False},
    "smollm3": {"no_rope_layers": [1, 0, 1], "num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 4},
    "exaone4": {"layer_types": MIXED, "sliding_window": 40, "head_dim": 80},
    "part of a head": {"kind": "phi3", "rope_parameters": IN_PART},
}


def heads(H: int, Hkv: int, **changes) -> dict:
    return {"num_attention_heads": H, "num_key_value_heads": Hkv} | changes


ONE_KERNEL = {  # models of which a step of one row is one kernel
    "llama": heads(32, 32),
    "few heads of k": heads(32, 8),
    "qwen2": heads(16, 2),
    "qwen3": heads(16, 8, head_dim=128),
    "mistral": heads(16, 4, sliding_window=40),
    "granite": heads(16, 4, tie_word_embeddings=True, **GRANITE),
    "heads of 256": heads(12, 4, hidden_size=3072),
    "1536": heads(12, 2, hidden_size=1536),
    "3072": heads(24, 8, hidden_size=3072),
    "3584": heads(28, 4, hidden_size=3584),
    "4096": heads(32, 8, hidden_size=4096),
}
NUM_TOKENS = 40  # of a text


def make(family: str, changes: dict | None = None):
    """A random ReLU model in bf16 whose logits spread over some units."""
    settings = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1416,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.06,
        "hidden_act": "relu",
    }
    torch.manual_seed(0)
    settings |= FAMILIES[family] if changes is None else changes
    settings["hidden_activation"] = settings["hidden_act"]  # as Gemma calls it
    kind = settings.pop("kind", family if family in CONFIG_MAPPING else "llama")
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_for_one_kernel(family: str, neurons: int = 1416):
    settings = {"hidden_size": 2048, "initializer_range": 0.03, "intermediate_size": neurons}
    return make(family, settings | ONE_KERNEL[family])


def dequantised(model):
    """The model in float64 with plain layers, of the very weights that the FP8 layers hold."""
    judge = AutoModelForCausalLM.from_config(model.config).eval().to("cuda", torch.float64)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".weight_scale")]:
        weights[name.removesuffix("_scale")] *= weights.pop(name)
    judge.load_state_dict(weights)
    return judge


def logits_of(model, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocabulary]` of the places where `tokens` were chosen, float64."""
    ids = torch.tensor([prompt + tokens], device="cuda")
    with torch.inference_mode():
        return model(ids).logits[0, len(prompt) - 1 : -1].double()


def shortfall(logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """By how much the logit of a chosen token lies below the best, at most."""
    return (logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]).max().item()


def shortfalls(judge, model, prompt: list[int], written: list[int]) -> tuple[float, float]:
    """By the judge, of the tokens that the model itself chooses, in bf16, and of `written`."""
    wanted = logits_of(judge, prompt, written)
    usual = shortfall(wanted, logits_of(model, prompt, written).argmax(-1))
    return usual, shortfall(wanted, torch.tensor(written, device="cuda"))


def check_written(judge, model, prompt: list[int], written: list[int]) -> None:
    """That these tokens are about as likely by the judge as those of the model itself."""
    usual, found = shortfalls(judge, model, prompt, written)
    assert found <= max(2 * usual, 0.1), f"prompt of {len(prompt)} tokens"


def twice_each(forms: dict, inputs: tuple) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Logits and counts of each form, which are the same bits the second time."""
    found = {}
    for name, form in forms.items():
        first = [made.clone() for made in form(*inputs)]
        for made, again in zip(first, form(*inputs), strict=True):
            assert torch.equal(made, again), name
        found[name] = tuple(first)
    return found


def check_forms(found: dict, wanted: torch.Tensor, *, counted: bool) -> None:
    """Logits near to `wanted`, and counts near to one another's, if they are `counted`."""
    errors = {name: (logits - wanted).abs().max() for name, (logits, _) in found.items()}
    usual, fired = list(errors.values())[-1], list(found.values())[-1][1]
    for name, (_, counts) in found.items():
        assert errors[name] <= max(2 * usual, 0.05), errors
        if counted:
            assert (counts - fired).abs().sum() <= 0.02 * fired.sum() + 2, name
