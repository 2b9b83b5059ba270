"""How the backward pass is laid over a problem and a device, as twell_plan.py does the forward one.

Pure functions, no torch.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from . import twell_spec as spec
from .twell_plan import Limits, Plan, ceil_div, chunk_tokens, most_panel_rows, round_up, split_down

MOST_TRAINED_TOKENS = 131072
_MAP_BYTES = 6 * spec.GRAD_MAP_SLOTS  # of grad_lists: a place and a code a slot
_X_CHUNK = 6144
_WINDOW_BYTES = 96 << 20


@dataclass(frozen=True)
class GradPlan:
    """Grids and sizes of the backward pass, of a plan that was made for training."""

    plan: Plan
    panel_tiles: int  # of up's tiles of tokens, in a panel of the weights' sums
    weight_splits: int
    x_split: int  # panels of neurons into which one of `plan` is cut, for grad_x
    x_shares: int
    x_chunk: int  # tokens whose sums are kept between panels

    @cached_property
    def token_panels(self) -> int:
        """Panels of tokens, for the weights' gradients."""
        return ceil_div(self.plan.num_tiles, self.panel_tiles)

    @cached_property
    def token_panel_rows(self) -> int:
        """Tokens of such a panel."""
        return self.panel_tiles * self.plan.tile_tokens

    @cached_property
    def neuron_fours(self) -> int:
        """Fours of neurons."""
        return ceil_div(self.plan.N, spec.GRAD_FOUR)

    @cached_property
    def token_fours(self) -> int:
        """Fours of tokens, of whole groups."""
        return 2 * self.plan.num_groups

    @cached_property
    def neuron_rounds(self) -> int:
        """Rounds for which all lists of neurons have room together."""
        least = ceil_div(self.plan.num_pairs, spec.ROUND)
        return least + spec.BATCH * self.neuron_fours * self.token_panels

    @cached_property
    def x_panels(self) -> int:
        """Panels of neurons, for grad_x."""
        return self.plan.num_panels * self.x_split

    @cached_property
    def x_panel_rows(self) -> int:
        """Neurons of such a panel."""
        return self.plan.panel_rows // self.x_split

    @cached_property
    def token_rounds(self) -> int:
        """Rounds for which all lists of tokens have room together."""
        least = ceil_div(self.plan.num_pairs, spec.ROUND)
        return least + spec.BATCH * self.token_fours * self.x_panels

    @staticmethod
    def lists_smem(panel_rows: int) -> int:
        """Dynamic shared memory of grad_lists."""
        return 96 * round_up(ceil_div(panel_rows, 64), 2) + _MAP_BYTES

    @property
    def weights_smem(self) -> int:
        """Dynamic shared memory of grad_gate_up and grad_down."""
        return 32 * self.token_panel_rows + spec.GRAD_STAGES

    @property
    def x_smem(self) -> int:
        """Dynamic shared memory of grad_x."""
        return 64 * self.x_panel_rows + spec.GRAD_STAGES


@lru_cache(maxsize=4096)
def make_grad_plan(plan: Plan, limits: Limits) -> GradPlan:
    """The backward pass of `plan`."""
    most = most_panel_rows(limits.smem_bytes, spec.GRAD_STAGES) // plan.tile_tokens
    panel_tiles = ceil_div(plan.num_tiles, ceil_div(plan.num_tiles, most))
    tokens, columns = panel_tiles * plan.tile_tokens, plan.K // 16
    weight_splits = split_down(plan.N, columns, tokens, limits.num_sms, spec.GRAD_FOUR)
    x_split = 1
    while plan.panel_rows > x_split * most_panel_rows(limits.smem_bytes, spec.GRAD_STAGES, 64):
        x_split *= 2
    rows = plan.panel_rows // x_split
    x_shares = split_down(plan.M, columns, rows, limits.num_sms, spec.GRAD_FOUR)
    chunk = plan.M
    if x_split * plan.num_panels > 1:
        chunk = round_up(ceil_div(plan.M, ceil_div(plan.M, _X_CHUNK)), spec.GRAD_FOUR)
    return GradPlan(plan, panel_tiles, weight_splits, x_split, x_shares, chunk)


def training_tokens(N: int, K: int, slots: int, limits: Limits) -> int:
    """Tokens that one pass of training takes, such that its buffers stay within some 2 GB."""
    cap = training_cap(N)
    most = chunk_tokens(MOST_TRAINED_TOKENS, N, K, slots, cap, limits)
    return max(256, most // 256 * 256)


def training_cap(N: int) -> int:
    """Pairs that a row has room for, on the average over its group: the fullest rows of a group
    without room are heavy, for they are cheaper densely, forward and backward."""
    return min(round_up(N, spec.GROUP), round_up(max(128, ceil_div(N, 32)), spec.GROUP))


def heavy_grad_window(M: int, N: int) -> int:
    """Heavy rows that the backward pass takes at a time: up to eight times [rows, N] are kept."""
    return min(M, max(256, _WINDOW_BYTES // (16 * N) // 256 * 256))
