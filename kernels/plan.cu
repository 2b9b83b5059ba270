// plan: from the packed gate of a tile of tokens, the lists that `up`, `hidden` and `down` walk.
//
// A pair is a (token, neuron that fired). `up` wants all pairs of one neuron, `down` all pairs of
// few tokens: every pair is listed twice, and `dest` leads from the one list into the other. Rows
// that the sparse way does not suit go to heavy_rows instead, and have no pairs: a tile overflowed
// (count > S) or is not finite (NOT_FINITE in a count), or more than cap neurons fired.
//
// For down, each (group of 8 tokens, panel of columns), q = group * num_panels + panel:
//   num_rounds int32 [Q], rounds [Q, group_rounds] of 64 bytes, 16 slots each (twell_lists.cuh)
//   Slot s prefers columns of class s & 7: then the eight rows that one ldmatrix phase reads lie in
//   different banks. The i-th pair of a class (in the order of rows, lanes, tiles, slots, never of
//   time) takes place i of its class. There are
//       R = min(max over classes of ceil(pairs / 2), (5 * ceil(all pairs / 16) + 3) / 4 + 1)
//   rounds; pairs beyond place 2R of their class take free places of other classes, in order. The
//   rest of the slots are pads: PAD, token 0, the first column of the slot's class.
// For up, each tile of tokens:
//   pair_start int32 [tiles, NG + 1]
//   pairs uint2 [tiles, tile_tokens * cap] of {token in tile | column << 16, dest}
//   The 8 neurons of group ng have the pairs pair_start[ng] to pair_start[ng + 1]. There, tokens
//   0-3 and 4-7 of their groups alternate while there are both; else the order is free and may
//   differ from run to run. dest: the slot's value, in 16-bit units from the start of rounds.
//
// R <= group_rounds = (10 * c + 15) / 16 + 2 for any c >= min(cap, panel_rows): 8 rows have at most
// p = 8c pairs there, ceil(p / 16) <= (c + 1) / 2, so R <= (5 (c + 1) / 2 + 3) / 4 + 1
// = floor(5c / 8 + 11 / 8) + 1 <= ceil(5c / 8) + 2. And 16 R >= p, as 2R >= every class or
// R > 5 / 4 * ceil(p / 16): every pair has a place.
//
// Three phases with barriers between: count (each warp its groups), start (prefix sum over neuron
// groups), place (each warp its groups). Count leaves the entries that it fetched on a stage in
// shared memory for place; groups that no longer fit there are fetched again, window by window.
//
// Launch: a block a tile of tokens, of 512 threads, or of 1024 where a multiprocessor would have
// only one block. Dynamic shared memory, NG = ceil(N / 8), P panels:
//   least  12 * NG + (3 / 2 + 2 * P) * tile_tokens + (40 * P + 1536) * warps + 256 bytes
//   stage  what there is beyond: 4 bytes a pair, 5 if P > 1; best if the pairs of a tile fit
// Limits: N a multiple of 8 up to 65536 (NG 8192), S up to 256, panel_rows a multiple of 8 up to
// 8192, P up to 256, tile_tokens a multiple of 8 up to 1024. counts, entries and heavy_count (0) are
// those of `gate_pack` or `pack`; the order of entries within a tile does not matter.
#include "plan_tile.cuh"

