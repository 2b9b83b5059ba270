"""Profiles made by hand, for pages and advice."""

from twellctl.firing.profiled import KindDensity, LayerProfile, PositionDensity, Profile

SIZE = 1000


def layer(density: float, **changes) -> LayerProfile:
    """A layer whose tokens all fire about so many neurons."""
    nnz = round(density * SIZE)
    fields = {
        "nnz_mean": density * SIZE, "nnz_p10": nnz // 2, "nnz_p50": nnz, "nnz_p90": 2 * nnz,
        "nnz_p99": 3 * nnz, "nnz_max": 4 * nnz, "density": density, "dead": 20, "slots": 32,
        "overflow": 0.0005, "largest_gate": 0.0, "largest_hidden": 0.0,
    }  # fmt: skip
    return LayerProfile(**fields | changes)


def profile(*layers: LayerProfile, **changes) -> Profile:
    """A profile of 4096 tokens in two kinds of text and three buckets of positions."""
    layers = layers or tuple(layer(density) for density in (0.02, 0.004, 0.01))
    densities = tuple(found.density for found in layers)
    mean = sum(densities) / len(densities)
    same = {"tokens": 2048, "density": mean, "layers": densities}
    fields = {
        "model": "a/model", "fingerprint": "f" * 64, "data": ("code=a.txt", "b.txt"),
        "windows": 4, "seq_len": 1024, "tokens": 4096, "dtype": "bfloat16",
        "device": "NVIDIA H200", "versions": {"twellctl": "0.1.0+gabc", "torch": "2.11"},
        "intermediate_size": SIZE, "tile": 256, "layers": layers,
        "by_position": tuple(PositionDensity(**same, first=a, last=b)
                             for a, b in ((0, 0), (1, 1), (2, 1023))),
        "by_kind": tuple(KindDensity(**same, kind=kind) for kind in ("code", "b")),
        "text_tokens": 4096,
    }  # fmt: skip
    return Profile(**fields | changes)
