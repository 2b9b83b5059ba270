"""Checkpoints become torch models here, always through the stock transformers class."""

import collections
import contextlib
import copy
import functools
import hashlib
import importlib.util
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging as hf_logging

from twellctl.bundle.twell_int4 import expand, unpack
from twellctl.bundle.twell_model import read_as_relu
from twellctl.errors import TwellError, bounded, reason
from twellctl.files.home import from_home
from twellctl.files.strict_json import read_file
from twellctl.models.carried import CHAT_TEMPLATES
from twellctl.models.checkpoint import Checkpoint
from twellctl.models.checks import ACTIVATION_KEYS, HEAD, TIE
from twellctl.models.quantised import config_with_own_layers
from twellctl.models.schemes import scheme_of
from twellctl.models.shards import TensorInfo
from twellctl.models.silu_form import factors, scaled, undo

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_TEMPLATE_BYTES = 1 << 20
MASKLESS = "twell_causal"  # how SDPA without a mask is registered with transformers


def default_device() -> torch.device:
    """The current CUDA device, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, those that PyTorch keeps for later among them, and all there are."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


def shared_copy(model: ModuleT) -> ModuleT:
    """A copy of the modules that shares all parameters and buffers, and second layouts of them."""
    turned = (getattr(module, "turned", None) for module in model.modules())
    there = (tensor for tensor in turned if tensor is not None)
    tensors = itertools.chain(model.parameters(), model.buffers(), there)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def describe_place(model: PreTrainedModel) -> str:
    """In words: the device of a model and the dtypes of its weights."""
    name = str(model.device)
    if model.device.type == "cuda":
        name = f"{name}, {torch.cuda.get_device_name(model.device)}"
    dtype = str(model.dtype).removeprefix("torch.")
    scheme = scheme_of(model.config.to_dict())
    return f"{name}, {dtype}" + (f", linear layers in {scheme.title}" if scheme else "")


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    activation: str | None = None,
    packed: bool = False,
) -> PreTrainedModel:
    """The model in eval mode, of the stock class.

    `dtype` None keeps the stored one. `activation` runs the weights with another `hidden_act` (a
    freshly converted model with the SiLU it had). `packed`: layers in 4 bits are not expanded, and
    none can run before they are, or codes are laid for kernels (decoding/coded_linear.py).
    `TwellError` for what transformers cannot load, and for a weight that is NaN or infinite.
    """
    device = device or default_device()
    extra: dict[str, Any] = {"dtype": dtype or "auto"}
    if activation is not None:
        extra[checkpoint.activation_key] = activation
    model = _loaded(checkpoint, packed, **extra).to(device).eval()
    if checkpoint.silu_form:
        undo(model, checkpoint.silu_form)
        if activation is None:
            read_as_relu(model, checkpoint.silu_form)
    refuse_not_finite(checkpoint, [*model.named_parameters(), *model.named_buffers()])
    return model


def skeleton(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model on the meta device, without reading a weight.

    `TwellError` for what `load_model` refuses: a config.json that transformers cannot use, and
    weights whose names or shapes are not those of the model.
    """
    return _loaded(checkpoint, dtype="auto", device_map="meta")


@contextlib.contextmanager
def opened(checkpoint: Checkpoint, packed: bool = False) -> Iterator[Callable[..., Tensor]]:
    """A function that reads a tensor of the plain ReLU model, or some of its rows, on the CPU.

    `packed`: by the names of what is stored, where weights are packed their parts.
    """
    tensors = checkpoint.stored if packed else checkpoint.tensors
    form = form_factors(checkpoint, tensors)
    with contextlib.ExitStack() as files:
        shards = {
            shard: files.enter_context(safe_open(checkpoint.path / shard, framework="pt"))
            for shard in checkpoint.shards
        }

        def stored(tensor: TensorInfo, rows: slice) -> Tensor:
            shard, name = shards[tensor.shard], tensor.name
            # of one number there are no slices
            return shard.get_tensor(name) if rows == slice(None) else shard.get_slice(name)[rows]

        def read(name: str, rows: slice = slice(None)) -> Tensor:
            info = tensors[name]
            if info.parts:
                packed, scales = (stored(part, rows) for part in info.parts[:2])
                tensor = expand(unpack(packed), scales)
            else:
                tensor = stored(info, rows)
            if (factor := form.get(name)) is None:
                return tensor
            return scaled(tensor, 1 / (factor[rows] if len(factor) > 1 else factor))

        yield read


