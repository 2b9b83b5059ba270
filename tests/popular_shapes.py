"""The sizes of popular models, and models of two such layers with random weights."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """What of a model decides on launches. K hidden size, N neurons, H and Hkv heads of size D."""

    name: str
    family: str
    K: int
    N: int
    H: int
    Hkv: int
    D: int
    vocabulary: int
    window: int | None = None

    def model(self, vocabulary: int, device: str = "cpu", **changes) -> PreTrainedModel:
        """A ReLU model of two layers in bf16, with random weights."""
        settings = {
            "hidden_size": self.K,
            "intermediate_size": self.N,
            "num_attention_heads": self.H,
            "num_key_value_heads": self.Hkv,
            "vocab_size": vocabulary,
            "num_hidden_layers": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "relu",
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        if self.D * self.H != self.K or self.family == "qwen3":
            settings["head_dim"] = self.D
        if self.family in ("mistral", "phi3"):
            settings["sliding_window"] = self.window
        config = AutoConfig.for_model(self.family, **settings | changes)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


SHAPES = [
    Shape("Llama-3.2-1B", "llama", 2048, 8192, 32, 8, 64, 128256),
    Shape("Llama-3.2-3B", "llama", 3072, 8192, 24, 8, 128, 128256),
    Shape("Llama-3.1-8B", "llama", 4096, 14336, 32, 8, 128, 128256),
    Shape("Llama-3.1-70B", "llama", 8192, 28672, 64, 8, 128, 128256),
    Shape("Llama-2-7B", "llama", 4096, 11008, 32, 32, 128, 32000),
    Shape("Llama-2-13B", "llama", 5120, 13824, 40, 40, 128, 32000),
    Shape("TinyLlama-1.1B", "llama", 2048, 5632, 32, 4, 64, 32000),
    Shape("SmolLM2-135M", "llama", 576, 1536, 9, 3, 64, 49152),
    Shape("SmolLM2-360M", "llama", 960, 2560, 15, 5, 64, 49152),
    Shape("SmolLM2-1.7B", "llama", 2048, 8192, 32, 32, 64, 49152),
    Shape("OpenLLaMA-3B", "llama", 3200, 8640, 32, 32, 100, 32000),
    Shape("Mistral-7B", "mistral", 4096, 14336, 32, 8, 128, 32768),
    Shape("Mistral-Small-24B", "mistral", 5120, 32768, 32, 8, 128, 131072),
    Shape("Phi-3-mini", "phi3", 3072, 8192, 32, 32, 96, 32064, window=2047),
    Shape("Granite-3-8B", "granite", 4096, 12800, 32, 8, 128, 49155),
    Shape("Falcon3-3B", "llama", 3072, 9216, 12, 4, 256, 131072),
    Shape("Qwen2.5-0.5B", "qwen2", 896, 4864, 14, 2, 64, 151936),
    Shape("Qwen2.5-1.5B", "qwen2", 1536, 8960, 12, 2, 128, 151936),
    Shape("Qwen2.5-3B", "qwen2", 2048, 11008, 16, 2, 128, 151936),
    Shape("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 4, 128, 152064),
    Shape("Qwen2.5-14B", "qwen2", 5120, 13824, 40, 8, 128, 152064),
    Shape("Qwen2.5-32B", "qwen2", 5120, 27648, 40, 8, 128, 152064),
    Shape("Qwen3-0.6B", "qwen3", 1024, 3072, 16, 8, 128, 151936),
    Shape("Qwen3-1.7B", "qwen3", 2048, 6144, 16, 8, 128, 151936),
    Shape("Qwen3-4B", "qwen3", 2560, 9728, 32, 8, 128, 151936),
    Shape("Qwen3-8B", "qwen3", 4096, 12288, 32, 8, 128, 151936),
    Shape("Qwen3-14B", "qwen3", 5120, 17408, 40, 8, 128, 151936),
    Shape("Qwen3-32B", "qwen3", 5120, 25600, 64, 8, 128, 151936),
]
