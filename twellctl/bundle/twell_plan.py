"""How the kernels are laid over a problem and a device: shapes and limits in, grids and sizes out.

Pure functions, no torch. Sizes that the kernels share stand in twell_spec.py. M tokens, K hidden
size, N neurons, S slots a tile of TILE columns.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from . import twell_spec as spec
from .twell_config import MAX_COLUMNS, TILE

MAX_TILE_TOKENS = 1024  # a token in its tile: 10 bits
MAX_PANEL_ROWS = 1 << spec.COLUMN_BITS
GATE_PACK_SMEM = spec.PRODUCT_STAGES * spec.PRODUCT_STAGE_BYTES + 1024  # to align the first stage
HEAVY_SMEM = GATE_PACK_SMEM + spec.PATCH_BYTES
PARTS_BLOCKS = 16  # that go through the pairs of a tile
_PARTIAL_BYTES = 512 << 20
_TRAINING_PARTIAL_BYTES = 192 << 20
_CHUNK_BYTES = 2 << 30
_WINDOW_BYTES = 512 << 20
_TRAINING_WINDOW_BYTES = 96 << 20
STATIC_SMEM = 1024  # kernels declare no more beside their dynamic shared memory

# rough costs in clocks of one multiprocessor; only their ratios matter
_L2_BYTES_A_CLOCK = 24
_PASS_CLOCKS = 1900  # of a warp: 32 pairs of a neuron group, two slabs
_PLAN_PAIR_CLOCKS = 1.0
_START_CLOCKS = 3000
_USUAL_DENSITY = 0.01
_PASSES_A_TOKEN = spec.GROUP * _USUAL_DENSITY / 32


@dataclass(frozen=True)
class Limits:
    """What of a device a launch is planned by."""

    num_sms: int
    smem_bytes: int  # shared memory that one block may ask for
    capability: tuple[int, int]

    @property
    def hopper(self) -> bool:
        """Whether Hopper's kernels run here; other GPUs have those for few tokens."""
        return self.capability == (9, 0)

    @property
    def arch(self) -> str:
        """What NVRTC compiles for: "sm_90a" on Hopper (its wgmma and TMA), else "sm_80" and so."""
        suffix = "a" if self.hopper else ""
        return f"sm_{self.capability[0]}{self.capability[1]}{suffix}"


