// plan_cluster: from the packed gate of a tile of tokens, the lists that `up`, `hidden` and `down`
// walk.
//
// A pair is a (token, neuron that fired). `up` wants all pairs of one neuron, `down` all pairs of
// few tokens: every pair is listed twice, and a link leads from down's list into the one of `up`.
// Rows that the sparse way does not suit go to heavy_rows instead, and have no pairs: a tile
// overflowed (count > S) or is not finite (NOT_FINITE in a count), or more than `most` neurons
// fired; and of a group of 8 that has no room for its pairs, 8 * cap, the rows with most of them,
// earlier ones first, until the rest fits.
//
// For down, each (group of 8 tokens, panel of columns), q = group * num_panels + panel:
//   num_rounds int32 [Q], rounds [Q, group_rounds] of 64 bytes, 16 slots each (tile/lists.cuh)
//   links uint32 [Q, group_rounds, 16]: of each slot, in the order in which they lie in a round,
//   the place of its pair in `pairs`; NO_LINK without one
//   There are ceil(pairs / 16) rounds. Slot s prefers columns of class s & 7: then the eight rows
//   that one ldmatrix phase reads lie in different banks. The i-th pair of a class (in the order of
//   rows, lanes, tiles, slots, never of time) takes place i of its class; pairs that find no more
//   places of their class take free ones of other classes, in order. The rest of the slots are
//   pads: PAD, token 0, the first column of the slot's class.
// For up, each tile of tokens:
//   pair_start int32 [tiles, NG + 1]
//   pairs uint32 [tiles, tile_tokens * cap] of token in tile | column << 16
//   The 8 neurons of group ng have the pairs pair_start[ng] to pair_start[ng + 1]. There, tokens
//   0-3 and 4-7 of their groups alternate while there are both; else the order is free and may
//   differ from run to run.
//
// group_rounds >= ceil(c / 2) for any c >= min(cap, panel_rows).
//
// A tile is planned by a cluster of eight blocks, each with an equal share of the tile's groups.
// Three phases with barriers between: count (each warp its groups), start (where the pairs of each
// neuron group begin, and those of this block: a prefix sum that each block makes for itself),
// place (each warp its groups). Count leaves the entries that it fetched on a stage in shared
// memory. Place first makes a map of which entry each slot takes and then goes by the slots, so
// that memory is written in order; groups that do not fit on the stage or in the map are fetched
// again, window by window, and go to their slots one by one.
//
// Launch: 8 blocks a tile of tokens, of 512 threads, from sm_90 on.
// Dynamic shared memory, NG = ceil(N / 8), P panels, G = ceil(tile_tokens / 8 / 8):
//   least  16 * NG + (12 + 16 * P) * G + (40 * P + 3072) * warps + 256 bytes
//   stage  what there is beyond: 4 bytes a pair, 5 if P > 1; best if the pairs of a block fit
// Limits: N a multiple of 8 up to 65536 (NG 8192), S up to 256, panel_rows a multiple of 8 up to
// 8192, P up to 256, tile_tokens a multiple of 8 up to 1024. counts, entries and heavy_count (0)
// are those of `gate_pack`; the order of entries within a tile does not matter.
#include "spec.cuh"
#include "ffn/plan_place.cuh"
#include "ffn/plan_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/lists.cuh"
#include "tile/warp.cuh"

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
    for (int i = threadIdx.x; i < job.num_neuron_groups(); i += blockDim.x) shared.counted[i] = 0;
    if (threadIdx.x == 0) *shared.num_staged = 0;
}

__device__ __forceinline__ void list_heavy_rows(const Job& job, int group, int lane, bool heavy) {
    const unsigned rows = __ballot_sync(~0u, heavy && lane % 4 == 0);
    if (rows == 0) return;
    int first = 0;
    if (lane == 0) first = atomicAdd(job.heavy_count, __popc(rows));
    first = __shfl_sync(~0u, first, 0);
    if (rows >> lane & 1) {
        const int rank = num_set_below(rows, lane);
        job.heavy_rows[first + rank] = job.first_token + group * GROUP + lane / 4;
    }
}

