"""The options of each `twellctl bench` command, their defaults and checks. No torch."""

from dataclasses import dataclass
from typing import ClassVar

from twellctl.decoding.engine import GATES, SCREENED
from twellctl.errors import UsageError
from twellctl.models.schemes import SCHEMES
from twellctl.settings import flag_name, refuse_wrong, setting

MOST_ROWS = 64  # of a step: what the kernels for few tokens take
MOST_STABLE_ROWS = 32  # of a step that is stable (decoding/stable.py)
LLAMA_LAYERS = 28  # of the random model without a config: 1.5B
CONTEXT = 2048  # of that of `bench decode`, at least
_SEED = "Random seed."
_DEVICE = "cuda, cuda:1 and so on; cpu only for trying the command. [default: cuda]"
_GATES = (
    "screened: for one sequence in bf16, if one kernel can run the step, read a 4-bit copy of "
    "W_gate and only the rows that it selects. whole: read all of W_gate."
)


@dataclass(frozen=True)
class AnyModel:
    """What both commands have: `model` on the text of `data`, or without them a random one.

    The random one has the shape of `config` (None: a Llama), with `layers` layers if given.
    """

    _LENGTHS: ClassVar[tuple[str, ...]] = ()  # settings that make up the length of a text

    model: str | None = setting(
        None, "A ReLU model folder, such as an export. Requires --data.", flag="MODEL"
    )
    data: tuple[str, ...] = setting(
        (),
        "Text for MODEL: jsonl, JSON, txt, parquet or Arrow files, or folders of them. Repeatable.",
    )
    text_column: str = setting("text", "The column that holds the text.")
    config: str | None = setting(
        None,
        "A config.json, or a folder with one: use random weights of its shape, with ReLU. Llama, "
        f"Mistral, Phi3, Qwen2 or Qwen3. [default: a Llama of 2048 x 5632, {LLAMA_LAYERS} layers]",
        metavar="FILE",
    )
    layers: int | None = setting(
        None, "Layers of the random model, if all do not fit. [default: all]", at_least=1
    )
    seed: int = setting(0, _SEED)
    device: str | None = setting(None, _DEVICE)

    @property
    def length(self) -> int:
        """Tokens of a text that is read."""
        return sum(getattr(self, name) for name in self._LENGTHS)

    @property
    def context_drawn(self) -> int:
        """Of a random model, at most."""
        return self.length

    @property
    def windows(self) -> dict[tuple[int, int], str]:
        """(count, length) of the windows that are read, and which flag asks for fewer."""
        raise NotImplementedError

    def check_context(self, context: int) -> None:
        """`UsageError` unless a text is no longer than the model's `context`."""
        if self.length > context:
            names = " and ".join(map(flag_name, self._LENGTHS))
            given = " and ".join(str(getattr(self, name)) for name in self._LENGTHS)
            raise UsageError(f"{names} must be at most {context}, the context, got {given}")

    def check(self) -> None:
        """`UsageError` for what makes no sense, before any work."""
        refuse_wrong(self)
        if (self.model is None) != (not self.data):
            raise UsageError("a MODEL is measured on text: give --data FILE with it, or neither")
        for name in ("config", "layers"):
            if self.model is not None and getattr(self, name) is not None:
                raise UsageError(
                    f"{name} is for a random model: leave out MODEL and --data, or --{name}"
                )


@dataclass(frozen=True)
class ModelSettings(AnyModel):
    """`bench model`: `tokens` of one prefill, in sequences of `seq_len`, or in one shorter one."""

    _LENGTHS = ("seq_len",)

    tokens: tuple[int, ...] = setting((131072, 256), "Tokens per prefill. Repeatable.", at_least=1)
    seq_len: int = setting(2048, "Most tokens per sequence.", at_least=1)
    density: float = setting(
        0.005, "Share of the random model's neurons that fire.", above=0, at_most=1
    )
    rounds: int = setting(5, "Samples per form; medians count.", at_least=1)

    def check(self) -> None:
        super().check()
        for count in self.tokens:
            if count % min(count, self.seq_len):
                raise UsageError(
                    f"tokens must be a multiple of seq-len ({self.seq_len}), or less: got {count}"
                )

    @property
    def windows(self) -> dict[tuple[int, int], str]:
        return {self.shape(tokens): "--tokens" for tokens in self.tokens}

    def shape(self, tokens: int) -> tuple[int, int]:
        """(sequences, tokens of each)."""
        return tokens // min(tokens, self.seq_len), min(tokens, self.seq_len)


