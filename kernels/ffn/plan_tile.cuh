// What a block of `plan` works on: its part of a tile, its shared memory, and how one warp gets at
// the entries of eight rows. The lists themselves are made in plan.cu.
#pragma once
#include "spec.cuh"
#include "ptx/compiler.cuh"
#include "ptx/shared.cuh"
#include "tile/lists.cuh"
#include "tile/round_masks.cuh"

namespace {

constexpr int kClusterThreads = spec::PLAN_CLUSTER_BLOCK;
constexpr int kBatch = 8;     // counts that a lane has under way
constexpr int kWindow = 256;  // entries that are fetched together where the stage is full

// A tile is planned by a cluster of kParts blocks, each of which has an equal share of the tile's
// groups, and in shared memory a map of kMapRounds rounds a warp.
constexpr int kParts = spec::PLAN_CLUSTER, kMapRounds = 96, kMapBytes = kMapRounds * ROUND * 2;
static_assert(kWindow * 5 <= kMapBytes, "a window shares the map");

// Where an entry lies: row in group << 20 | index from the first entry of the group, which is below
// 8 rows * 256 tiles * 256 slots.
constexpr int kRowShift = 20;
constexpr unsigned kIndexMask = (1u << kRowShift) - 1;

// The same pointer to global memory, added up here: else its parts are at each use.
template <class T>
__device__ __forceinline__ T* settle(T* pointer) {
    pointer = opaque(pointer);
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// Entries of a group: value << 16 | code each, and the panel if there are several.
struct Entries {
    unsigned* words;
    unsigned char* panels;
};

struct GroupState {
    int num_entries;
    int staged_at;         // -1: not on the stage
    unsigned heavy_lanes;  // bits of the lanes whose row is heavy
};

// Shared memory, all dynamic.
struct Shared {
    unsigned* counted;             // [NG] the block's pairs of tokens 0-3 of their groups
                                   // | of tokens 4-7 << 16; other blocks read it
    unsigned* ranks;               // [NG] of both halves the next pair's rank in the tile
    int2* neuron_start;            // [NG] {first pair, pairs that alternate with the other half}
    GroupState* groups;            // [groups of the block]
    unsigned short* class_counts;  // [groups of the block][P][CLASSES]
    int* class_ranks;              // of the warp, [P][CLASSES]
    int* panel_rounds;             // of the warp, [P]
    int* panel_first;              // of the warp, [P]: its first round in the map
    unsigned char* map;            // of the warp: which entry of the group each slot takes
    int* warp_sums;                // [32]
    int* num_staged;
    Entries stage;
    int stage_size;
};

template <class T>
__device__ __forceinline__ T* take(unsigned char*& memory, int count) {
    T* taken = reinterpret_cast<T*>(memory);
    memory += (count * static_cast<int>(sizeof(T)) + 15) & ~15;
    return taken;
}

__device__ __forceinline__ Shared lay_out_shared(unsigned char* memory, int num_neuron_groups,
                                                 int num_groups, int num_panels) {
    Shared shared;
    unsigned char* end = memory;
    const int classes = num_panels * CLASSES;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    shared.map = take<unsigned char>(end, num_warps * kMapBytes) + warp * kMapBytes;
    shared.class_counts = take<unsigned short>(end, num_groups * classes);
    shared.class_ranks = take<int>(end, num_warps * classes) + warp * classes;
    shared.panel_rounds = take<int>(end, num_warps * num_panels) + warp * num_panels;
    shared.panel_first = take<int>(end, num_warps * num_panels) + warp * num_panels;
    shared.neuron_start = take<int2>(end, num_neuron_groups);
    shared.counted = take<unsigned>(end, num_neuron_groups);
    shared.ranks = take<unsigned>(end, num_neuron_groups);
    shared.groups = take<GroupState>(end, num_groups);
    shared.warp_sums = take<int>(end, 32);
    shared.num_staged = take<int>(end, 1);
    // the stage takes the rest
    const int rest = static_cast<int>(dynamic_smem_bytes()) - static_cast<int>(end - memory);
    if (rest < 0) __trap();
    shared.stage_size = rest / (num_panels > 1 ? 5 : 4);
    shared.stage.words = reinterpret_cast<unsigned*>(end);
    shared.stage.panels = end + 4 * shared.stage_size;
    return shared;
}

// Room on the stage for a group's entries, -1 if there is none left.
__device__ __forceinline__ int reserve_stage(const Shared& shared, int num_entries, int lane) {
    int at = 0;
    if (lane == 0) at = atomicAdd(shared.num_staged, num_entries);
    at = __shfl_sync(~0u, at, 0);
    return at + num_entries <= shared.stage_size ? at : -1;
}

__device__ __forceinline__ Entries on_stage(const Shared& shared, int at) {
    return {shared.stage.words + at, shared.stage.panels + at};
}

__device__ __forceinline__ Entries in_map(const Shared& shared) {
    return {reinterpret_cast<unsigned*>(shared.map), shared.map + 4 * kWindow};
}

// The block's part of a tile of tokens: what was asked for, and where its lists go.
struct Job {
    const int* counts;  // of the part's first token, as entries
    const int* entries;
    int first_token, num_tokens;  // of the part; fewer, or none, in the last tile
    int token_in_tile;            // of the part's first token
    int num_columns, num_tiles, num_slots, cap, most;
    int panel_rows, num_panels, group_rounds;
    unsigned panel_factor;  // column * factor >> 32 is the panel: exact below 65536
    int* num_rounds;
    uint4* rounds;
    uint4* links;
    unsigned* pairs;
    unsigned first_pair;  // of the tile
    int* heavy_rows;
    int* heavy_count;

    __device__ int num_neuron_groups() const { return (num_columns + NEURONS - 1) / NEURONS; }
    __device__ int num_groups() const { return (num_tokens + GROUP - 1) / GROUP; }
    __device__ const int* group_entries(int group) const {
        return entries + static_cast<long long>(group) * GROUP * num_tiles * num_slots;
    }
};

// ---- entries of a group
// Row lane / 4 lies with four lanes, each with every fourth of its tiles. Entries are numbered by
// lane, tile, slot.

__device__ __forceinline__ const int* row_counts(const Job& job, int group, int lane) {
    return job.counts + (group * GROUP + lane / 4) * job.num_tiles;
}

// What fired in the lane's tiles, and whether one of them does not fit.
__device__ __forceinline__ int count_tiles(const Job& job, int group, int lane, bool& unfit) {
    unfit = false;
    int sum = 0;
    if (group * GROUP + lane / 4 < job.num_tokens) {
        const int* counts = row_counts(job, group, lane);
#pragma unroll 1
        for (int tile = lane % 4; tile < job.num_tiles; tile += 4 * kBatch) {
            int count[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b)
                count[b] = tile + 4 * b < job.num_tiles ? counts[tile + 4 * b] : 0;
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                unfit |= count[b] > job.num_slots;
                sum += count[b] & (NOT_FINITE - 1);
            }
        }
    }
    return sum;
}

// Writes where the entries numbered start to stop lie; the lane's are first to first + share.
__device__ __forceinline__ void locate_entries(const Job& job, int group, int lane, int first,
                                               int share, int start, int stop, unsigned* where) {
    if (share == 0 || first >= stop || first + share <= start) return;
    const int* counts = row_counts(job, group, lane);
    const unsigned row = lane / 4;
    int next = counts[lane % 4];
#pragma unroll 1
    for (int tile = lane % 4; tile < job.num_tiles && first < stop; tile += 4) {
        const int count = next;
        if (tile + 4 < job.num_tiles) next = counts[tile + 4];
        const int from = max(first, start), to = min(first + count, stop);
        const int cell = static_cast<int>(row) * job.num_tiles + tile;
        unsigned at = row << kRowShift | static_cast<unsigned>(cell * job.num_slots + from - first);
#pragma unroll 1
        for (int i = from; i < to; ++i) where[i - start] = at++;
        first += count;
    }
}

// Replaces where entries lie by the entries, and shows each to `see(column, row, panel)`;
// a lane has BATCH of them under way.
template <bool ONE_PANEL, int BATCH, class See>
__device__ __forceinline__ void fetch_entries(const Job& job, int group, int lane, Entries window,
                                              int num_entries, See see) {
    const int* entries = settle(job.group_entries(group));
#pragma unroll 1
    for (int first = lane; first < num_entries; first += BATCH * 32) {
        unsigned entry[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + 32 * b;
            entry[b] = entries[window.words[i < num_entries ? i : first] & kIndexMask];
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + 32 * b;
            if (b == 0 || i < num_entries) {
                const unsigned column = entry[b] & 0xffff, row = window.words[i] >> kRowShift;
                unsigned panel = 0, in_panel = column;
                if (!ONE_PANEL) {
                    panel = __umulhi(column, job.panel_factor);
                    in_panel = column - panel * job.panel_rows;
                    window.panels[i] = panel;
                }
                window.words[i] = (entry[b] & 0xffff0000) | row << COLUMN_BITS | in_panel;
                see(column, row, panel);
            }
        }
    }
}

// Of up to 32 pairs, a lane each: the lanes whose pair is of the class that the lane has as its
// number. All lanes take part.
__device__ __forceinline__ unsigned lanes_of_class(bool filled, unsigned bank_class, int lane) {
    unsigned lanes = __ballot_sync(~0u, filled);
#pragma unroll
    for (int bit = 1; bit < CLASSES; bit *= 2)
        lanes &= __ballot_sync(~0u, (bank_class & bit) != 0) ^ (lane & bit ? 0 : ~0u);
    return lanes;
}

}  // namespace
