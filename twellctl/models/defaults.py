"""What a config.json leaves open, or contradicts its weights in, as transformers would have it."""

from typing import Any

from twellctl.errors import TwellError

LONGEST = 1 << 20  # tokens of a model whose config does not say how many it reads
_LEFT_OPEN = ("hidden_act", "max_position_embeddings", "num_hidden_layers")
_OTHER_NAMES = ("hidden_activation", "activation_function")
_STRETCHED = ("linear", "yarn")
_WRAPPED = ".model.embed_tokens.weight"


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the family's defaults for what it leaves out of what is needed here.

    A padding token that there is not (-1, say) is none: nothing here pads, and transformers may
    fail.
    """
    vocabulary, padding = config.get("vocab_size"), config.get("pad_token_id")
    made = dict(config)
    if type(padding) is int and type(vocabulary) is int and not 0 <= padding < vocabulary:
        made["pad_token_id"] = None
    missing = [key for key in _LEFT_OPEN if config.get(key) is None]
    if not missing or any(config.get(key) for key in _OTHER_NAMES):
        return made
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        family = CONFIG_MAPPING[config["model_type"]]()
    except Exception:  # whatever a family says of a config without anything; or none is known
        return made
    return made | {key: value for key in missing if (value := getattr(family, key, None))}


def refuse_wrapped(name: str, tensors: dict[str, Any]) -> None:
    """`TwellError` for weights that bear the name of what they were wrapped in for training."""
    for tensor in tensors:
        if tensor.endswith(_WRAPPED):
            prefix = tensor.removesuffix(_WRAPPED.removeprefix("."))
            raise TwellError(
                f"{name}: its weights are named {tensor} and so on: take {prefix!r} off their "
                "names (save the model inside of the wrapper)"
            )


def context_of(config: dict[str, Any]) -> int | None:
    """How many tokens a model reads: its positions, stretched as its rotary embedding is.

    None if the config does not say. "dynamic" scaling does not count, since under it the length of
    a batch would change each text.
    """
    longest = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(longest, int) or not isinstance(rope, dict):
        return longest
    factor = rope.get("factor")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _STRETCHED or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
        return longest
    original = rope.get("original_max_position_embeddings")
    return max(longest, int((original if isinstance(original, int) else longest) * factor))