// The rows' greatest value, of each row the same in four lanes.
__device__ __forceinline__ int greatest(int value) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// Whether the lane's row is among those that leave, so that the rest finds room for its pairs;
// `nnz` is the row's, 0 if it has left already.
__device__ __forceinline__ bool leaves(int nnz, int room, int lane) {
    bool gone = false;
#pragma unroll 1
    while (true) {
        int total = nnz;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        if (total <= room) return gone;
        const unsigned largest = __ballot_sync(~0u, nnz == greatest(nnz));
        if (lane / 4 == (__ffs(largest) - 1) / 4) nnz = 0, gone = true;
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
    bool heavy = (unfit_lanes >> (lane & 28) & 15) != 0 || nnz > job.most;
    heavy |= leaves(heavy ? 0 : nnz, GROUP * job.cap, lane);
    const unsigned heavy_lanes = __ballot_sync(~0u, heavy);
    list_heavy_rows(job, group, lane, heavy);
    if (heavy) share = 0;

    // where the entries go
    const int end = scan_warp(share, lane);
    const int num_entries = __shfl_sync(~0u, end, 31);
    const int staged_at = reserve_stage(shared, num_entries, lane);
    if (lane == 0) shared.groups[group] = {num_entries, staged_at, heavy_lanes};
    const int classes = job.num_panels * CLASSES;
    if (!ONE_PANEL) {
#pragma unroll 1
        for (int i = lane; i < classes; i += 32) shared.class_ranks[i] = 0;
    }

    // pairs of each neuron group and of each class
    const Entries window = staged_at >= 0 ? on_stage(shared, staged_at) : in_map(shared);
    const int size = staged_at >= 0 ? num_entries : kWindow;
    int of_class = 0;  // of the lane's number
#pragma unroll 1
    for (int start = 0; start < num_entries; start += size) {
        const int stop = min(start + size, num_entries);
        locate_entries(job, group, lane, end - share, share, start, stop, window.words);
        __syncwarp();
        fetch_entries<ONE_PANEL, 8>(
            job, group, lane, window, stop - start,
            [&](unsigned column, unsigned row, unsigned panel) {
                atomicAdd(&shared.counted[column / NEURONS], row < 4 ? 1u : 0x10000u);
                if (!ONE_PANEL)
                    atomicAdd(&shared.class_ranks[panel * CLASSES + column % CLASSES], 1);
            });
        __syncwarp();
        if (ONE_PANEL) {
#pragma unroll 2
            for (int i = lane; i - lane < stop - start; i += 32) {
                const bool filled = i < stop - start;
                const unsigned word = filled ? window.words[i] : 0;
                of_class += __popc(lanes_of_class(filled, word % CLASSES, lane));
            }
            __syncwarp();
        }
    }
    if (ONE_PANEL) {
        if (lane < CLASSES) shared.class_counts[group * CLASSES + lane] = of_class;
    } else {
#pragma unroll 1
        for (int i = lane; i < classes; i += 32)
            shared.class_counts[group * classes + i] = shared.class_ranks[i];
    }
}

// ---- second phase: start

// The first pair of each neuron group, and the ranks with which this block begins there. Each warp
// has a run of neuron groups. Ends after the last look into other blocks.
__device__ __forceinline__ void start_neuron_groups(const Job& job, const Shared& shared, int part,
                                                    int warp, int lane, int* pair_start) {
    const int num = job.num_neuron_groups();
    const int num_threads = blockDim.x;
    const int run = (num + num_threads - 1) / num_threads * 32;
    const int stop = min((warp + 1) * run, num);
    int sum = 0;
#pragma unroll 1
    for (int i = warp * run + lane; i < stop; i += 32) {
        unsigned pairs = 0, below = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const unsigned counted =
                load_cluster_word(address_in_block(smem_address(shared.counted + i), p));
            pairs += counted;
            below += p < part ? counted : 0;
        }
        shared.neuron_start[i].x = pairs;
        shared.ranks[i] = below;
        sum += (pairs & 0xffff) + (pairs >> 16);
    }
    sum = scan_warp(sum, lane);
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();
    cluster_arrive();

    const int below = scan_warp(lane < warp ? shared.warp_sums[lane] : 0, lane);
    int first = __shfl_sync(~0u, below, 31);
#pragma unroll 1
    for (int start = warp * run; start < stop; start += 32) {
        const int i = start + lane;
        const unsigned pairs = i < stop ? shared.neuron_start[i].x : 0;
        const int low = pairs & 0xffff, high = pairs >> 16;
        const int end = scan_warp(low + high, lane);
        if (i < stop) {
            const int at = first + end - low - high;
            shared.neuron_start[i] = make_int2(at, min(low, high));
            if (part == 0) pair_start[i] = at;
        }
        first += __shfl_sync(~0u, end, 31);
    }
    if (part == 0 && warp == num_threads / 32 - 1 && lane == 0) pair_start[num] = first;
}

