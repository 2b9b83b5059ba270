"""Checkpoints become torch models here, always through the stock transformers class."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as hf_logging

from twellctl.checkpoint import Checkpoint
from twellctl.errors import TwellError

MASKLESS = "twell_causal"  # how SDPA without a mask is registered with transformers


def default_device() -> torch.device:
    """The current CUDA device, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    activation: str | None = None,
) -> PreTrainedModel:
    """The model in eval mode, of the stock class.

    `dtype` None keeps the stored one. `activation` runs the weights with another `hidden_act` (a
    freshly converted model with the SiLU it had). Weights of a checkpoint without shards are drawn.
    """
    device = device or default_device()
    if not checkpoint.shards:
        return _random_model(checkpoint, dtype, device)
    extra = {} if activation is None else {"hidden_act": activation}
    try:
        with quiet_transformers():
            model, found = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                dtype=dtype or "auto",
                trust_remote_code=False,
                output_loading_info=True,
                **extra,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TwellError(f"{checkpoint.name} could not be loaded: {reason}") from error
    if missing := sorted(found["missing_keys"]):
        raise TwellError(
            f"{checkpoint.name} lacks {len(missing)} of its weights, {missing[0]} first: fetch its "
            "safetensors files again"
        )
    return model.to(device).eval()


def _random_model(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    config = AutoConfig.for_model(**checkpoint.config)
    with quiet_transformers(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype)
    return model.to(device).eval()


def without_mask(model: PreTrainedModel, seq_len: int) -> None:
    """Let `model` attend by SDPA's `is_causal` to whole blocks of up to `seq_len` tokens.

    Else transformers reads the positions back from the GPU in each forward pass, to see whether a
    mask is needed, and the host waits. Where a shorter window needs one all stays as it is.
    """
    sizes = [getattr(model.config, n, None) for n in ("sliding_window", "attention_chunk_size")]
    window = min((size for size in sizes if size), default=seq_len)
    if model.config._attn_implementation == "sdpa" and seq_len <= window:
        # transformers makes a mask only for the names of attention that it knows
        AttentionInterface.register(MASKLESS, sdpa_attention_forward)
        model.set_attn_implementation(MASKLESS)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let `model` compute activations again in the backward pass, in place of keeping them."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # its name from 5.23 on
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights; `TwellError` if there is none or it is broken."""
    checkpoint.require_tokenizer()
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TwellError(
            f"{checkpoint.name}: its tokenizer could not be loaded: {reason}"
        ) from error


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """No advice from torch's compiler to those who write the code that it compiles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor\.")
        yield


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers inside."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
