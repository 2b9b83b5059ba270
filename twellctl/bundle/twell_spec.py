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
SLAB = 64  # columns of K that `up` takes at a time
DOWN_COLUMNS = 16  # of y, of a block of `down`
DOWN_STAGES = 32768  # bytes of shared memory of `down` beside its panel
INPUT_BOX_ROWS, WEIGHT_BOX_ROWS = 64, 128  # of tensor maps
PRODUCT_INNER = 64  # columns of their boxes; rows of those of W_down
PRODUCT_STAGES, PRODUCT_STAGE_BYTES = 4, 49152  # of a Hopper product
PATCH_BYTES = 8 * 4096  # of heavy_hidden and heavy_down, beside their stages
PRODUCT_BLOCK = 384
GRAD_SUMS_BLOCK = 512
GRAD_STAGES = 49152  # bytes of shared memory of the sums beside their panel
GRAD_LISTS_BLOCK = 128
GRAD_MAP_SLOTS = 2048  # of grad_lists: what it writes at a time
GRAD_PAIRS_BLOCK = 256

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


# ---- kinds of weights


class WeightKind(NamedTuple):
    """A kind of weights, as the kernels take it.

    Its struct in the kernels; bits of a weight; what ends the names of the entries that take it;
    whether products of one octet of tokens take f16, of which rows of x have a power of two. A row
    of a weight has a multiple of `step` numbers. The operator takes such weights on GPUs of at
    least `capability`; the kernels of the decode engine run from 8.0 on.
    """

    struct: str
    bits: int
    suffix: str
    in_f16: bool
    step: int
    capability: Capability


KINDS = {
    "bf16": WeightKind("Bf16", 16, "", in_f16=False, step=64, capability=(8, 0)),
    "e4m3": WeightKind("E4m3", 8, "_e4m3", in_f16=True, step=128, capability=(8, 9)),
}

# what a whole step takes; of int4, groups of weights share a scale (kernels/decode/step_codes.cuh)
STEP_KINDS = KINDS | {
    "int4": WeightKind("Int4", 4, "_int4", in_f16=False, step=512, capability=(9, 0)),
}


def entry(name: str, kind: str) -> str:
    """What the entry or source `name` is called where it takes weights of `kind`."""
    return f"{name}{STEP_KINDS[kind].suffix}"


def shared_kb(capability: Capability) -> int:
    """Kilobytes of shared memory that a block may have: Hopper and data centre Blackwell; A100 and
    Orin; all other GPUs."""
    if (9, 0) <= capability < (12, 0):
        return 227
    return 163 if capability in ((8, 0), (8, 7)) else 99


class FewSizes(NamedTuple):
    """What a product of few tokens is built for (few::Sizes of tile/few_sizes.cuh).

    One of KINDS of weights; octets of tokens; whether x stays in shared memory; row blocks in a
    pass; passes between two times that the warps' sums are added up; stages of a warp; halves of a
    slab.
    """

    kind: str
    octets: int
    stays: bool
    at_once: int
    passes: int
    stages: int
    halves: int


FEW_OCTETS = (1, 2, 4, 8)  # of tokens
FEW_STAYING = (1, 2)  # octets of which x may stay
Pass = tuple[int, int, int, int]


class _Passes(NamedTuple):
    """By octets: row blocks in a pass, passes, stages, halves; with much shared memory (227 KB),
    and with little. 163 KB are much for up to so many `octets`."""

    much: dict[int, Pass]
    little: dict[int, Pass]
    octets: int


_PASSES = {
    "bf16": _Passes(
        {1: (1, 3, 5, 2), 2: (1, 3, 4, 2), 4: (1, 3, 3, 2), 8: (3, 1, 2, 1)},
        {1: (1, 3, 3, 2), 2: (1, 1, 2, 2), 4: (1, 1, 1, 2), 8: (1, 1, 1, 1)},
        2,
    ),
    "e4m3": _Passes(  # x takes twice as much as weights
        {1: (1, 3, 5, 2), 2: (1, 3, 4, 2), 4: (2, 1, 3, 1), 8: (1, 1, 2, 1)},
        {1: (1, 3, 2, 2), 2: (1, 1, 3, 1), 4: (2, 1, 1, 1), 8: (1, 1, 1, 1)},
        0,
    ),
}
_GATED_PASSES = {
    "bf16": _Passes(
        {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (4, 1, 1, 2), 8: (2, 1, 2, 1)},
        {1: (2, 1, 2, 2), 2: (2, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 1, 1, 1)},
        1,
    ),
    "e4m3": _Passes(
        {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (2, 1, 3, 1), 8: (2, 1, 2, 1)},
        {1: (2, 1, 2, 1), 2: (2, 1, 1, 2), 4: (2, 1, 1, 1), 8: (2, 1, 1, 1)},
        0,
    ),
}
# few_linear with fewer, and with more weights under way, where there is shared memory for them
_OTHER_PASSES = {
    "bf16": {"1_short": (1, 3, 4, 2), "1_ahead": (1, 3, 7, 2), "2_ahead": (1, 3, 6, 2)},
}