@dataclass(frozen=True)
class DecodeSettings(AnyModel):
    """`bench decode`, of a random model at each of `densities`.

    `quantize` "fp8": the model is benched in FP8, as an FP8 export always is. `new_tokens` follow
    `prompt_tokens` in each of `batches` rows; the last four fifths of the steps count.
    """

    _LENGTHS = ("prompt_tokens", "new_tokens")

    batches: tuple[int, ...] = setting(
        (1, 16),
        f"Sequences decoded at once, 1 to {MOST_ROWS}. Repeatable.",
        flag="batch",
        at_least=1,
        at_most=MOST_ROWS,
    )
    prompt_tokens: int = setting(64, "Tokens per prompt.", at_least=1)
    new_tokens: int = setting(
        160, "Tokens to decode; the last four fifths of the steps count.", at_least=10
    )
    quantize: str | None = setting(
        None,
        "Round the weights as 'export --quantize' does, and run TwELL on them.",
        choices=tuple(SCHEMES),
    )
    bits: int | None = setting(
        None,
        "4: round the linear layers of the random model to 4 bits, in groups of 128, or 64 below a "
        "hidden size of 3072. [default: bf16]",
        at_least=4,
        at_most=4,
    )
    map_rank: int = setting(
        0,
        "Neurons of the random model's FFNs beside the others that share a gate: a fit's map.",
        at_least=0,
    )
    dense_fp8: bool = setting(True, "Also time dense FP8, if the GPU supports it.")
    gates: str = setting(SCREENED, _GATES, choices=GATES)
    stages: bool = setting(
        False, "Also show where a layer's time goes, for one sequence whose step is one kernel."
    )
    densities: tuple[float, ...] = setting(
        (0.02, 0.05, 0.1, 0.2),
        "Share of the random model's neurons that fire; 1: all. Repeatable.",
        flag="density",
        above=0,
        at_most=1,
    )

    def check(self) -> None:
        super().check()
        for name in ("bits", "map_rank"):
            if self.model is not None and getattr(self, name):
                flag = flag_name(name)
                raise UsageError(f"{flag} is for a random model: leave out MODEL and --data")
        if self.bits and self.quantize:
            raise UsageError("a model is rounded to 4 bits or quantised: give --bits or --quantize")
        if self.bits and self.map_rank % 128:
            raise UsageError(f"map-rank must be a multiple of 128 with --bits, got {self.map_rank}")

    @property
    def context_drawn(self) -> int:
        return max(CONTEXT, self.length)

    @property
    def timed_steps(self) -> int:
        return self.new_tokens * 4 // 5

    @property
    def windows(self) -> dict[tuple[int, int], str]:
        return {(max(self.batches), self.prompt_tokens): "--batch"}


@dataclass(frozen=True)
class ExactSettings:
    """`bench exact`: `limit` prompts are answered with at most `new_tokens` tokens each, `batches`
    of them at once."""

    limit: int = setting(20, "Evenly spaced prompts to answer.", at_least=1)
    new_tokens: int = setting(200, "Most tokens per answer.", at_least=10)
    temperature: float = setting(
        0.0, "Sampling temperature; 0: always the likeliest token.", at_least=0, at_most=2
    )
    seed: int = setting(0, _SEED, at_least=-(2**63), at_most=2**63 - 1)
    batches: tuple[int, ...] = setting(
        (1,),
        f"Prompts answered at once, 1 to {MOST_STABLE_ROWS}. Repeatable.",
        flag="batch",
        at_least=1,
        at_most=MOST_STABLE_ROWS,
    )
    gates: str = setting(SCREENED, _GATES, choices=GATES)
    device: str | None = setting(None, _DEVICE)