@dataclass(frozen=True)
class Plan:
    """Grids and sizes for `M` tokens. Offsets of all buffers follow from these numbers."""

    M: int
    N: int
    K: int
    slots: int
    cap: int  # pairs a token has room for, on the average over GROUP of them
    most: int  # pairs a token may have; beyond, its row is heavy
    tile_tokens: int  # of up's tiles
    slabs_per_range: int  # of 64 columns of K
    neuron_ranges: int
    panel_rows: int
    down_splits: int
    plan_cluster_smem: int  # of each block of `plan_cluster`

    @cached_property
    def num_gate_tiles(self) -> int:
        """T, of TILE columns."""
        return ceil_div(self.N, TILE)

    @cached_property
    def num_tiles(self) -> int:
        """Token tiles of `up`."""
        return ceil_div(self.M, self.tile_tokens)

    @cached_property
    def num_ranges(self) -> int:
        """Q, the ranges into which `up` cuts K: partial sums a pair."""
        return ceil_div(ceil_div(self.K, 64), self.slabs_per_range)

    @cached_property
    def num_pairs(self) -> int:
        """Places for (token, neuron) pairs."""
        return self.num_tiles * self.tile_tokens * self.cap

    @cached_property
    def num_groups(self) -> int:
        """Groups of GROUP tokens."""
        return ceil_div(self.M, spec.GROUP)

    @cached_property
    def num_neuron_groups(self) -> int:
        """Groups of GROUP neurons."""
        return ceil_div(self.N, spec.GROUP)

    @cached_property
    def num_panels(self) -> int:
        """Panels of down's columns."""
        return ceil_div(self.N, self.panel_rows)

    @cached_property
    def group_rounds(self) -> int:
        """Rounds for which each (group, panel) has room."""
        return rounds_for(min(self.cap, self.panel_rows))

    @cached_property
    def group_batches(self) -> int:
        """Batches of those rounds."""
        return ceil_div(self.group_rounds, spec.BATCH)

    @cached_property
    def up_smem(self) -> int:
        """Dynamic shared memory of `up`: two slabs of the tile's x."""
        return 2 * self.tile_tokens * 2 * spec.SLAB

    @cached_property
    def down_smem(self) -> int:
        """Dynamic shared memory of `down`: the panel, and the stages of its warps."""
        return self.panel_rows * 2 * spec.DOWN_COLUMNS + spec.DOWN_STAGES

    @cached_property
    def up_grid(self) -> tuple[int, int, int]:
        """(token tiles, ranges of K, ranges of neurons)."""
        return self.num_tiles, self.num_ranges, self.neuron_ranges

    def hidden_launch(self, limits: Limits) -> tuple[tuple[int, ...], int]:
        """(grid, dynamic shared memory): tile by tile where those fill the device, else without."""
        if 2 * self.num_tiles >= limits.num_sms and self.num_ranges > 1:
            half = (limits.smem_bytes + 1024) // 2 - 1024
            return (self.num_tiles,), min(2 * self.tile_tokens * self.cap, half // 16 * 16)
        return self.gather_grid(limits), 0

    def gather_grid(self, limits: Limits) -> tuple[int, int]:
        """The grid of `hidden` where it has no shared memory."""
        blocks = ceil_div(self.num_groups * self.num_panels, spec.HIDDEN_BLOCK // 32)
        most = ceil_div(self.group_rounds, spec.BATCH)
        return blocks, max(1, min(most, 4 * limits.num_sms // blocks))

    @cached_property
    def down_grid(self) -> tuple[int, int]:
        """(16 columns of y, shares of the groups)."""
        return self.K // 16, self.down_splits


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `a`."""
    return ceil_div(a, multiple) * multiple


def rounds_for(pairs_a_token: int) -> int:
    """Rounds a (group, panel) needs at most, at `pairs_a_token` pairs of each of its tokens."""
    return ceil_div(spec.GROUP * pairs_a_token, spec.ROUND)


def hopper_cap(N: int) -> int:
    """Pairs beyond which a row is heavy: a block, or a group of the lists, would take too long."""
    return min(round_up(N, spec.GROUP), round_up(max(64, ceil_div(N, 24)), spec.GROUP))


def why_unfit(K: int, N: int, tile: int, smem_bytes: int) -> str | None:
    """None if the kernels take these sizes on a device, else what they would take."""
    if tile != TILE:
        return f"tiles of {TILE} columns, not {tile}"
    if K % 64:
        return f"a hidden size that is a multiple of 64, not {K}"
    if N % 8 or N > MAX_COLUMNS:
        return f"an intermediate size that is a multiple of 8 up to {MAX_COLUMNS}, not {N}"
    if max_tile_tokens(N, smem_bytes) < spec.GROUP:
        return f"a smaller intermediate size on this GPU than {N}: it has too little shared memory"
    return None


@lru_cache(maxsize=4096)
def make_plan(
    M: int, N: int, K: int, slots: int, cap: int, limits: Limits, *, training: bool = False
) -> Plan:
    """The plan for a chunk of `M` >= 1 tokens.

    `training`: less memory, panels for grad_sums, and rows are heavy for want of room alone.
    """
    partial_bytes = _TRAINING_PARTIAL_BYTES if training else _PARTIAL_BYTES
    laid = _lay_up(M, N, K, cap, limits.num_sms, limits.smem_bytes, partial_bytes)
    panel_rows = choose_panel_rows(N, limits.smem_bytes)
    if training:
        panel_rows = round_up(panel_rows, 4 * spec.GROUP)  # so that quarters are whole groups
    splits = split_down(M, K // 16, panel_rows, limits.num_sms)
    num_panels = ceil_div(N, panel_rows)
    cluster_smem = _cluster_smem(N, laid[0], cap, num_panels, limits.smem_bytes)
    most = N if training else cap
    return Plan(M, N, K, slots, cap, most, *laid, panel_rows, splits, cluster_smem)


def _cluster_smem(N: int, tile_tokens: int, cap: int, num_panels: int, smem_bytes: int) -> int:
    """Shared memory of a block of `plan_cluster`: half of a multiprocessor's, if that is enough."""
    groups = ceil_div(tile_tokens // spec.GROUP, spec.PLAN_CLUSTER)
    least = 16 * ceil_div(N, spec.GROUP) + (12 + 16 * num_panels) * groups
    least += (40 * num_panels + 3072) * spec.PLAN_CLUSTER_BLOCK // 32 + 256
    stage = (4 if num_panels == 1 else 5) * groups * spec.GROUP * cap
    half = (smem_bytes + 1024) // 2 - 1024
    return min(least + stage, half if least + 16384 <= half else smem_bytes - STATIC_SMEM)


def choose_panel_rows(N: int, smem_bytes: int) -> int:
    """Columns of a panel: as few panels as shared memory allows, all of nearly one size."""
    num_panels = ceil_div(N, most_panel_rows(smem_bytes, spec.DOWN_STAGES))
    return round_up(ceil_div(N, num_panels), spec.GROUP)


def most_panel_rows(smem_bytes: int, stages: int, row_bytes: int = 32) -> int:
    """Rows that fit into shared memory beside `stages`, and into a code."""
    room = smem_bytes - stages - STATIC_SMEM
    return min(room // row_bytes // (4 * spec.GROUP) * 4 * spec.GROUP, MAX_PANEL_ROWS)


def max_tile_tokens(N: int, smem_bytes: int) -> int:
    """Tokens whose two slabs of x fit in shared memory, and whose lists would in one block's."""
    slabs = (smem_bytes - 8 * STATIC_SMEM) // 256
    num_panels = ceil_div(N, choose_panel_rows(N, smem_bytes))
    of_neurons = 12 * ceil_div(N, spec.GROUP) + (40 * num_panels + 1536) * 16 + 256
    lists = 2 * (smem_bytes - STATIC_SMEM - of_neurons) // (3 + 4 * num_panels)
    return min(slabs, lists, MAX_TILE_TOKENS) // spec.GROUP * spec.GROUP


@lru_cache(maxsize=4096)
def chunk_tokens(M: int, N: int, K: int, slots: int, cap: int, limits: Limits) -> int:
    """Tokens that one pass takes, such that its buffers stay within some 2 GB."""
    panel_rows = choose_panel_rows(N, limits.smem_bytes)
    num_panels = ceil_div(N, panel_rows)
    entries = 4 * ceil_div(N, TILE) * slots
    round_bytes = spec.ROUND_BYTES + 4 * spec.ROUND + 4 * spec.BATCH_MASKS // spec.BATCH
    rounds = round_bytes * num_panels * rounds_for(min(cap, panel_rows)) // spec.GROUP
    sums = 4 * K if num_panels > 1 else 0
    most = max(256, _CHUNK_BYTES // (entries + cap * (4 + 4) + rounds + sums) // 256 * 256)
    return min(M, round_up(ceil_div(M, ceil_div(M, most)), 256))


def heavy_window(M: int, N: int, K: int, *, training: bool = False) -> int:
    """Rows of the heavy list that are computed at a time: [rows, K] and [rows, N] are kept."""
    most = _TRAINING_WINDOW_BYTES if training else _WINDOW_BYTES
    return min(M, max(256, most // (2 * max(N, K)) // 256 * 256))


def product_grid(rows: int, columns: int, num_sms: int) -> int:
    """Blocks of a persistent product (tile/hopper_product.cuh): pairs, at most one block an SM."""
    tiles = ceil_div(rows, 4 * spec.INPUT_BOX_ROWS) * ceil_div(columns, 256)
    return 2 * max(1, min(num_sms // 2, tiles))


def _lay_up(
    M: int, N: int, K: int, cap: int, num_sms: int, smem_bytes: int, partial_bytes: int
) -> tuple[int, int, int]:
    """(tile_tokens, slabs_per_range, neuron_ranges): the cheapest that fit.

    Each token tile reads all of W_up, so tiles are large; but few blocks plan a tile. Blocks are a
    little fewer than a multiple of the multiprocessors; every range of K beyond the first costs a
    partial sum a pair.
    """
    slabs, most_tokens = ceil_div(K, 64), max_tile_tokens(N, smem_bytes)
    fewest_tiles = ceil_div(M, most_tokens)
    best = None
    for slabs_per_range in sorted({ceil_div(slabs, q) for q in range(1, slabs + 1)}):
        num_ranges = ceil_div(slabs, slabs_per_range)
        for neuron_ranges in (1, 2, 4, 8, 16, 32):
            if neuron_ranges > 1 and ceil_div(N, spec.GROUP) < 16 * neuron_ranges:
                break
            share = num_ranges * neuron_ranges
            fewest_waves = ceil_div(fewest_tiles * share, num_sms)
            for waves in range(fewest_waves, fewest_waves + 4):
                tiles = max(fewest_tiles, waves * num_sms // share)
                tile_tokens = round_up(ceil_div(M, tiles), spec.GROUP)
                tiles = ceil_div(M, tile_tokens)
                if 4 * num_ranges * tiles * tile_tokens * cap > partial_bytes and num_ranges > 1:
                    continue
                laid = (tile_tokens, slabs_per_range, neuron_ranges)
                cost = ceil_div(tiles * share, num_sms) * _up_clocks(N, *laid)
                cost += 4 * num_ranges * M * N * _USUAL_DENSITY / (num_sms * _L2_BYTES_A_CLOCK)
                planned = tile_tokens * N * _USUAL_DENSITY * _PLAN_PAIR_CLOCKS
                clusters = ceil_div(spec.PLAN_CLUSTER * tiles, 2 * num_sms)
                cost += clusters * planned / spec.PLAN_CLUSTER
                if best is None or cost < best[0]:
                    best = (cost, laid)
    assert best is not None
    return best[1]


def _up_clocks(N: int, tile_tokens: int, slabs_per_range: int, neuron_ranges: int) -> float:
    """What one block of `up` takes, about: by its warps' passes, or by the weights it reads."""
    groups = ceil_div(N, spec.GROUP * neuron_ranges)
    passes = ceil_div(groups, spec.UP_BLOCK // 32) * max(1.0, tile_tokens * _PASSES_A_TOKEN + 0.45)
    weights = 256 * spec.GROUP * groups / _L2_BYTES_A_CLOCK
    x = 256 * tile_tokens / _L2_BYTES_A_CLOCK
    steps = ceil_div(slabs_per_range, 2)
    return _START_CLOCKS + steps * (x + max(passes * _PASS_CLOCKS, weights))


def split_down(
    M: int, column_blocks: int, panel_rows: int, num_sms: int, group_rows: int = spec.GROUP
) -> int:
    """Shares of the token groups: enough to fill the device, few enough to be worth a panel."""
    groups = ceil_div(M, group_rows)
    stage = _START_CLOCKS + panel_rows * 32 / _L2_BYTES_A_CLOCK
    group = 4 + group_rows * panel_rows * _USUAL_DENSITY / spec.ROUND * 8

    def clocks(splits: int) -> float:
        waves = ceil_div(column_blocks * splits, num_sms)
        return waves * (stage + ceil_div(groups, splits) * group)

    most = min(ceil_div(groups, spec.DOWN_BLOCK // 32), max(1, 4 * num_sms // column_blocks))
    return min(range(1, max(1, most) + 1), key=clocks)
