"""What a fit came to, by layer, for a plot: from its JSON, which lies in the model's folder."""

from typing import Any

from twellctl.report.charts import Curves, Line, Panel


def chart_of(fit: dict[str, Any], name: str) -> Curves:
    """How each layer of the model `name` came out; of one made ReLU, what fires, too."""
    layers, held_out = fit["layers"], fit["held_out"]

    def line(of: str, figure: str) -> Line:
        return Line(of, [layer[figure] for layer in layers])

    errors, far = [line("fitted", "error")], [line("differ", "states_differ")]
    fires, by_map = list[Line](), list[Line]()
    if layers[0]["error_swapped"] is not None:
        errors.append(line("only the activation changed", "error_swapped"))
        fires = [line("fitted", "fires")]
    if fit["map_neurons"]:
        by_map = [line("map", "map_share")]
    drawn = (
        ("FFN: error, of the squared output", errors, None),
        ("Hidden states after the layer: distance to the original's", far, None),
        ("Neurons that fire", fires, fit["settings"]["density"]),
        ("What the linear map adds, of the squared output", by_map, None),
    )
    x = range(len(layers))
    return Curves(
        title=f"{name}: fitted layer by layer",
        panels=[
            Panel(title, "layer", x, lines, wanted=wanted)
            for title, lines, wanted in drawn
            if lines
        ],
        note=f"held-out text: KL to the original {held_out['kl']:.4f}, same token "
        f"{held_out['same_token']:.2%}",
    )
