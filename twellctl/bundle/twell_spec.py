"""The kernels, declared once: their sources, entries, and the numbers that the host shares.

A source in kernels/ includes "spec.cuh", which is no file: `spec` writes it when the source is
compiled, out of what stands here.

    namespace spec { constexpr int UP_BLOCK = 512; }      numbers that the source and headers name
    #define TWELL_ENTRIES(make) make(few_walk_8, 0, 8) ... entries with their template arguments

So a kernel of another size or type is one line here, and a changed number compiles anew just the
kernels that use it. Standard library only. What the decode engine alone launches is declared here
too, but exports carry no source of it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import NamedTuple

from .twell_config import MAX_COLUMNS as _MAX_COLUMNS
from .twell_config import TILE

SPEC = "spec.cuh"
Capability = tuple[int, int]
Arguments = tuple[int | bool | str, ...]

# ---- of the format, and of lists (tile/lists.cuh, tile/round_masks.cuh, train/grad_lists.cuh)

GROUP = 8  # tokens that one round of `down` serves; neurons that one fragment of `up` holds
ROUND = 16  # slots of a round
ROUND_BYTES = 64
COLUMN_BITS = 13  # of a code: a column in its panel
BATCH, BATCH_MASKS = 8, 32  # rounds that have their masks together, and how many words those are
GRAD_FOUR = 4  # rows whose sums share rounds

# ---- threads of a block, clusters, shared memory

UP_BLOCK = DOWN_BLOCK = HIDDEN_BLOCK = PLAN_CLUSTER_BLOCK = 512
PLAN_CLUSTER = 8  # blocks that plan a tile together
GATHER_BLOCK = 256
QUANTISE_BLOCK = 512
SLAB = 64  # columns of K that `up` takes at a time
DOWN_COLUMNS = 16  # of y, of a block of `down`
DOWN_STAGES = 32768  # bytes of shared memory of `down` beside its panel
INPUT_BOX_ROWS, WEIGHT_BOX_ROWS = 64, 128  # of tensor maps
PRODUCT_INNER = 64  # columns of their boxes; rows of those of W_down
PRODUCT_STAGES, PRODUCT_STAGE_BYTES = 4, 49152  # of a Hopper product
PATCH_BYTES = 8 * 4096  # of heavy_hidden and heavy_down, beside their stages
PRODUCT_BLOCK = 384
WALK_BLOCK = 1024
WALK_BATCH = 8  # neurons of which rows are under way
GRAD_SUMS_BLOCK = 512
GRAD_STAGES = 49152  # bytes of shared memory of the sums beside their panel
GRAD_LISTS_BLOCK = 128
GRAD_MAP_SLOTS = 2048  # of grad_lists: what it writes at a time
GRAD_PAIRS_BLOCK = GRAD_HEAVY_BLOCK = 256
GRAD_HEAVY_SMEM = 98304

# ---- few tokens

FEW_WARPS = 8
FEW_ROWS = 16  # of a row block
FEW_DOWN_STAGES = 4
_FEW_LISTED = 2048  # neurons that few_down lists at a time
FEW_WALK_BLOCK = 512
FEW_WALK_BATCH, FEW_WALK_QUADS, FEW_WALK_CHUNKS = 8, 8, 3
FEW_WALK_WAYS = 2  # at most; over e4m3, where a row takes half the threads, twice as many
FEW_WALK_HEAD = 144  # bytes in front of its lists
WALK_SIZES = (8, 6, 4, 3, 2)  # blocks of a token
HEAVY_WALK_SIZE = WALK_SIZES[0]  # of a heavy row


def shared_kb(capability: Capability) -> int:
    """Kilobytes of shared memory that a block may have: Hopper and data centre Blackwell; A100 and
    Orin; all other GPUs."""
    if (9, 0) <= capability < (12, 0):
        return 227
    return 163 if capability in ((8, 0), (8, 7)) else 99


class FewSizes(NamedTuple):
    """What a product of few tokens is built for (few::Sizes of tile/few_product.cuh).

    Bytes of a weight, 2 (bf16) or 1 (e4m3); octets of tokens; whether x stays in shared memory; row
    blocks in a pass; passes between two times that the warps' sums are added up; stages of a warp;
    halves of a slab.
    """

    weight_bytes: int
    octets: int
    stays: bool
    at_once: int
    passes: int
    stages: int
    halves: int


E4M3_END = "_e4m3"  # ends the name of an entry for such weights
FEW_OCTETS = (1, 2, 4, 8)  # of tokens
FEW_STAYING = (1, 2)  # octets of which x may stay
Pass = tuple[int, int, int, int]
# by octets: row blocks in a pass, passes, stages, halves; with much shared memory, and with little
_PASS = {1: (1, 3, 5, 2), 2: (1, 3, 4, 2), 4: (1, 3, 3, 2), 8: (3, 1, 2, 1)}
_SMALL_PASS = {1: (1, 3, 3, 2), 2: (1, 1, 2, 2), 4: (1, 1, 1, 2), 8: (1, 1, 1, 1)}
_GATED_PASS = {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (4, 1, 1, 2), 8: (2, 1, 2, 1)}
_SMALL_GATED_PASS = {1: (2, 1, 2, 2), 2: (2, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 1, 1, 1)}
# the same over e4m3 weights, beside which x takes twice as much
_E4M3_PASS = {1: (1, 3, 5, 2), 2: (1, 3, 4, 2), 4: (2, 1, 3, 1), 8: (1, 1, 2, 1)}
_SMALL_E4M3_PASS = {1: (1, 3, 2, 2), 2: (1, 1, 3, 1), 4: (2, 1, 1, 1), 8: (1, 1, 1, 1)}
_GATED_E4M3_PASS = {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (2, 1, 3, 1), 8: (2, 1, 2, 1)}
_SMALL_GATED_E4M3_PASS = {1: (2, 1, 2, 1), 2: (2, 1, 1, 2), 4: (2, 1, 1, 1), 8: (2, 1, 1, 1)}
# few_linear with fewer, and with more weights under way, where there is shared memory for them
_OTHER_PASS = {"1_short": (1, 3, 4, 2), "1_ahead": (1, 3, 7, 2), "2_ahead": (1, 3, 6, 2)}


def _pass_of(octets: int, gated: bool, weight_bytes: int, kilobytes: int) -> Pass:
    if weight_bytes == 1:
        large = _GATED_E4M3_PASS if gated else _E4M3_PASS
        small = _SMALL_GATED_E4M3_PASS if gated else _SMALL_E4M3_PASS
        return (large if kilobytes >= 227 else small)[octets]
    large, small = (_GATED_PASS, _SMALL_GATED_PASS) if gated else (_PASS, _SMALL_PASS)
    enough = 163 if octets <= (1 if gated else 2) else 227
    return (large if kilobytes >= enough else small)[octets]


@cache
def few_entries(family: str, capability: Capability, end: str = "") -> dict[str, FewSizes]:
    """The entries of few_linear, few_hidden or few_gated on such a GPU, the staying ones first.

    `end` E4M3_END: those that take e4m3 weights.
    """
    found, kilobytes, weight_bytes = {}, shared_kb(capability), 1 if end else 2
    for octets in FEW_OCTETS:
        passes = _pass_of(octets, family == "few_gated", weight_bytes, kilobytes)
        stays = octets in FEW_STAYING
        found[f"{family}_{octets}{end}"] = FewSizes(weight_bytes, octets, stays, *passes)
        if stays:
            sizes = FewSizes(weight_bytes, octets, False, *passes)
            found[f"{family}_{octets}_long{end}"] = sizes
    for name, passes in _OTHER_PASS.items() if family == "few_linear" and not end else ():
        passes = passes if kilobytes >= 227 else _SMALL_PASS[int(name[0])]
        found[f"{family}_{name}"] = FewSizes(weight_bytes, int(name[0]), True, *passes)
    return found


class FewDownSizes(NamedTuple):
    """What few_down is built for: bytes of a weight, octets of tokens, tiles of 16 columns that a
    block adds up, blocks that share the neurons, neurons that are listed at a time."""

    weight_bytes: int
    octets: int
    tiles: int
    blocks: int
    listed: int

    @property
    def own_columns(self) -> int:
        """Of y, that a block writes."""
        return 16 * self.tiles // self.blocks


@cache
def few_down_entries(capability: Capability, end: str = "") -> dict[str, FewDownSizes]:
    """The entries of few_down on such a GPU, for e4m3 weights with `end` E4M3_END.

    Before Hopper there are no clusters.
    """
    weight_bytes = 1 if end else 2
    narrow = 2 // weight_bytes, 1
    wide = (4, 4) if capability >= (9, 0) else narrow
    found = {f"few_down{end}": FewDownSizes(weight_bytes, 1, *narrow, _FEW_LISTED)}
    for octets in FEW_OCTETS:
        sizes = FewDownSizes(weight_bytes, octets, *wide, _MAX_COLUMNS)
        found[f"few_down_wide_{octets}{end}"] = sizes
    return found


# ---- the decode engine

PAGE = 64  # positions of a page of the cache
HEAD_DIMS = (64, 80, 96, 128, 256)  # others have zeros behind their columns
HEADS_A_BLOCK = (1, 2, 4)
ATTEND_LOADS = 8  # of 16 bytes, of keys and of values, that a lane has under way
ATTEND_BLOCK = 256  # threads, at most
NORM_WARPS, NORM_PARTS = 32, 2  # at most; eights of a thread
CHOOSE_BLOCK = 256
STEP_WARPS = 8  # that compute
STEP_QUAD = 4  # rows, the least that a block has
# by hidden size, as models have them; 256 in bf16 alone, where the registers are enough
STEP_HEAD_DIMS = {
    1536: (128,),
    2048: (64, 128, 256),
    3072: (128, 256),
    3584: (128,),
    4096: (128,),
}
# by hidden size: quads of x, and rows of the gate, that a block has at most
MOST_OF_BLOCK = {1536: (4, 128), 2048: (4, 128), 3072: (8, 128), 3584: (8, 192), 4096: (8, 128)}
STEP_MOST_MAPPED = 32  # rows beside them: the gate that neurons share, and their up
STEP_RING_KB = 192  # kilobytes of weights that a block holds, at most
# that are on their way, by hidden size and bytes of a weight, else 32
STEP_AHEAD = {(1536, 1): 64}


def _step_numbers(source: str) -> dict[str, int]:
    """What one of the steps is built for."""
    for (K, end), (name, _) in _STEPS.items():
        if source == name:
            weight_bytes = 1 if end else 2
            quads, rows = MOST_OF_BLOCK[K]
            ahead = {"STEP_AHEAD_KB": STEP_AHEAD.get((K, weight_bytes), 32)}
            most = {"STEP_OWN_QUADS": quads, "STEP_MOST_ROWS": rows}
            most["STEP_MOST_DIM"] = max(STEP_HEAD_DIMS[K])
            return {"STEP_K": K, "STEP_WEIGHT_BYTES": weight_bytes} | ahead | most
    return {}


# as step_shared.cuh numbers them
STEP_FORMS = {"dense": 0, "sparse": 1, "screened": 2}


def step_entry(K: int, D: int, form: str, end: str = "") -> str:
    """The entry for a hidden size, heads of D and a form, for e4m3 weights with `end` E4M3_END."""
    return f"step_{K}_{D}{'' if form == 'sparse' else f'_{form}'}{end}"


def _step_source(K: int, end: str) -> tuple[str, dict[str, Arguments]]:
    taken = [form for form in STEP_FORMS if form != "screened" or not end]
    dims = [D for D in STEP_HEAD_DIMS[K] if D <= 128 or not end]
    forms = ((D, form) for D in dims for form in taken)
    entries = {step_entry(K, D, form, end): (D, STEP_FORMS[form]) for D, form in forms}
    return f"decode/step_{K}{end}.cu", entries


# by hidden size and E4M3_END or "": source and entries
_STEPS = {(K, end): _step_source(K, end) for end in ("", E4M3_END) for K in MOST_OF_BLOCK}


# ---- sources

Entries = Mapping[str, Arguments]
# entries that there are for weights in bf16 and in e4m3, with what stands behind the type of these
_BY_WEIGHT: dict[str, Entries] = {
    "gate_pack": {"gate_pack": ()},
    "up": {"up": ()},
    "heavy": {"heavy_hidden": ("HIDDEN",), "heavy_down": ("DOWN",)},
    "walk": {"walk_gate": ()},
    "heavy_walk": {"heavy_walk": (True,), "heavy_walk_gate": (False,)},
    "few_walk": {
        f"few_walk_{size}{form}": (bool(form), size) for form in ("", "_all") for size in WALK_SIZES
    },
}

# entries by the path in kernels/, with template arguments where TWELL_ENTRIES makes them. Their
# names are the same on every GPU
SOURCES: dict[str, Iterable[str] | Entries | Callable[[Capability], Entries]] = {
    "ffn/quantise_rows.cu": ("quantise_rows", "quantise_inputs"),
    "ffn/quantise_hidden.cu": ("quantise_hidden", "quantise_bare_hidden", "scale_sums"),
    "ffn/plan.cu": ("plan_cluster",),
    "ffn/hidden.cu": {"hidden": ("Unscaled", "Leave"), "hidden_kept": ("Unscaled", "Keep")},
    f"ffn/hidden{E4M3_END}.cu": {f"hidden{E4M3_END}": ("Scaled", "Leave")},
    "ffn/down.cu": ("down",),
    f"ffn/down{E4M3_END}.cu": (f"down{E4M3_END}",),
    "ffn/heavy_rows.cu": ("heavy_gather", "heavy_widen"),
    "ffn/few_linear.cu": partial(few_entries, "few_linear"),
    "ffn/few_hidden.cu": partial(few_entries, "few_hidden"),
    "ffn/few_down.cu": few_down_entries,
    f"ffn/few_linear{E4M3_END}.cu": partial(few_entries, "few_linear", end=E4M3_END),
    f"ffn/few_hidden{E4M3_END}.cu": partial(few_entries, "few_hidden", end=E4M3_END),
    f"ffn/few_down{E4M3_END}.cu": partial(few_down_entries, end=E4M3_END),
    **{
        f"ffn/{name}{end}.cu": {
            f"{entry}{end}": ("E4m3" if end else "Bf16", *how) for entry, how in entries.items()
        }
        for name, entries in _BY_WEIGHT.items()
        for end in ("", E4M3_END)
    },
    "train/grad_pairs.cu": ("grad_pairs", "add_parts"),
    "train/grad_lists.cu": ("list_neurons", "list_tokens"),
    "train/grad_sums.cu": ("grad_gate_up", "grad_down", "grad_x"),
    "train/grad_heavy.cu": ("grad_heavy", "order_heavy"),
    **{
        f"decode/attend_{D}.cu": {
            f"attend_{D}_{heads}": (D, heads, 2 if heads == 1 else 1) for heads in HEADS_A_BLOCK
        }
        for D in HEAD_DIMS
    },
    "decode/choose.cu": ("choose",),
    "decode/few_gated.cu": partial(few_entries, "few_gated"),
    f"decode/few_gated{E4M3_END}.cu": partial(few_entries, "few_gated", end=E4M3_END),
    "decode/store_keys.cu": ("store_keys",),
    "decode/norm.cu": ("rms_norm", "embed_norm", "add_norm"),
    **dict(_STEPS.values()),
}
# sources without a file of their own: each includes another text, for other entries and numbers
TEXTS = {
    **{
        f"{name}{E4M3_END}.cu": f"{name}.cu"
        for name in (
            *("ffn/few_linear", "ffn/few_hidden", "ffn/few_down", "decode/few_gated"),
            *("ffn/hidden", *(f"ffn/{name}" for name in _BY_WEIGHT)),
        )
    },
    **{f"decode/attend_{D}.cu": "decode/attend.cuh" for D in HEAD_DIMS},
    **{source: "decode/step.cuh" for source, _ in _STEPS.values()},
}
ENTRY_FILES = {
    entry: source
    for source, entries in SOURCES.items()
    for entry in (entries((9, 0)) if callable(entries) else entries)
}
NUMBERS = {"TILE": TILE} | {
    name: n for name, n in globals().items() if isinstance(n, int) and not name.startswith("_")
}
SPEC_NAME = re.compile(rb"\bspec::(\w+)")


def entries_of(source: str, capability: Capability) -> dict[str, Arguments]:
    """The entries that a source makes by TWELL_ENTRIES on such a GPU, with their arguments."""
    entries = SOURCES.get(source, ())
    entries = entries(capability) if callable(entries) else entries
    return dict(entries) if isinstance(entries, Mapping) else {}


def spec(source: str, files: Mapping[str, bytes], arch: str) -> bytes:
    """What "spec.cuh" is when `source` is compiled for `arch` ("sm_90a").

    `files` are the source and its headers: the numbers that they name as `spec::NAME` are given.
    KeyError for one that is not declared here.
    """
    number = int(arch.removeprefix("sm_").rstrip("af"))
    capability = number // 10, number % 10
    known = NUMBERS | _step_numbers(source)
    used = {name.decode() for text in files.values() for name in SPEC_NAME.findall(text)}
    lines = [f"constexpr int {name} = {known[name]};" for name in sorted(used)]
    made = [
        f"make({', '.join([name, *(str(+v) if isinstance(v, int) else v for v in arguments)])})"
        for name, arguments in entries_of(source, capability).items()
    ]
    define = f"#define TWELL_ENTRIES(make) {' '.join(made)}"
    return "\n".join(["#pragma once", "namespace spec {", *lines, "}", define, ""]).encode()
