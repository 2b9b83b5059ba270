"""The body of a model as benches run it, and what fires in its layers."""

from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from twellctl.firing.counts import Union
from twellctl.firing.profiled import LayerProfile


def last_hidden(body: nn.Module, ids: Tensor) -> Tensor:
    """`[B, S]` to `[B, S, K]`."""
    return body(input_ids=ids, use_cache=False).last_hidden_state


def about_layers(
    measured: list[LayerProfile], slots: tuple[int, ...], unions: list[Union]
) -> dict[str, Any]:
    """Of the JSON: what fires in the layers, and the union that is smallest for its density."""
    keys = ("density", "nnz_mean", "nnz_p99", "nnz_max", "dead")
    rows = [
        {key: getattr(layer, key) for key in keys} | {"slots": most, "union": asdict(union)}
        for layer, most, union in zip(measured, slots, unions, strict=True)
    ]
    smallest = min(unions, key=lambda union: union.by_chance)
    return {
        "density": sum(layer.density for layer in measured) / len(measured),
        "density_first_layer": measured[0].density,
        "density_last_layer": measured[-1].density,
        "union": asdict(smallest),
        "layers": rows,
    }