def read_tensors(
    checkpoint: Checkpoint, names: Iterable[str] | None = None, packed: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the plain ReLU model, all or those of `names`, read one at a time.

    `packed` as in `opened`.
    """
    everything = checkpoint.stored if packed else checkpoint.tensors
    with opened(checkpoint, packed) as read:
        for name in everything if names is None else names:
            yield name, read(name)


def form_factors(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The `factors` of a folder in SiLU form, by which its tensors are divided; else none."""
    if not checkpoint.silu_form:
        return {}
    names = checkpoint.tensors if names is None else names
    return factors(names, checkpoint.silu_form, checkpoint.ffn.intermediate_size)


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over name, dtype, shape and bytes of all tensors in the order of their names.

    Sharding, config and SiLU form do not change it. It reads every weight once.
    """
    digest = hashlib.sha256()
    for name, values in read_tensors(checkpoint, sorted(checkpoint.tensors)):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextlib.contextmanager
def as_refusal(what: str, remedy: str) -> Iterator[None]:
    """Whatever transformers raises inside, about files that others wrote, as `TwellError`.

    It raises nearly everything there is (ZeroDivisionError, AssertionError, its own kinds).
    """
    try:
        with quiet_transformers():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {bounded(reason(error), 300)}"
        raise TwellError(f"{what} ({said}): {remedy}") from error


def _no_model_of(checkpoint: Checkpoint) -> contextlib.AbstractContextManager[None]:
    what = f"{checkpoint.name}: transformers makes no model of its config.json and weights"
    return as_refusal(what, "fetch both again, from one place")


def _config(checkpoint: Checkpoint, **changes: Any) -> PretrainedConfig:
    changes = checkpoint.corrections | changes
    return AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, **changes)


def _loaded(checkpoint: Checkpoint, packed: bool = False, **how: Any) -> PreTrainedModel:
    """The stock model with its weights; `TwellError` if one is missing or of another shape."""
    with _no_model_of(checkpoint):
        if checkpoint.scheme or checkpoint.corrections:
            config = _config(checkpoint, **{k: how.pop(k) for k in ACTIVATION_KEYS if k in how})
            how["config"] = config_with_own_layers(checkpoint, config, packed=packed)
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **how,
        )
        DynamicCache(config=model.config)  # reads what the model itself may not
    model.config.return_dict = True  # which config.json may deny
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise TwellError(
            f"{checkpoint.name}: {name} is {list(stored)}, by config.json it is {list(wanted)}: "
            "fetch config.json and weights again, from one place"
        )
    if missing := sorted(found["missing_keys"]):
        tie = f"{TIE}, else " if missing == [HEAD] else ""
        raise TwellError(
            f"{checkpoint.name} lacks {len(missing)} of its weights, {missing[0]} first: "
            f"{tie}fetch its safetensors files again"
        )
    return model


def refuse_not_finite(checkpoint: Checkpoint, named: Iterable[tuple[str, Tensor]]) -> None:
    """`TwellError` that names tensor and file. One read of each tensor, one wait for the device."""
    floats = {name: t.detach() for name, t in named if t.is_floating_point() and t.numel()}
    if not floats:
        return
    # the least and the largest, through which NaN goes: 5 GB/s on one core, isfinite() 0.2
    ends = torch.stack([_ends(t) for t in floats.values()])
    for name, sound in zip(floats, ends.isfinite().all(1).tolist(), strict=True):
        if not sound:
            stored = checkpoint.tensors.get(name) or checkpoint.stored.get(name)
            file = checkpoint.path / (stored.shard if stored else "config.json")
            raise TwellError(
                f"{name} holds NaN or infinity ({file}): fetch it again, or go back to a "
                "checkpoint from before the weights broke"
            )


def _ends(tensor: Tensor) -> Tensor:
    """float32 [least, largest]."""
    if tensor.itemsize == 1:  # numbers of 8 bits cannot be compared
        tensor = tensor.bfloat16()
    return torch.stack(tensor.aminmax()).float()


def without_weights(name: str, given: dict) -> tuple[dict, PreTrainedModel]:
    """The config `given` as transformers completes it, and its model on no device; `TwellError`."""
    what = f"{name}: transformers makes no model of it"
    with as_refusal(what, "correct what is wrong in it"), torch.device("meta"):
        config = AutoConfig.for_model(**given)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return json.loads(config.to_json_string()), model


def without_values(
    checkpoint: Checkpoint, dtype: torch.dtype, activation: str | None = None
) -> PreTrainedModel:
    """The model in eval mode, with its buffers, and its weights on the meta device.

    `TwellError` as in `load_model`, but the values of weights are not read.
    """
    config = skeleton(checkpoint).config
    if activation is not None:
        setattr(config, checkpoint.activation_key, activation)
    with _no_model_of(checkpoint), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


def without_mask(model: PreTrainedModel, seq_len: int) -> None:
    """Let `model` attend by SDPA's `is_causal` to whole blocks of up to `seq_len` tokens.

    Otherwise transformers reads the positions back from the GPU in each forward pass, to see
    whether a mask is needed, and the host waits. A model whose window is shorter is not changed.
    """
    sizes = [getattr(model.config, n, None) for n in ("sliding_window", "attention_chunk_size")]
    window = min((size for size in sizes if size), default=seq_len)
    if model.config._attn_implementation == "sdpa" and seq_len <= window:
        # transformers makes a mask only for the names of attention that it knows
        AttentionInterface.register(MASKLESS, sdpa_attention_forward)
        model.set_attn_implementation(MASKLESS)


def in_autocast_dtype(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """A hook: autocast skips embeddings, so float32 ones would make all hidden states float32."""
    device = output.device.type
    if not torch.is_autocast_enabled(device):
        return output
    return output.to(torch.get_autocast_dtype(device))


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let `model` compute activations again in the backward pass, in place of keeping them."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # its name from 5.23 on
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


def load_tokenizer(
    checkpoint: Checkpoint,
    chat_template: str | Path | None = None,
    given: dict[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder; `TwellError` if there is none or it is broken.

    `chat_template`, a file, replaces its own; `given` is what the template always knows.
    """
    checkpoint.require_tokenizer()
    for file in (checkpoint.path / name for name in CHAT_TEMPLATES):
        if file.exists():
            read_file(file, MAX_TEMPLATE_BYTES)  # a template is compiled as it is used
    _require_reader(checkpoint)
    config = None  # of a random model any file may be the config
    if checkpoint.shards:
        with _no_model_of(checkpoint):
            config = _config(checkpoint)
    what = f"{checkpoint.name}: its tokenizer could not be loaded"
    with as_refusal(what, "fetch its tokenizer files again"):
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.path, config=config, trust_remote_code=False
        )
        tokenizer("")  # looks at settings that loading does not
    if chat_template is not None:
        content = read_file(from_home(chat_template), MAX_TEMPLATE_BYTES)
        tokenizer.chat_template = content.decode(errors="replace")
    if given:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **given)
    return tokenizer