namespace {

// ---- first phase: count

__device__ __forceinline__ void prefetch_counts(const Job& job) {
    const char* counts = reinterpret_cast<const char*>(job.counts);
    const int num_bytes = job.num_tokens * job.num_tiles * 4;
#pragma unroll 1
    for (int at = threadIdx.x * 128; at < num_bytes; at += blockDim.x * 128)
        prefetch_into_l2(counts + at);
}

__device__ __forceinline__ void clear(const Job& job, const Shared& shared) {
#pragma unroll 1
    for (int i = threadIdx.x; i < job.num_neuron_groups(); i += blockDim.x) shared.unplaced[i] = 0;
    if (threadIdx.x == 0) *shared.num_staged = 0;
}

__device__ __forceinline__ void list_heavy_rows(const Job& job, int group, int lane, bool heavy) {
    const unsigned rows = __ballot_sync(~0u, heavy && lane % 4 == 0);
    if (rows == 0) return;
    int first = 0;
    if (lane == 0) first = atomicAdd(job.heavy_count, __popc(rows));
    first = __shfl_sync(~0u, first, 0);
    if (rows >> lane & 1) {
        const int rank = __popc(rows & ((1u << lane) - 1));
        job.heavy_rows[first + rank] = job.first_token + group * GROUP + lane / 4;
    }
}

template <bool ONE_PANEL>
__device__ __forceinline__ void count_group(const Job& job, const Shared& shared, int group,
                                            int lane) {
    // which rows are heavy
    bool unfit;
    int share = count_tiles(job, group, lane, unfit);
    int nnz = share + __shfl_xor_sync(~0u, share, 1);
    nnz += __shfl_xor_sync(~0u, nnz, 2);
    const unsigned unfit_lanes = __ballot_sync(~0u, unfit);
    const bool heavy = (unfit_lanes >> (lane & 28) & 15) != 0 || nnz > job.cap;
    const unsigned heavy_lanes = __ballot_sync(~0u, heavy);
    list_heavy_rows(job, group, lane, heavy);
    if (heavy) share = 0;

    // where the entries go
    const int end = scan_warp(share, lane);
    const int num_entries = __shfl_sync(~0u, end, 31);
    const int staged_at = reserve_stage(shared, num_entries, lane);
    if (lane == 0) shared.groups[group] = {num_entries, staged_at, heavy_lanes};
    const int classes = job.num_panels * CLASSES;
#pragma unroll 1
    for (int i = lane; i < classes; i += 32) shared.class_ranks[i] = 0;

    // pairs of each neuron group and of each class
    const Entries window = staged_at >= 0 ? on_stage(shared, staged_at) : in_patch(shared);
    const int size = staged_at >= 0 ? num_entries : kWindow;
#pragma unroll 1
    for (int start = 0; start < num_entries; start += size) {
        const int stop = min(start + size, num_entries);
        locate_entries(job, group, lane, end - share, share, start, stop, window.words);
        __syncwarp();
        fetch_entries<ONE_PANEL>(
            job, group, lane, window, stop - start,
            [&](unsigned column, unsigned row, unsigned panel) {
                atomicAdd(&shared.unplaced[column / NEURONS], row < 4 ? 1u : 0x10000u);
                atomicAdd(&shared.class_ranks[panel * CLASSES + column % CLASSES], 1);
            });
        __syncwarp();
    }
#pragma unroll 1
    for (int i = lane; i < classes; i += 32)
        shared.class_counts[group * classes + i] = shared.class_ranks[i];
}

// ---- second phase: start

// The first pair of each neuron group. Each warp has a run of them.
__device__ __forceinline__ void start_neuron_groups(const Job& job, const Shared& shared, int warp,
                                                    int lane, int* pair_start) {
    const int num = job.num_neuron_groups();
    const int num_threads = blockDim.x;
    const int run = (num + num_threads - 1) / num_threads * 32;
    const int stop = min((warp + 1) * run, num);
    int sum = 0;
#pragma unroll 1
    for (int i = warp * run + lane; i < stop; i += 32) {
        const unsigned pairs = shared.unplaced[i];
        sum += (pairs & 0xffff) + (pairs >> 16);
    }
    sum = scan_warp(sum, lane);
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();

    const int below = scan_warp(lane < warp ? shared.warp_sums[lane] : 0, lane);
    int first = __shfl_sync(~0u, below, 31);
#pragma unroll 1
    for (int start = warp * run; start < stop; start += 32) {
        const int i = start + lane;
        const unsigned pairs = i < stop ? shared.unplaced[i] : 0;
        const int low = pairs & 0xffff, high = pairs >> 16;
        const int end = scan_warp(low + high, lane);
        if (i < stop) {
            const int at = first + end - low - high;
            shared.neuron_start[i] = make_int2(at, min(low, high));
            pair_start[i] = at;
        }
        first += __shfl_sync(~0u, end, 31);
    }
    if (warp == num_threads / 32 - 1 && lane == 0) pair_start[num] = first;
}

// ---- third phase: place

__device__ __forceinline__ int rounds_for(const unsigned short* class_counts) {
    int sum = 0, most = 0;
#pragma unroll
    for (int c = 0; c < CLASSES; ++c) {
        const int count = class_counts[c];
        sum += count;
        most = max(most, count);
    }
    const int least = (sum + ROUND - 1) / ROUND;
    return min((most + 1) / 2, (5 * least + 3) / 4 + 1);
}

// Rounds of each panel of the group; returns their sum.
__device__ __forceinline__ int lay_rounds(const Job& job, const Shared& shared, int group, int q,
                                          int lane) {
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < job.num_panels; first += 32) {
        const int panel = first + lane;
        int rounds = 0;
        if (panel < job.num_panels) {
            const int counts = (group * job.num_panels + panel) * CLASSES;
            rounds = rounds_for(shared.class_counts + counts);
            job.num_rounds[q + panel] = rounds;
        }
        const int end = scan_warp(rounds, lane);
        if (panel < job.num_panels) {
            shared.panel_rounds[panel] = rounds;
            shared.panel_patch[panel] = total + end - rounds;
        }
        total += __shfl_sync(~0u, end, 31);
    }
    return total;
}

