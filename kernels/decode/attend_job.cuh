// What a block of `attend` is given, its lanes, and batches of positions out of the cache. See
// attend.cuh.
#pragma once
#include "spec.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"

namespace {

constexpr int kPage = spec::PAGE;
constexpr int kLoads = spec::ATTEND_LOADS;  // of keys, and of values, that a lane has under way
constexpr int kFetched = 3;                 // a warp's batches, that are in L2 before they are read
constexpr float kLog2E = 1.44269504f;

struct Job {
    const unsigned short* qkv;
    const int *positions, *tables;
    int table_stride, width;
    const unsigned short *cos, *sin;
    int columns, half;  // of a head, up to DIM; in half of what is turned of it
    const unsigned short *q_norm, *k_norm;
    float eps;
    unsigned short *keys, *values;
    int num_kv_heads, sharing, window;  // sharing: heads of q to one of k and v
    int whole_batches, split_batches;
    int new_is_cached;  // the new tokens' k and v, by the kernel in front
    float scale, cap;   // of scores; 0: they are not capped
    float* parts;
    unsigned* tickets;
    unsigned* out;
};

template <int DIM>
struct Shape {
    static constexpr int EIGHTS = DIM / 8;                                // of a head
    static constexpr int LANES = EIGHTS > 16 ? 32 : EIGHTS > 8 ? 16 : 8;  // of a position
    static constexpr int GROUPS = 32 / LANES;                             // positions side by side
    static constexpr int BATCH = GROUPS * kLoads;                         // positions
    static_assert(DIM % 16 == 0 && EIGHTS <= LANES, "no such head");
    static_assert(kPage % BATCH == 0, "a batch lies in one page");
};

// Which lane this is: eight `eight` of the head of position `group` of those side by side.
template <int DIM>
struct Lane {
    int eight, group;
    bool used;  // if DIM is no power of two, some lanes have no eight

    __device__ __forceinline__ explicit Lane(int lane)
        : eight(lane % Shape<DIM>::LANES), group(lane / Shape<DIM>::LANES),
          used(eight < Shape<DIM>::EIGHTS) {}
};

// What of the heads this block has.
struct Heads {
    int kv, first, num;  // of q: first .. first + num
    bool is_first;       // of the blocks that share the head of k and v
};

__device__ __forceinline__ Heads heads_of_block(const Job& job, int heads) {
    int kv = blockIdx.x, before = 0;  // heads of q that other blocks have
    for (; kv >= job.num_kv_heads; kv -= job.num_kv_heads) before += heads;
    return {kv, kv * job.sharing + before, min(heads, job.sharing - before), before == 0};
}

// ---- batches of positions

// What of a row counts: positions start .. position, in batches first .. last.
struct Range {
    int start, position, first, last;
};

template <int DIM>
__device__ __forceinline__ Range range_of_row(const Job& job, int position) {
    constexpr int BATCH = Shape<DIM>::BATCH;
    position = max(position, 0);  // of a row that fills up a batch
    const int start = job.window > 0 ? max(0, position - job.window + 1) : 0;
    return {start, position, start / BATCH, position / BATCH};
}

// Whether no token of this launch is in batch `at`: a row's tokens stand one behind the other.
template <int DIM>
__device__ __forceinline__ bool is_old(const Range& range, int at) {
    return (at + 1) * Shape<DIM>::BATCH + spec::MOST_QUERIES <= range.position + 1;
}

// How the row's batches are shared out.
struct Split {
    int num;       // of splits that the row uses
    int step;      // warps of all of them
    bool has_new;  // the new token's batch is this block's
};

__device__ __forceinline__ bool is_whole(const Job& job, const Range& range) {
    return range.last - range.first < static_cast<int>(blockDim.x / 32) * job.whole_batches;
}

__device__ __forceinline__ Split split_of_block(const Job& job, const Range& range) {
    const int num_warps = blockDim.x / 32;
    if (gridDim.z == 1 || is_whole(job, range)) return {1, num_warps, true};
    const int of_split = num_warps * job.split_batches;
    const int wanted = (range.last - range.first + of_split) / of_split;
    const int num = min(wanted, static_cast<int>(gridDim.z)), step = num * num_warps;
    const int owner = (range.last - range.first) % step - blockIdx.z * num_warps;
    return {num, step, owner >= 0 && owner < num_warps};
}

// Where a position's head begins, in elements.
template <int DIM>
__device__ __forceinline__ long long place_in_cache(const Job& job, int page, int kv_head,
                                                    int position) {
    const long long head = static_cast<long long>(page) * job.num_kv_heads + kv_head;
    return (head * kPage + position % kPage) * DIM;
}

// Batch `at` of what begins at `from`. Positions that do not count leave what was there before: it
// is weighted by 0, and finite, since it was cached for positions that count.
template <int DIM>
__device__ __forceinline__ void load_batch(uint4 (&to)[kLoads], const unsigned short* from,
                                           const Range& range, int at, const Lane<DIM>& lane) {
    using S = Shape<DIM>;
    from = opaque(from + lane.group * DIM + lane.eight * 8);
    const int first = at * S::BATCH + lane.group - range.start;
    const unsigned cached = lane.used ? range.position - range.start : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        load_streamed_if(static_cast<unsigned>(first + i * S::GROUPS) < cached,
                         from + i * S::GROUPS * DIM, to[i]);
}

// The warp's batches from `at` on, into L2, while the kernel in front runs.
template <int DIM>
__device__ __forceinline__ void fetch_batches(const Job& job, const int* table, int kv_head,
                                              const Range& range, int at, int step) {
    using S = Shape<DIM>;
    constexpr int LINE = 64;
    const int column = threadIdx.x % 32 * LINE;
    if (column >= S::BATCH * DIM) return;
#pragma unroll 1
    for (int i = 0; i < kFetched && is_old<DIM>(range, at); ++i, at += step) {
        const int page = __ldg(table + at * S::BATCH / kPage);
        const long long place = place_in_cache<DIM>(job, page, kv_head, at * S::BATCH) + column;
        prefetch_into_l2(job.keys + place);
        prefetch_into_l2(job.values + place);
    }
}

// The new token's eight, if it is one of the lane's.
template <int DIM>
__device__ __forceinline__ void put_new(uint4 (&to)[kLoads], const uint4* eights,
                                        const Range& range, const Lane<DIM>& lane) {
    using S = Shape<DIM>;
    const int first = range.last * S::BATCH + lane.group;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (lane.used && first + i * S::GROUPS == range.position) to[i] = eights[lane.eight];
}

// ---- shared memory

template <int DIM, int HEADS>
struct Shared {
    float* q;                // [HEADS][DIM], times scale log2(e)
    uint4 *key, *value;      // [DIM / 8]
    float* sums;             // [warps][HEADS][DIM]
    float *largest, *total;  // [warps][HEADS]

    __device__ __forceinline__ explicit Shared(float* memory, int num_warps) {
        q = memory;
        key = reinterpret_cast<uint4*>(q + HEADS * DIM);
        value = key + DIM / 8;
        sums = reinterpret_cast<float*>(value + DIM / 8);
        largest = sums + num_warps * HEADS * DIM;
        total = largest + num_warps * HEADS;
    }
};

}  // namespace
