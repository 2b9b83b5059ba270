"""The settings of a fine-tuning run: one table of flags, recipe keys, help, defaults and checks.

A recipe is a flat YAML file whose keys are the flags of `twellctl finetune`. A flag wins over the
recipe, the recipe over the default. All that is wrong is said at once.
"""

import dataclasses
import difflib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, bounded, shown
from twellctl.files.home import from_home
from twellctl.here.resources import resource_dir
from twellctl.settings import coerce, flag_name, setting

NO_RUN = "holds no run to resume: leave --resume out"
RECIPE_FILE = "recipe.yaml"  # in a run folder and in what it becomes
UNNAMED_TEACHER = "a local model"  # in the place of its path


@dataclass(frozen=True)
class Recipe:
    """The settings of `twellctl finetune`, besides MODEL and OUT."""

    data: list[str] = setting(
        [],
        "Text: a jsonl, JSON, txt, parquet or Arrow file, compressed or not, or a folder of them. "
        "Repeatable: each contributes equally many tokens until it runs out.",
        group="Text",
    )
    text_column: str = setting(
        "text",
        "The column that holds the text. Rows without it are read as chats (messages, "
        "conversations) or pairs (prompt and completion, instruction and output).",
    )
    seq_len: int | None = setting(
        None,
        "Tokens per block; texts are packed into blocks. [default: 1024, or the context if "
        "shorter]",
        at_least=8,
    )
    eval_data: list[str] = setting(
        [], "Held-out text, as --data, instead of --eval-fraction. Repeatable."
    )
    eval_fraction: float = setting(
        0.01, "Share of the texts held out of training.", at_least=0, below=1
    )
    eval_steps: int = setting(200, "Steps between evaluations; 0: only at the end.", at_least=0)
    eval_blocks: int = setting(64, "Blocks of held-out text per evaluation.", at_least=1)

    l1: float = setting(
        2e-5,
        "Coefficient of the penalty: the price in nats of a neuron that fires, as a mean over "
        "layers and tokens. With --penalty l1, the price of the sum over neurons of "
        "|relu(gate) * up|. With --l1-schedule target, only the controller's starting value.",
        at_least=0,
        group="Sparsity and teacher",
    )
    l1_schedule: str = setting(
        "target",
        "target: adjust the coefficient until --density is met. constant: keep --l1.",
        choices=("target", "constant"),
    )
    penalty: str | None = setting(
        None,
        "count: a price on every neuron that fires. l1: the paper's penalty on |relu(gate) * up|. "
        "[default: count; l1 if --l1-schedule is constant]",
        choices=("count", "l1"),
    )
    density: float = setting(
        0.15, "Target share of neurons that fire per token (target schedule).", above=0, below=1
    )
    teacher: str = setting(
        "auto",
        "Model to distil from, or none. auto: a freshly converted model learns from itself with "
        "its source activation, a fine-tuned one from its source on the hub.",
    )
    teacher_weight: float = setting(
        1.0, "Share of the loss that is KL from the teacher's logits.", at_least=0, at_most=1
    )
    state_weight: float = setting(
        0.6,
        "Weight of the relative squared distance between each layer's output and that of the "
        "teacher's layer, if the two have the same shape.",
        at_least=0,
    )

    epochs: float = setting(
        1.0,
        "Passes over the data, unless steps or tokens are given.",
        above=0,
        group="Length, batch and rate",
    )
    max_steps: int | None = setting(None, "Optimizer steps, instead of --epochs.", at_least=1)
    max_tokens: int | None = setting(None, "Training tokens, instead of --epochs.", at_least=1)
    batch_size: int = setting(24, "Blocks per optimizer step, over all processes.", at_least=1)
    micro_batch_size: int = setting(
        4,
        "Most blocks that one process holds at once; gradient accumulation does the rest.",
        at_least=1,
    )
    optimizer: str = setting(
        "muon",
        "muon: Muon for the matrices of the layers, AdamW at half the rate for the rest. adamw: "
        "AdamW for all, which is faster on a CPU if steps have few tokens.",
        choices=("muon", "adamw"),
    )
    learning_rate: float | None = setting(
        None,
        "Peak learning rate. [default: 0.0015 times the rms of the middle layer's FFN weights, so "
        "that a step of Muon moves a matrix by 0.03 % of its size; ten times that for a model "
        "whose activation was only swapped]",
        above=0,
    )
    lr_scheduler: str = setting(
        "linear", "Learning rate after the warm-up.", choices=("cosine", "linear", "constant")
    )
    warmup_steps: float = setting(0.02, "Warm-up steps; below 1, a share of the run.", at_least=0)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    adam_beta2: float = setting(0.95, "AdamW's beta2.", above=0, below=1)
    max_grad_norm: float = setting(1.0, "Gradient norm above which gradients are clipped.", above=0)
    seed: int = setting(
        0, "Seed for the order of blocks and all other draws.", at_least=0, at_most=2**32 - 1
    )

    param_dtype: str = setting(
        "float32",
        "float32 weights (under bf16 autocast on a GPU), or bfloat16 for less memory.",
        choices=("float32", "bfloat16"),
        group="Memory and speed",
    )
    lora_rank: int = setting(
        0,
        "Rank of LoRA on attention; FFNs are trained in full. 0: no LoRA.",
        at_least=0,
        at_most=16384,
    )
    lora_ffn: bool = setting(False, "With --lora-rank: LoRA on the FFN as well.")
    gradient_checkpointing: bool = setting(False, "Recompute activations to save memory.")
    shard: str = setting(
        "auto",
        "With several processes, each holds some rows of all weights of student, teacher and "
        "optimizer. auto: only if a whole copy would take more than half of a GPU's memory.",
        choices=("auto", "always", "never"),
    )
    compile: bool | None = setting(
        None,
        "Compile the layers (with --gradient-checkpointing, the FFNs). With --penalty count, and "
        "layers neither sharded nor checkpointed, parts of steps are also replayed as CUDA graphs, "
        "which takes half a minute at the start and is up to three times as fast. [default: on a "
        "GPU, without LoRA]",
    )

    save_steps: int = setting(
        500, "Steps between checkpoints; 0: none.", at_least=0, group="Checkpoints and logs"
    )
    logging_steps: int = setting(10, "Steps between log lines.", at_least=1)
    report_to: str = setting(
        "none", "Where to send metrics: tensorboard, wandb..., if installed; all, or none."
    )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; `seq_len` must be known, as `for_model` leaves it."""
        if self.seq_len is None:
            raise ValueError("the recipe does not say how long blocks are")
        return self.seq_len

    @property
    def step_tokens(self) -> int:
        """Tokens that an optimizer step reads."""
        return self.batch_size * self.block_tokens


def run_folder(out: Path) -> Path:
    """Where the run that will become `out` keeps its checkpoints."""
    out = out if out.name.strip(".") else out.resolve()  # ".", ".." and "/" are no names
    return out.parent / f"{out.name}.run"


def resolve_recipe(
    recipe: Recipe | str | Path | None = None, flags: dict[str, Any] | None = None
) -> Recipe:
    """Flags (field name: value) over a recipe (a file, or a shipped one's name) over defaults.

    All that is wrong is listed: in a `TwellError` what the file says, in a `UsageError` the flags.
    """
    by_key = {flag_name(field.name): field for field in dataclasses.fields(Recipe)}
    given = _density({flag_name(name): value for name, value in (flags or {}).items()})
    values, wrong = _coerced({} if recipe is None else _density(_read(recipe)), by_key)
    flag_values, wrong_flags = _coerced(given, by_key)
    for one, other in (("max_steps", "max_tokens"), ("max_tokens", "max_steps")):
        if flag_values.get(one) is not None:
            values.pop(other, None)
    values |= flag_values
    if wrong:
        flags_too = f"; and of the flags: {'; '.join(wrong_flags)}" if wrong_flags else ""
        raise TwellError(f"recipe {recipe}: {'; '.join(wrong)}{flags_too}")
    if wrong_flags := wrong_flags or _contradictions(values):
        if not given:
            raise TwellError(f"recipe {recipe}: {'; '.join(wrong_flags)}")
        raise UsageError("; ".join(wrong_flags))
    return Recipe(**values)


def file_of(recipe: Recipe | str | Path | None) -> Path | None:
    """The file that `resolve_recipe` reads, if it is one of the user's."""
    if not isinstance(recipe, str | Path) or str(recipe) in recipe_names():
        return None
    return from_home(recipe)


def recipe_to_resume(out: Path, resume: bool) -> Path | None:
    """What the run that will become `out` began with, if it is to be resumed."""
    saved = (run := run_folder(out)) / RECIPE_FILE
    if resume and not saved.is_file():
        raise TwellError(f"{run} {NO_RUN}")
    return saved if resume else None


def public_recipe(recipe: Recipe) -> Recipe:
    """`recipe` without the paths of this machine, as it goes out with a model.

    A teacher in a folder becomes `UNNAMED_TEACHER`, which no run takes for one.
    """
    is_local = recipe.teacher not in ("auto", "none") and from_home(recipe.teacher).exists()
    teacher = UNNAMED_TEACHER if is_local else recipe.teacher
    return dataclasses.replace(recipe, data=[], eval_data=[], teacher=teacher)


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write all settings that `recipe` has, defaults included."""
    import yaml

    path.write_text(yaml.safe_dump(settings(recipe), sort_keys=False), encoding="utf-8")


def settings(recipe: Recipe) -> dict[str, Any]:
    """All settings that `recipe` has, defaults included, by the names of their flags."""
    given = dataclasses.asdict(recipe).items()
    return {flag_name(name): value for name, value in given if value not in (None, [])}


def recipe_names() -> list[str]:
    """The recipes that ship with twellctl."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))


def _read(recipe: Recipe | str | Path) -> dict[str, Any]:
    if isinstance(recipe, Recipe):
        return {flag_name(name): value for name, value in dataclasses.asdict(recipe).items()}
    if not isinstance(recipe, str | Path):
        raise UsageError(
            f"recipe must be a file, a shipped recipe's name or a Recipe, got {shown(recipe)}: "
            "single settings are keywords"
        )
    from twellctl.training.recipe_file import read_settings

    path = from_home(recipe)
    if str(recipe) in recipe_names():
        path = resource_dir("recipes") / f"{recipe}.yaml"
    if not os.path.exists(path):
        known = ", ".join(recipe_names())
        raise UsageError(f"no recipe {recipe}: give a YAML file, or one of {known}")
    return read_settings(path, f"recipe {recipe}")


def _density(given: dict) -> dict:
    """`target-sparsity`, as recipes said before, as `density`."""
    if (sparsity := given.pop("target-sparsity", None)) is not None:
        is_number = isinstance(sparsity, int | float)
        given["density"] = round(1 - sparsity, 12) if is_number else sparsity
    return given


def _coerced(given: dict, by_key: dict[str, dataclasses.Field]) -> tuple[dict[str, Any], list[str]]:
    values, wrong = {}, []
    for key, value in given.items():
        field = by_key.get(key)
        if field is None:
            near = difflib.get_close_matches(str(key), by_key, n=1)
            wrong.append(
                f"unknown key {bounded(str(key), 80)}"
                + (f", did you mean {near[0]}?" if near else "")
            )
            continue
        try:
            values[field.name] = coerce(value, field)
        except ValueError as error:
            wrong.append(f"{key} {error}, got {shown(value)}")
    return values, wrong


def _contradictions(values: dict[str, Any]) -> list[str]:
    wrong = []
    recipe = Recipe(**values)
    if recipe.max_steps is not None and recipe.max_tokens is not None:
        wrong.append("max-steps and max-tokens exclude each other: give one")
    if recipe.l1_schedule == "target" and not recipe.l1:
        wrong.append("l1 must be > 0 to be raised, got 0: give more, or l1-schedule constant")
    if recipe.lora_ffn and not recipe.lora_rank:
        wrong.append("lora-ffn needs a lora-rank above 0")
    return wrong


# The Trainer's names. Module and package have the same name, except for those in _OTHERS.
TRACKERS = (
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
_OTHERS = {"azure_ml": ("azureml", "azureml-mlflow"), "flyte": ("flytekit", "flytekit")}


def check_report_to(name: str) -> None:
    """`UsageError` for a tracker that nobody knows, or that is not installed."""
    if name in ("none", "all"):
        return
    if name not in TRACKERS:
        raise UsageError(
            f"report-to {name!r} is unknown: take one of {', '.join(TRACKERS)}, all or none"
        )
    module, package = _OTHERS.get(name, (name, name.replace("_", "-")))
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"report-to {name}: {package} is not installed: pip install {package}")