// Fills records with pads; a lane always writes the same record of a round.
__device__ __forceinline__ void pad_rounds(uint4* records, int num_rounds, int lane) {
    const unsigned values = PAD | PAD << 16;
    const unsigned first_class = lane % ROUND_RECORDS * 2;
    const unsigned codes = first_class | (first_class + 1) << 16;
    const uint4 pads = make_uint4(values, values, codes, codes);
#pragma unroll 1
    for (int i = lane; i < num_rounds * ROUND_RECORDS; i += 32) records[i] = pads;
}

// Lanes whose entry has this class and panel, of the lanes with an entry.
template <bool ONE_PANEL>
__device__ __forceinline__ unsigned lanes_alike(bool filled, unsigned bank_class, unsigned panel,
                                                int num_panels) {
    unsigned alike = __ballot_sync(~0u, filled);
#pragma unroll
    for (int bit = 1; bit < CLASSES; bit *= 2) {
        const unsigned set = __ballot_sync(~0u, (bank_class & bit) != 0);
        alike &= bank_class & bit ? set : ~set;
    }
    if (!ONE_PANEL) {
#pragma unroll 1
        for (int bit = 1; bit < num_panels; bit *= 2) {
            const unsigned set = __ballot_sync(~0u, (panel & bit) != 0);
            alike &= panel & bit ? set : ~set;
        }
    }
    return alike;
}

// A pair beyond the 2R places of its class: the next free place of any class.
__device__ __forceinline__ int spill_place(const unsigned short* class_counts, int places,
                                        int bank_class, int rank) {
    int spilled = rank - places;
#pragma unroll 1
    for (int c = 0; c < bank_class; ++c) spilled += max(0, class_counts[c] - places);
#pragma unroll 1
    for (int c = 0; c < CLASSES; ++c) {
        const int free = max(0, places - class_counts[c]);
        if (spilled < free) return place_in_rounds(c, class_counts[c] + spilled);
        spilled -= free;
    }
    __trap();  // there are 8 * places >= pairs
    return 0;
}