def _require_reader(checkpoint: Checkpoint) -> None:
    """`TwellError` if the package that reads its tokenizer file is not installed."""
    names = {path.name for path in checkpoint.path.iterdir()}
    if names & {"tokenizer.json", "vocab.json"}:
        return
    for kinds, module, package in (
        ({"tokenizer.model", "spiece.model"}, "sentencepiece", "sentencepiece protobuf"),
        ({"tekken.json"}, "mistral_common", "mistral-common"),
    ):
        found = sorted(names & kinds)
        if found and importlib.util.find_spec(module) is None:
            raise TwellError(
                f"{checkpoint.name}: its tokenizer, {found[0]}, is read by {package.split()[0]}: "
                f"pip install {package}"
            )


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


def as_stored(state: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """`state` in the source's dtypes, without other names of its tensors (a tied head)."""
    dtype_of, stored = stored_dtypes(checkpoint), checkpoint.tensors
    there = {state[name].data_ptr() for name in stored if name in state}
    return {
        name: tensor.to(dtype=dtype_of(name))
        for name, tensor in state.items()
        if name in stored or tensor.data_ptr() not in there
    }


def stored_dtypes(checkpoint: Checkpoint) -> Callable[[str], torch.dtype]:
    """The dtype of a tensor in the source, by name; of one that is not there, the usual one."""
    stored = {name: DTYPES.get(tensor.dtype) for name, tensor in checkpoint.tensors.items()}
    usual = collections.Counter(stored.values()).most_common(1)[0][0]
    return lambda name: stored.get(name, usual)
