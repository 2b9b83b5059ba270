"""What a model card says of speed: steps as bench decode timed them, and a profile's FFNs."""

from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, reason
from twellctl.files.strict_json import read_json
from twellctl.firing.profiled import Profile
from twellctl.models.card_table import cell, table

BENCH_VERSION = 1  # bench.results.SCHEMA_VERSION
FASTER = 1.02  # times as fast: less is no gain


def read_bench(path: Path, fingerprint: str) -> dict[str, Any]:
    """A 'bench decode --json' file; `TwellError` if it is none, or of weights with another
    `fingerprint`."""
    again = "write it again with 'twellctl bench decode MODEL --data FILE --json FILE'"
    found = read_json(path, again)
    if found.get("command") != "bench decode" or found.get("schema_version") != BENCH_VERSION:
        raise TwellError(f"{path} is no bench of decoding that this twellctl reads: {again}")
    try:
        is_of_it = found["models"][0]["model"].get("fingerprint") == fingerprint
        _decoding(found)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TwellError(
            f"{path} is no whole bench of decoding ({reason(error)}): {again}"
        ) from error
    if not is_of_it:
        raise TwellError(f"{path} is of another model: {again}")
    return found


def speed(profile: Profile | None, bench: dict[str, Any] | None) -> str | None:
    """The text of the section; None where nothing was measured of the model at all."""
    if profile is None and bench is None:
        return None
    parts = [] if bench is None else [_decoding(bench)]
    if profile is not None and profile.speed is not None:
        parts.append(_ffns(profile))
    unknown = "Not measured. On your GPU: `twellctl bench model` and `twellctl bench decode`."
    return "\n\n".join(parts) or unknown


def _ffns(profile: Profile) -> str:
    timed = profile.speed
    speedups = [layer.speedup for layer in timed.layers]
    return (
        f"Its FFNs, each over TwELL or densely, whichever is faster, are together\n"
        f"{timed.exported_speedup:.2f} times as fast as the fastest dense form of each. All over\n"
        f"TwELL they are {timed.speedup:.2f} times as fast, by layer {min(speedups):.2f} to "
        f"{max(speedups):.2f} times.\n"
        f"At {timed.tokens} tokens on one {_place(timed.device, profile.versions)}."
    )


def _decoding(bench: dict[str, Any]) -> str:
    """A table of steps; in words where nothing is gained."""
    measured, place = bench["models"][0], _place(bench["device"], bench["versions"])
    dtype = "FP8" if bench["settings"]["quantize"] == "fp8" else "bf16"
    rows, gains = [], []
    for point in measured["points"]:
        dense = point["forms"]["dense"]
        row = [point["batch"], f"{dense['steps_per_second']:.4g}", *4 * "-"]
        for form in point["forms"].values():
            if form["kind"] == "twell":
                over = [form["over_dense"], form["over_fp8"]]
                row[2:] = (
                    f"{form['steps_per_second']:.4g}",
                    *map(_times, over),
                    f"{form['density']:.2%}",
                )
                gains.append(min(ratio for ratio in over if ratio is not None))
        rows.append(row)
    columns = ["rows", "dense bf16, steps a second", "TwELL, steps a second"]
    columns += ["times dense bf16", "times dense FP8", "neurons that fire"]
    parts = [
        f"Steps of twellctl's decode engine, weights in {dtype}, and of its dense forms, by\n"
        f"`twellctl bench decode` on one {place}:",
        table(columns, rows),
    ]
    if not gains:
        parts.append(f"TwELL was not run there: {cell(measured['without_twell'])}.")
    elif max(gains) < FASTER:
        parts.append("A model of this size does not decode faster there because it is sparse.")
    return "\n\n".join(parts)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _place(device: str, versions: dict[str, str]) -> str:
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return cell(f"{device} ({software})")
