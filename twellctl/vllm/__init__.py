"""The vLLM plugin: with twellctl installed, `vllm serve EXPORT` runs the FFNs over TwELL.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). It puts classes
of ours under the names of vLLM's own; they are imported when a model of that name is served. What
is no export is served by them exactly as before.

Nothing of vLLM is imported but in `register`, `models.py`, `ffn.py` and `fp8_ffn.py`.
"""

from twellctl.models.in_vllm import ARCHITECTURES

# vLLM's class for families that it leaves to transformers, and for --model-impl transformers
_BACKEND = "TransformersForCausalLM"

stock_models: dict[str, object] = {}  # what vLLM had registered under these names


def register() -> None:
    """Register our classes with vLLM; more calls than one change nothing."""
    from vllm import ModelRegistry

    for name, stock in list(ModelRegistry.models.items()):
        ours = name in ARCHITECTURES or getattr(stock, "class_name", None) == _BACKEND
        if ours and name not in stock_models:
            stock_models[name] = stock
            ModelRegistry.register_model(name, f"{__name__}.models:{name}")
