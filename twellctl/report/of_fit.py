"""The page of a fit: what fires, errors and the map, by layer; how near the model is at its end."""

from typing import TYPE_CHECKING

from twellctl.report.axes import percent
from twellctl.report.markup import table, tag
from twellctl.report.page import Section, Tile, page

if TYPE_CHECKING:
    from twellctl.fitting.run import Fitted

FIT_PAGE = "fit.html"  # in the folder that convert writes
COLUMNS = ("layer", "fires", "error, swapped", "error", "by the map", "states differ")
ABOUT = (
    "Errors are shares of the squared output that a layer shall give, on held-out text: of ReLU in "
    "the place of its activation alone, and of the fitted layer. By the map: its share of the "
    "squared output. States differ: how far the hidden states behind a layer are from the source's."
)


def layer_rows(fitted: "Fitted") -> list[list[str]]:
    """A row of `COLUMNS` for each layer."""
    return [
        [
            str(index),
            f"{layer.fires:.1%}",
            f"{layer.error_swapped:.2%}",
            f"{layer.error:.2%}",
            f"{layer.map_share:.1%}",
            f"{layer.states_differ:.3f}",
        ]
        for index, layer in enumerate(fitted.layers)
    ]


def fit_page(name: str, fitted: "Fitted", num_neurons: int) -> str:
    """The whole HTML file; `num_neurons` of a layer are the model's own."""
    held = fitted.held_out
    read = fitted.share_read(num_neurons)
    tiles = [
        Tile("neurons that fire", percent(fitted.density), f"of {num_neurons} a layer, on average"),
        Tile("weights read", f"{read:.0%}", "of those that the FFNs had, by a step of one token"),
        Tile("KL to the source", f"{held.kl:.4f}", "nats a token, held-out text"),
        Tile("same token", percent(held.same_token), "held-out text"),
    ]
    about = f"{fitted.tokens} tokens, {fitted.seconds:.0f} s, a map of rank {fitted.map_neurons}"
    by_layer = [tag("p", ABOUT), tag("div", table(COLUMNS, layer_rows(fitted)), class_="facts")]
    return page(f"How {name} was fitted", about, tiles, [], [Section("By layer", by_layer)])
