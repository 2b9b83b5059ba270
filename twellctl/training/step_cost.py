"""What a step of fine-tuning costs by its products: for a CPU on which trying it takes too long."""

from dataclasses import dataclass

import torch

from twellctl.fitting.plan import measured
from twellctl.models.checkpoint import Checkpoint
from twellctl.training.memory import Held, held, least_bytes
from twellctl.training.recipe import Recipe
from twellctl.training.teacher import choose_teacher

# over the time of products: steps of 2048 to 16384 tokens of 29M, and of 256 of 0.5B, two cores
OVERHEAD = 1.5
ITERATIONS = 5  # of Newton and Schulz, for a matrix that Muon steps


@dataclass(frozen=True)
class Measured:
    """What steps took, or are thought to take (`is_guess`); bytes as in `DryRun`."""

    num_trained: int
    checkpoint_bytes: int
    tokens_per_second: float
    peak_bytes: int
    is_sharded: bool
    is_guess: bool = False


def guessed(checkpoint: Checkpoint, recipe: Recipe, rate: float) -> Measured:
    """What is known without a step, at a `rate` of operations a second."""
    trained = [weight for weight in held(checkpoint, recipe) if weight.is_trained]
    size = getattr(torch, recipe.param_dtype).itemsize
    kept = sum(weight.number * (weight.copies - 1) for weight in trained)  # without the gradient
    return Measured(
        num_trained=sum(weight.number for weight in trained),
        checkpoint_bytes=size * kept if recipe.save_steps else 0,
        tokens_per_second=recipe.step_tokens / step_seconds(checkpoint, recipe, rate),
        peak_bytes=least_bytes(checkpoint, recipe),
        is_sharded=False,
        is_guess=True,
    )


def product_rate() -> float:
    """Operations a second of a product on this CPU."""
    return measured(torch.device("cpu"), rounds=False).single


def step_seconds(checkpoint: Checkpoint, recipe: Recipe, rate: float) -> float:
    """What an optimizer step is thought to take on a CPU, at a `rate` of operations a second."""
    return OVERHEAD * step_operations(checkpoint, recipe) / rate


def step_operations(checkpoint: Checkpoint, recipe: Recipe) -> float:
    """Floating-point operations of an optimizer step, forward, backward, teacher and Muon."""
    weights = held(checkpoint, recipe)
    a_token = 6.0 * _head(weights) + sum(
        _student(weight, recipe) for weight in weights if weight.in_layer
    )
    if teacher := choose_teacher(checkpoint, recipe):
        theirs = held(teacher.checkpoint, recipe)
        in_layers = sum(weight.number for weight in theirs if weight.in_layer)
        a_token += 2.0 * (in_layers + _head(theirs))
    stepped = sum(_orthogonalised(weight) for weight in weights if weight.by_muon)
    return recipe.step_tokens * a_token + stepped


def _head(weights: list[Held]) -> int:
    """Weights of the LM head, which is the largest outside of layers, or as large."""
    return max(weight.number for weight in weights if not weight.in_layer)


def _student(weight: Held, recipe: Recipe) -> float:
    """Of a weight of a layer, for a token: forward, backward, and forward again for less memory."""
    return (2 + 2 + 2 * weight.is_trained + 2 * recipe.gradient_checkpointing) * weight.number


def _orthogonalised(weight: Held) -> float:
    """Of a matrix X: X X', its square, and their product with X, `ITERATIONS` times."""
    short, long = min(weight.shape), max(weight.shape)
    return ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)
