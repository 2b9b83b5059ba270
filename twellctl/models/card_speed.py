"""What a model card says of speed: steps as bench decode timed them."""

from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, reason
from twellctl.files.strict_json import read_json
from twellctl.models.card_front import cell, is_plain, table
from twellctl.models.schemes import title_of

BENCH_VERSION = 2  # bench.results.SCHEMA_VERSION
UNTIMED = "Not measured. On your GPU: `twellctl bench decode`."
FASTER = 1.02  # times as fast: less is no gain


def read_bench(path: Path, fingerprint: str, quantize: str | None) -> dict[str, Any]:
    """A 'bench decode --json' file of the weights with that `fingerprint`, rounded by `quantize`.

    `TwellError` if it is none.
    """
    rounded = f" --quantize {quantize}" if quantize else ""
    again = f"write it with 'twellctl bench decode MODEL --data FILE{rounded} --json FILE', of the "
    again += "model that is exported"
    found = read_json(path, again)
    if found.get("command") != "bench decode" or found.get("schema_version") != BENCH_VERSION:
        raise TwellError(
            f"{path} is not a 'bench decode' file that this twellctl can read: {again}"
        )
    try:
        is_of_it = found["models"][0]["model"].get("fingerprint") == fingerprint
        is_rounded_so = found["settings"]["quantize"] == quantize
        speed(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TwellError(
            f"{path} is not a complete 'bench decode' file ({reason(error)}): {again}"
        ) from error
    if not is_of_it:
        raise TwellError(f"{path} is for another model: {again}")
    if not is_rounded_so:
        raise TwellError(f"{path} is for weights in another precision: {again}")
    return found


def speed(bench: dict[str, Any]) -> str:
    """The text of the section: a table of steps.

    In words where nothing is gained over dense weights of the same dtype.
    """
    measured = bench["models"][0]
    software = ", ".join(f"{name} {version}" for name, version in bench["versions"].items())
    place = cell(f"{bench['device']} ({software})")
    quantize = bench["settings"]["quantize"]
    points = measured["points"]
    rows = [_row(point) for point in points]
    gains = [gain for point in points for gain in _gains(point, quantize is not None)]
    columns = ["rows", "dense bf16, steps a second", "TwELL, steps a second"]
    columns += ["times dense bf16", "times dense FP8", "neurons that fire"]
    parts = [
        f"Steps of twellctl's decode engine, weights in {title_of(quantize)}, and of its dense "
        f"forms, by\n`twellctl bench decode` on one {place}:"
    ]
    if (steps := table(columns, rows)) is not None:
        parts.append(steps)
    if not gains:
        why = str(measured["without_twell"])
        parts.append(f"TwELL was not run there{f': {why}' if is_plain(why) else ''}.")
    elif max(gains) < FASTER:
        parts.append("Being sparse makes no step of it faster there.")
    return "\n\n".join(parts)


def _row(point: dict[str, Any]) -> list[str]:
    """The cells of a number of rows that was timed."""
    cells = [str(point["batch"]), f"{point['forms']['dense']['steps_per_second']:.4g}"]
    found = ["-"] * 4
    for form in _over_twell(point):
        by = f" ({form['way']})" if form["way"] else ""  # which of the engine's ways
        times = _times(form["over_dense"]), _times(form["over_fp8"])
        found = [f"{form['steps_per_second']:.4g}{by}", *times, f"{form['density']:.2%}"]
    return [*cells, *found]


def _gains(point: dict[str, Any], is_quantised: bool) -> list[float]:
    """How many times as fast as dense weights of the same precision it was over TwELL."""
    by = [(form["over_dense"], form["over_fp8"]) for form in _over_twell(point)]
    return [fp8 if is_quantised and fp8 is not None else dense for dense, fp8 in by]


def _over_twell(point: dict[str, Any]) -> list[dict[str, Any]]:
    return [form for form in point["forms"].values() if form["kind"] == "twell"]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