def _pass_of(passes: _Passes, octets: int, kilobytes: int) -> Pass:
    is_much = kilobytes >= (163 if octets <= passes.octets else 227)
    return (passes.much if is_much else passes.little)[octets]


# of refine: a row block at a time; its slabs are those of few_linear for one token, or its sums
# would be others
REFINE = FewSizes("bf16", 1, True, 1, 1, 5, 2)


@cache
def few_entries(family: str, capability: Capability, kind: str) -> dict[str, FewSizes]:
    """The entries of few_linear, few_hidden or few_gated over weights of `kind` on such a GPU, the
    staying ones first."""
    found, kilobytes = {}, shared_kb(capability)
    of_kind = (_GATED_PASSES if family == "few_gated" else _PASSES)[kind]
    for octets in FEW_OCTETS:
        passes = _pass_of(of_kind, octets, kilobytes)
        stays = octets in FEW_STAYING
        found[entry(f"{family}_{octets}", kind)] = FewSizes(kind, octets, stays, *passes)
        if stays:
            sizes = FewSizes(kind, octets, False, *passes)
            found[entry(f"{family}_{octets}_long", kind)] = sizes
    others = _OTHER_PASSES.get(kind, {}) if family == "few_linear" else {}
    for name, passes in others.items():
        octets = int(name[0])
        if kilobytes < 227:
            passes = of_kind.little[octets]
        found[entry(f"{family}_{name}", kind)] = FewSizes(kind, octets, True, *passes)
    return found


class FewDownSizes(NamedTuple):
    """What few_down is built for: one of KINDS of weights, octets of tokens, tiles of 16 columns
    that a block adds up, blocks that share the neurons, neurons that are listed at a time."""

    kind: str
    octets: int
    tiles: int
    blocks: int
    listed: int

    @property
    def own_columns(self) -> int:
        """Of y, that a block writes."""
        return 16 * self.tiles // self.blocks


@cache
def few_down_entries(capability: Capability, kind: str) -> dict[str, FewDownSizes]:
    """The entries of few_down over weights of `kind` on such a GPU.

    Before Hopper there are no clusters.
    """
    narrow = 16 // KINDS[kind].bits, 1  # 32 bytes of a neuron: the least that comes from L2
    wide = (4, 4) if capability >= (9, 0) else narrow
    found = {entry("few_down", kind): FewDownSizes(kind, 1, *narrow, _FEW_LISTED)}
    for octets in FEW_OCTETS:
        sizes = FewDownSizes(kind, octets, *wide, _MAX_COLUMNS)
        found[entry(f"few_down_wide_{octets}", kind)] = sizes
    return found


# ---- the decode engine

PAGE = 64  # positions of a page of the cache
HEAD_DIMS = (64, 80, 96, 128, 256)  # others have zeros behind their columns
HEADS_A_BLOCK = (1, 2, 4)
MOST_QUERIES = 16  # new tokens of a row, at most
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
# kilobytes of weights that a block holds, at most; over int4 it holds scales of groups, too
_RING_KB = {"bf16": 192, "e4m3": 192, "int4": 152}
# that are on their way, by hidden size and kind of weights, else 32
_AHEAD = {(1536, "e4m3"): 64, (1536, "int4"): 64}


def step_group(K: int) -> int:
    """How many int4 weights share a scale in a step of that hidden size."""
    return 64 if K < 3072 else 128


def _step_numbers(source: str) -> dict[str, int | str]:
    """What one of the steps is built for; a name is that of a struct."""
    for (K, kind), (name, _) in _STEPS.items():
        if source == name:
            quads, rows = MOST_OF_BLOCK[K]
            return {
                "STEP_K": K,
                "STEP_WEIGHT": STEP_KINDS[kind].struct,
                "STEP_HEAD": "Int8" if kind == "int4" else "Bf16",
                "STEP_GROUP": step_group(K),
                "STEP_RING_KB": _RING_KB[kind],
                "STEP_AHEAD_KB": _AHEAD.get((K, kind), 32),
                "STEP_OWN_QUADS": quads,
                "STEP_MOST_ROWS": rows,
                "STEP_MOST_DIM": max(STEP_HEAD_DIMS[K]),
            }
    return {}


# what clocks are noted behind, and how the FFN goes, as step_shared.cuh numbers them
STEP_STAGES = (
    *("x is there", "x is dealt", "q, k and v"),
    *("heads are there", "heads are dealt", "o"),
    *("sum is there", "sum is dealt", "gate"),
    *("attention", "what fired", "up", "down", "parts are there", "their sum"),
)
NUM_STEP_STAGES = len(STEP_STAGES)
STEP_FORMS = {"dense": 0, "sparse": 1, "screened": 2}


def step_entry(K: int, D: int, form: str, kind: str) -> str:
    """The entry for a hidden size, heads of D, a form and a kind of weights."""
    return entry(f"step_{K}_{D}{'' if form == 'sparse' else f'_{form}'}", kind)