// ---- all phases

template <bool ONE_PANEL>
__device__ __forceinline__ void plan_part(Job job, unsigned char* memory, int num_groups, int part,
                                          int* pair_start) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    if (ONE_PANEL) job.num_panels = 1;
    const Shared shared =
        lay_out_shared(memory, job.num_neuron_groups(), num_groups, job.num_panels);
    prefetch_counts(job);
    clear(job, shared);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        count_group<ONE_PANEL>(job, shared, group, lane);
    __syncthreads();
    cluster_arrive();
    cluster_wait();
    start_neuron_groups(job, shared, part, warp, lane, pair_start);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        place_group<ONE_PANEL>(job, shared, group, lane);
    __syncwarp();
    cluster_wait();  // until no other block looks into this one
}

__device__ __forceinline__ void plan_tile(const int* counts, const int* entries, int M, int N,
                                          int S, int cap, int most, int tile_tokens, int panel_rows,
                                          int num_panels, int group_rounds, int* num_rounds,
                                          uint4* rounds, uint4* links, int* pair_start,
                                          unsigned* pairs, int* heavy_rows, int* heavy_count,
                                          unsigned char* memory) {
    const int part = cluster_rank(), tile = blockIdx.x / kParts;
    const int num_groups = (tile_tokens / GROUP + kParts - 1) / kParts;
    const int tile_end = min((tile + 1) * tile_tokens, M);
    const int token_in_tile = min(part * num_groups * GROUP, tile_tokens);
    const int first_token = tile * tile_tokens + token_in_tile;
    const int num_tiles = (N + TILE - 1) / TILE;
    const long long first_cell = static_cast<long long>(first_token) * num_tiles;
    const Job job{counts + first_cell,
                  entries + first_cell * S,
                  first_token,
                  max(0, min(num_groups * GROUP, tile_end - first_token)),
                  token_in_tile,
                  N,
                  num_tiles,
                  S,
                  cap,
                  most,
                  panel_rows,
                  num_panels,
                  group_rounds,
                  0xffffffffu / panel_rows + 1,
                  num_rounds,
                  rounds,
                  links,
                  pairs,
                  static_cast<unsigned>(tile) * tile_tokens * cap,
                  heavy_rows,
                  heavy_count};
    int* tile_start = pair_start + static_cast<long long>(tile) * (job.num_neuron_groups() + 1);
    if (num_panels == 1)
        plan_part<true>(job, memory, num_groups, part, tile_start);
    else
        plan_part<false>(job, memory, num_groups, part, tile_start);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(spec::PLAN_CLUSTER, 1, 1)
    __launch_bounds__(kClusterThreads, 2)
        plan_cluster(const int* counts, const int* entries, int M, int N, int S, int cap, int most,
                     int tile_tokens, int panel_rows, int num_panels, int group_rounds,
                     int* num_rounds, uint4* rounds, uint4* links, int* pair_start, unsigned* pairs,
                     int* heavy_rows, int* heavy_count) {
    extern __shared__ uint4 dynamic_memory[];
    plan_tile(counts, entries, M, N, S, cap, most, tile_tokens, panel_rows, num_panels,
              group_rounds, num_rounds, rounds, links, pair_start, pairs, heavy_rows, heavy_count,
              reinterpret_cast<unsigned char*>(dynamic_memory));
}
