"""How config.json says that the linear layers of an export are FP8. Standard library only.

It is the format `float-quantized` of compressed-tensors, which transformers (with that package) and
vLLM read as a dense FP8 model. Each linear layer but those of `ignore` stores

    weight        e4m3 [N, K]
    weight_scale  float32 [N, 1]     the layer's weight is weight * weight_scale

and rounds its input to e4m3 as it comes, with a scale for each token.
"""

QUANTIZE = ("fp8",)  # what export --quantize takes
WEIGHT_SCALE = ".weight_scale"  # behind the name of a layer
_METHOD = "compressed-tensors"
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


def quantization_config(ignore: list[str]) -> dict:
    """The block "quantization_config"; `ignore` names the linear layers that stay as they are."""
    scheme = {
        "targets": ["Linear"],
        "weights": _E4M3 | {"strategy": "channel", "dynamic": False},
        "input_activations": _E4M3 | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": _METHOD,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignore,
    }


def is_fp8(config: dict) -> bool:
    """Whether `config`, of a config.json, is of an FP8 export."""
    found = config.get("quantization_config")
    return (
        isinstance(found, dict)
        and "twell" in config
        and isinstance(found.get("ignore"), list)
        and found == quantization_config(found["ignore"])
    )