__device__ __forceinline__ void place_pair(const Shared& shared, uint2* pairs, int token,
                                           int column, unsigned dest) {
    const int neuron_group = column / NEURONS, half = token >> 2 & 1;
    const unsigned before = atomicSub(&shared.unplaced[neuron_group], 1u << (16 * half));
    const int rank = static_cast<int>(before >> (16 * half) & 0xffff) - 1;
    const int2 start = shared.neuron_start[neuron_group];
    const int at = start.x + rank + (rank < start.y ? rank + half : start.y);
    pairs[at] = make_uint2(token | column << 16, dest);
}

// A group on its way into the lists.
struct Placing {
    int group;
    unsigned first_half;    // of the group's rounds, in 16-bit units
    int total_rounds;       // of all panels
    unsigned short* slots;  // of the group's rounds
    uint2* pairs;           // of the tile
    bool into_patch;        // rounds are laid out in the patch, not in their place
};

// Places entries of a group into both lists, in order.
template <bool ONE_PANEL>
__device__ __forceinline__ void place_entries(const Job& job, const Shared& shared,
                                              const Placing& to, int lane, Entries window,
                                              int num_entries) {
    const int slice = job.group_rounds * ROUND_HALVES;  // from panel to panel
    unsigned short* patch = reinterpret_cast<unsigned short*>(shared.patch);
    const unsigned lanes_below = (1u << lane) - 1;
#pragma unroll 1
    for (int first = 0; first < num_entries; first += 32) {
        const bool filled = first + lane < num_entries;
        unsigned word = 0, panel = 0;
        if (filled) {
            word = window.words[first + lane];
            if (!ONE_PANEL) panel = window.panels[first + lane];
        }

        // rank in its class and panel
        const unsigned bank_class = word % CLASSES;
        const unsigned alike = lanes_alike<ONE_PANEL>(filled, bank_class, panel, job.num_panels);
        int* ranks = shared.class_ranks + panel * CLASSES + bank_class;
        const int rank = *ranks + __popc(alike & lanes_below);
        __syncwarp();
        if (filled && alike >> lane == 1) *ranks = rank + 1;  // the last lane of its kind
        __syncwarp();
        if (!filled) continue;

        // its slot, and its pair
        const int places = 2 * (ONE_PANEL ? to.total_rounds : shared.panel_rounds[panel]);
        const unsigned short* counts =
            shared.class_counts + (to.group * job.num_panels + panel) * CLASSES;
        const int place = rank < places ? place_in_rounds(bank_class, rank)
                                        : spill_place(counts, places, bank_class, rank);
        if (to.into_patch) {
            const int start = ONE_PANEL ? 0 : shared.panel_patch[panel] * ROUND_HALVES;
            patch[start + place] = word >> 16;
            patch[start + place + CODE_HALVES] = word;
        } else {
            unsigned short* slot = to.slots + (panel * slice + place);
            slot[0] = word >> 16, slot[CODE_HALVES] = word;
        }
        place_pair(shared, to.pairs, to.group * GROUP + (word >> COLUMN_BITS & 7),
                   panel * job.panel_rows + (word & COLUMN_MASK),
                   to.first_half + panel * slice + place);
    }
}