def _step_source(K: int, kind: str) -> tuple[str, dict[str, Arguments]]:
    is_bf16 = kind == "bf16"  # whose gates are screened, and whose heads may be large
    taken = [form for form in STEP_FORMS if form != "screened" or is_bf16]
    dims = [D for D in STEP_HEAD_DIMS[K] if D <= 128 or is_bf16]
    forms = ((D, form) for D in dims for form in taken)
    entries: dict[str, Arguments] = {
        step_entry(K, D, form, kind): (D, STEP_FORMS[form]) for D, form in forms
    }
    return f"{entry(f'decode/step_{K}', kind)}.cu", entries


# by hidden size and kind of weights: source and entries
_STEPS = {(K, kind): _step_source(K, kind) for kind in STEP_KINDS for K in MOST_OF_BLOCK}


# ---- sources

Entries = Mapping[str, Arguments]


def _of_few_walk(kind: str) -> Entries:
    """The entries of few_walk, with their template arguments."""
    return {
        entry(f"few_walk_{size}{form}", kind): (KINDS[kind].struct, bool(form), size)
        for form in ("", "_all")
        for size in WALK_SIZES
    }


def _of_few(family: str, kind: str, capability: Capability) -> Entries:
    """The entries of a product of few tokens or of few_down, with their template arguments."""
    entries: Mapping[str, FewSizes | FewDownSizes]
    if family == "few_down":
        entries = few_down_entries(capability, kind)
    else:
        entries = few_entries(family, capability, kind)
    return {name: (KINDS[kind].struct, *sizes[1:]) for name, sizes in entries.items()}


# the same whose entries differ from GPU to GPU
_OF_FEW = ("ffn/few_linear", "ffn/few_hidden", "ffn/few_down", "decode/few_gated")

# entries by the path in kernels/, with template arguments where TWELL_ENTRIES makes them. Their
# names are the same on every GPU
SOURCES: dict[str, Iterable[str] | Entries | Callable[[Capability], Entries]] = {
    "ffn/gate_pack.cu": ("gate_pack",),
    "ffn/plan.cu": ("plan_cluster",),
    "ffn/up.cu": ("up",),
    "ffn/hidden.cu": ("hidden", "hidden_kept"),
    "ffn/down.cu": ("down",),
    "ffn/heavy.cu": ("heavy_gather", "heavy_hidden", "heavy_down"),
    **{
        f"{entry(source, kind)}.cu": partial(_of_few, source.split("/")[1], kind)
        for source in _OF_FEW
        for kind in KINDS
    },
    **{f"{entry('ffn/few_walk', kind)}.cu": _of_few_walk(kind) for kind in KINDS},
    "train/grad_pairs.cu": ("grad_pairs", "add_parts"),
    "train/grad_lists.cu": ("list_neurons", "list_tokens"),
    "train/grad_sums.cu": ("grad_gate_up", "grad_down", "grad_x"),
    **{
        f"decode/attend_{D}.cu": {
            f"attend_{D}_{heads}": (D, heads, 2 if heads == 1 else 1) for heads in HEADS_A_BLOCK
        }
        for D in HEAD_DIMS
    },
    "decode/choose.cu": ("choose",),
    "decode/store_keys.cu": ("store_keys",),
    "decode/expand_codes.cu": ("expand_quads", "expand_neurons"),
    "decode/norm.cu": ("rms_norm", "embed_norm", "join_norms", "add_norm"),
    "decode/refine.cu": {"refine": (KINDS[REFINE.kind].struct, *REFINE[1:])},
    **dict(_STEPS.values()),
}
# sources without a file of their own: each includes another text, for other entries and numbers
TEXTS = {
    **{
        f"{entry(source, kind)}.cu": f"{source}.cu"
        for source in (*_OF_FEW, "ffn/few_walk")
        for kind in KINDS
        if KINDS[kind].suffix
    },
    **{f"decode/attend_{D}.cu": "decode/attend.cuh" for D in HEAD_DIMS},
    **{
        source: "decode/step_int4.cuh" if kind == "int4" else "decode/step.cuh"
        for (_, kind), (source, _) in _STEPS.items()
    },
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

    `files` are the source and its headers: what they name as `spec::NAME` is given, numbers and
    structs.
    KeyError for one that is not declared here.
    """
    number = int(arch.removeprefix("sm_").rstrip("af"))
    capability = number // 10, number % 10
    known = NUMBERS | _step_numbers(source)
    used = {name.decode() for text in files.values() for name in SPEC_NAME.findall(text)}
    given = {name: known[name] for name in sorted(used)}
    structs = [f"struct {value};" for value in given.values() if isinstance(value, str)]
    lines = [
        f"using {name} = {value};" if isinstance(value, str) else f"constexpr int {name} = {value};"
        for name, value in given.items()
    ]
    made = [
        f"make({', '.join([name, *(str(+v) if isinstance(v, int) else v for v in arguments)])})"
        for name, arguments in entries_of(source, capability).items()
    ]
    define = f"#define TWELL_ENTRIES(make) {' '.join(made)}"
    whole = ["#pragma once", *structs, "namespace spec {", *lines, "}", define, ""]
    return "\n".join(whole).encode()