template <bool ONE_PANEL>
__device__ __forceinline__ void place_group(const Job& job, const Shared& shared, int group,
                                            int lane) {
    const GroupState state = shared.groups[group];
    const int q = (job.first_token / GROUP + group) * job.num_panels;
    const int total_rounds = lay_rounds(job, shared, group, q, lane);
#pragma unroll 1
    for (int i = lane; i < job.num_panels * CLASSES; i += 32) shared.class_ranks[i] = 0;
    __syncwarp();
    uint4* records =
        settle(job.rounds + static_cast<long long>(q) * job.group_rounds * ROUND_RECORDS);
    uint4* patch = reinterpret_cast<uint4*>(shared.patch);
    const bool into_patch = state.staged_at >= 0 && total_rounds <= kPatchRounds;

    // pads first, pairs over them
    if (into_patch) {
        pad_rounds(patch, total_rounds, lane);
    } else {
#pragma unroll 1
        for (int panel = 0; panel < job.num_panels; ++panel)
            pad_rounds(records + panel * job.group_rounds * ROUND_RECORDS,
                       shared.panel_rounds[panel], lane);
    }
    __syncwarp();
    const Placing to{group,
                     static_cast<unsigned>(q) * job.group_rounds * ROUND_HALVES,
                     total_rounds,
                     reinterpret_cast<unsigned short*>(records),
                     settle(job.pairs),
                     into_patch};
    const bool staged = state.staged_at >= 0;
    const Entries window = staged ? on_stage(shared, state.staged_at) : in_patch(shared);
    int share = 0, end = 0;
    if (!staged) {
        bool unfit;
        share = count_tiles(job, group, lane, unfit);
        if (state.heavy_lanes >> lane & 1) share = 0;
        end = scan_warp(share, lane);
    }
    const int size = staged ? state.num_entries : kWindow;
#pragma unroll 1
    for (int start = 0; start < state.num_entries; start += size) {
        const int stop = min(start + size, state.num_entries);
        if (!staged) {
            locate_entries(job, group, lane, end - share, share, start, stop, window.words);
            __syncwarp();
            fetch_entries<ONE_PANEL>(job, group, lane, window, stop - start,
                                     [](unsigned, unsigned, unsigned) {});
            __syncwarp();
        }
        place_entries<ONE_PANEL>(job, shared, to, lane, window, stop - start);
        __syncwarp();
    }

    // from the patch, whole records
    if (into_patch) {
#pragma unroll 1
        for (int panel = 0; panel < job.num_panels; ++panel) {
            const uint4* from = patch + shared.panel_patch[panel] * ROUND_RECORDS;
            uint4* to = records + panel * job.group_rounds * ROUND_RECORDS;
            const int num_records = shared.panel_rounds[panel] * ROUND_RECORDS;
#pragma unroll 1
            for (int i = lane; i < num_records; i += 32) to[i] = from[i];
        }
        __syncwarp();
    }
}

template <bool ONE_PANEL>
__device__ __forceinline__ void plan_tile(Job job, unsigned char* memory, int tile_tokens,
                                          int* pair_start) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    if (ONE_PANEL) job.num_panels = 1;
    const Shared shared =
        lay_out_shared(memory, job.num_neuron_groups(), tile_tokens / GROUP, job.num_panels);
    prefetch_counts(job);
    clear(job, shared);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        count_group<ONE_PANEL>(job, shared, group, lane);
    __syncthreads();
    start_neuron_groups(job, shared, warp, lane, pair_start);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        place_group<ONE_PANEL>(job, shared, group, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    plan(const int* counts, const int* entries, int M, int N, int S, int cap, int tile_tokens,
         int panel_rows, int num_panels, int group_rounds, int* num_rounds, uint4* rounds,
         int* pair_start, uint2* pairs, int* heavy_rows, int* heavy_count) {
    extern __shared__ uint4 dynamic_memory[];
    unsigned char* memory = reinterpret_cast<unsigned char*>(dynamic_memory);
    const int tile = blockIdx.x, first_token = tile * tile_tokens;
    const int num_tiles = (N + TILE - 1) / TILE;
    const long long first_cell = static_cast<long long>(first_token) * num_tiles;
    const Job job{counts + first_cell,
                  entries + first_cell * S,
                  first_token,
                  min(tile_tokens, M - first_token),
                  N,
                  num_tiles,
                  S,
                  cap,
                  panel_rows,
                  num_panels,
                  group_rounds,
                  0xffffffffu / panel_rows + 1,
                  num_rounds,
                  rounds,
                  pairs + static_cast<long long>(tile) * tile_tokens * cap,
                  heavy_rows,
                  heavy_count};
    int* tile_start = pair_start + static_cast<long long>(tile) * (job.num_neuron_groups() + 1);
    if (num_panels == 1)
        plan_tile<true>(job, memory, tile_tokens, tile_start);
    else
        plan_tile<false>(job, memory, tile_tokens, tile_start);
}
