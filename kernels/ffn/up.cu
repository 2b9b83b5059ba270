// up: for each pair (token, neuron that fired) the dot product of the token's x and the neuron's
// row of W_up, in parts over ranges of K. `hidden` adds them up.
//
// x stays and the weights pass by. A block has a tile of tokens and a range of K. It goes through
// the range in steps of two slabs of 64 columns: the tile's slabs of x lie in shared memory, each
// [tile_tokens][64], and each warp takes every 16th group of 8 neurons. Of a group it fetches the
// weights straight into the layout of the mma's b, and for 16 pairs at a time their rows of x as a:
//
//     sums [16 pairs, 8 neurons] = x [16 pairs, 64] W_up[8 neurons, 64]^T
//
// Of a pair's 8 sums one is wanted. Tensor cores have that to spare; shared memory has not, and it
// is read 128 bytes a pair and slab, nothing twice. Weights cost N K 2 / tile_tokens bytes of L2 a
// token, records and sums 12 bytes a pair and step: so tiles and steps fill shared memory, and
// between two steps, every 100 thousand clocks, the block waits for x out of L2. A second pair of
// buffers would hide that, and halve the tile.
//
// A slab's row is 128 bytes, its 16-byte chunk c at place c ^ (row & 7). Thread t of a quad reads
// chunks t and t + 4, so that its columns of K are not those the mma names; a and b agree, and the
// order of a sum's terms is free. Eight lanes read two rows at once, without conflict if bit 2 of
// the rows differs: that is why `plan` alternates tokens 0-3 and 4-7 of their groups.
//
// pair_start, pairs: see plan.cu. partial float32 [Q, partial_stride], in the order of pairs; only
// the warp that owns a neuron group touches its sums, step after step, so they do not depend on
// time.
//
// Launch: blocks of 512 threads, grid (tiles, Q, neuron ranges), Q = ceil(K / 64 /
// slabs_per_range). Dynamic shared memory: 2 * tile_tokens * 128 bytes; with tile_tokens * 128
// only, steps are of one slab. K a multiple of 64, tile_tokens of 8, cap * tile_tokens below 2^31.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/lists.cuh"

namespace {

constexpr int kThreads = spec::UP_BLOCK, kWarps = kThreads / 32;
constexpr int kSlab = spec::SLAB;     // columns of K
constexpr int kRowBytes = 2 * kSlab;  // of a slab
constexpr int kBlock = 32;  // pairs that a warp computes at a time, 8 for each of 4 places

// Pairs of one neuron group, to be computed in the slabs of one step.
struct Work {
    int slab, neuron_group;  // slab: the first one
    int first, last;         // pairs of the tile
};

// The work of a warp: its neuron groups that have pairs, step after step. Each lane looks at one of
// the next 32 groups, and has the bounds of the 32 behind under way.
struct WorkQueue {
    const int* pair_start;
    int begin, end, slab_end, step, lane;
    int slab, base, first, last;  // of the 32 groups at hand
    unsigned left;                // lanes whose group is still to come
    int ahead_slab, ahead_base, ahead_first, ahead_last;

    __device__ __forceinline__ WorkQueue(const int* pair_start, int begin, int end, int slab,
                                         int slab_end, int step, int lane)
        : pair_start(pair_start), begin(begin), end(end), slab_end(slab_end), step(step),
          lane(lane), slab(slab), base(begin), first(0), last(0), left(0), ahead_slab(slab),
          ahead_base(begin) {
        if (begin >= end) ahead_slab = slab_end;
        look_ahead();
    }

    __device__ __forceinline__ void look_ahead() {
        const int group = ahead_base + kWarps * lane;
        const bool any = group < end && ahead_slab < slab_end;
        ahead_first = any ? __ldg(pair_start + group) : 0;
        ahead_last = any ? __ldg(pair_start + group + 1) : 0;
    }

    __device__ __forceinline__ Work next() {
        while (left == 0) {
            slab = ahead_slab, base = ahead_base, first = ahead_first, last = ahead_last;
            if (slab >= slab_end) return {slab, 0, 0, 0};
            left = __ballot_sync(~0u, last > first);
            ahead_base += kWarps * 32;
            if (ahead_base >= end) ahead_base = begin, ahead_slab += step;
            look_ahead();
        }
        const int from = __ffs(left) - 1;
        left &= left - 1;
        return {slab, base + kWarps * from, __shfl_sync(~0u, first, from),
                __shfl_sync(~0u, last, from)};
    }
};

// Starts copying slabs of the tile's x.
__device__ __forceinline__ void fetch_slabs(unsigned to, int slab_bytes, const unsigned short* x,
                                            int num_tokens, int K, int slab, int end) {
    const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;
    to += first * kRowBytes + ((chunk ^ (first & 7)) << 4);
    const unsigned short* from = x + static_cast<long long>(first) * K + slab * kSlab + chunk * 8;
    const bool two = slab + 1 < end;
#pragma unroll 2
    for (int row = first; row < num_tokens; row += kThreads / 8) {
        copy_async(to, from);
        if (two) copy_async(to + slab_bytes, from + kSlab);
        to += kThreads / 8 * kRowBytes;
        from += static_cast<long long>(kThreads / 8) * K;
    }
    commit_copies();
}

__device__ __forceinline__ void prefetch_slabs(const unsigned short* x, int num_tokens, int K,
                                               int slab, int end) {
    for (; slab < end; ++slab)
        for (int row = threadIdx.x; row < num_tokens; row += kThreads)
            prefetch_into_l2(x + static_cast<long long>(row) * K + slab * kSlab);
}

// Of the lane's neuron, columns of the lane's two chunks, in both slabs of a step.
struct Weights {
    uint4 low[2], high[2];
};

// Into `weights`; `lane_columns`: the lane's first chunk of neuron 0 in slab 0. Steps have a second
// slab below `second_end`.
__device__ __forceinline__ void load_weights(Weights& weights, const unsigned short* lane_columns,
                                             int N, int K, const Work& work, int second_end,
                                             int quad) {
    const int neuron = min(work.neuron_group * NEURONS + quad, N - 1);
    const uint4* from = reinterpret_cast<const uint4*>(
        lane_columns + static_cast<long long>(neuron) * K + work.slab * kSlab);
    if (work.last == 0) return;
    weights.low[0] = load_streamed(from), weights.high[0] = load_streamed(from + 4);
    if (work.slab + 1 < second_end)
        weights.low[1] = load_streamed(from + 8), weights.high[1] = load_streamed(from + 12);
}

// Token and column of the quad's pairs, 8 apart; there are `num` from the first quad's on.
__device__ __forceinline__ void load_codes(unsigned (&codes)[4], const unsigned* quad_pairs,
                                           int num, int quad) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        load_constant_word_if(8 * i + quad < num, quad_pairs + 8 * i, codes[i]);
}

// Of the pairs at hand, what the lane reads of their rows.
struct Rows {
    uint4 low[4], high[4];
};

// Sixteen pairs, of which the lane has a row in each half, against eight neurons: what a chunk of
// 16 bytes holds of each.
__device__ __forceinline__ void multiply(float (&sums)[4], const uint4& a, const uint4& a8,
                                         const uint4& weights) {
    multiply_add(sums, a.x, a8.x, a.y, a8.y, weights.x, weights.y);
    multiply_add(sums, a.z, a8.z, a.w, a8.w, weights.z, weights.w);
}

// What a warp computes with, the same for all of its work in a step.
struct Step {
    unsigned slabs;  // address
    int slab_bytes;
    bool two_slabs, add;  // add: to the sums that are there
};

// Up to 8 * PLACES pairs of one neuron group. Returns in thread t of a quad the sum of the quad's
// pair in place t. Rows of pairs that there are not keep what they held: no other sum depends on
// them.
template <int PLACES>
__device__ __forceinline__ float dot_pairs(const Step& step, const unsigned (&codes)[4],
                                           const Weights& weights, Rows& rows, int num, int quad,
                                           int t) {
    unsigned at[PLACES];
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
        const unsigned row = scale_and_add(codes[i] & 0xffff, kRowBytes, step.slabs);
        at[i] = scale_and_add((codes[i] ^ t) & 7, 16, row);
    }
    float sums[PLACES / 2][4] = {};
#pragma unroll
    for (int slab = 0; slab < 2; ++slab) {
        if (slab == 1 && !step.two_slabs) break;
#pragma unroll
        for (int i = 0; i < PLACES; ++i) {
            load_shared_if(8 * i + quad < num, at[i], rows.low[i]);
            load_shared_if(8 * i + quad < num, at[i] ^ 64, rows.high[i]);
            at[i] += step.slab_bytes;
        }
#pragma unroll
        for (int i = 0; i < PLACES; i += 2) {
            multiply(sums[i / 2], rows.low[i], rows.low[i + 1], weights.low[slab]);
            multiply(sums[i / 2], rows.high[i], rows.high[i + 1], weights.high[slab]);
        }
    }

    // of a pair's sums, the one of its neuron: from whichever of the quad's threads has it
    float own[PLACES];
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
        const float (&both)[4] = sums[i / 2];
        const float sum = codes[i] & 1 << 16 ? both[i % 2 * 2 + 1] : both[i % 2 * 2];
        own[i] = __shfl_sync(~0u, sum, codes[i] >> 17, 4);
    }
    const float first = t & 1 ? own[1] : own[0];
    return PLACES == 4 && t & 2 ? (t & 1 ? own[PLACES - 1] : own[PLACES - 2]) : first;
}

// All pairs of `work`. `codes` are those of its first pairs, and then of the next work's.
// lane_sums: of the quad's pair in place t.
__device__ __forceinline__ void compute_work(const Step& step, const Work& work, const Work& next,
                                             unsigned (&codes)[4], const Weights& weights,
                                             Rows& rows, const unsigned* quad_pairs,
                                             float* lane_sums, int quad, int t) {
    int first = work.first, num = work.last - work.first;
    do {
        // codes of the pairs behind are on their way meanwhile
        const bool more = num > kBlock;
        const int behind = more ? first + kBlock : next.first;
        const int num_behind = more ? num - kBlock : next.last - next.first;
        unsigned codes_behind[4];
        load_codes(codes_behind, quad_pairs + behind, num_behind, quad);

        const float sum = num > 16 ? dot_pairs<4>(step, codes, weights, rows, num, quad, t)
                                   : dot_pairs<2>(step, codes, weights, rows, num, quad, t);
        if (8 * t + quad < num) {
            if (step.add)
                add_to(lane_sums + first, sum);
            else
                lane_sums[first] = sum;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = codes_behind[i];
        first += kBlock, num -= kBlock;
    } while (num > 0);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    up(const unsigned short* x, const unsigned short* w_up, int M, int N, int K, int tile_tokens,
       int cap, int slabs_per_range, const int* pair_start, const unsigned* pairs, float* partial,
       long long partial_stride) {
    extern __shared__ __align__(128) uint4 slabs[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int quad = lane >> 2, t = lane & 3;

    // the block's tokens, slabs and neurons
    const int tile = blockIdx.x, first_token = tile * tile_tokens;
    const int num_tokens = min(tile_tokens, M - first_token);
    const int slab_begin = blockIdx.y * slabs_per_range;
    const int slab_end = min(slab_begin + slabs_per_range, K / kSlab);
    const int num_neuron_groups = (N + NEURONS - 1) / NEURONS;
    const int range = (num_neuron_groups + gridDim.z - 1) / gridDim.z;
    const int range_begin = blockIdx.z * range;
    const int range_end = min(range_begin + range, num_neuron_groups);
    const long long first_pair = static_cast<long long>(tile) * tile_tokens * cap;
    x += static_cast<long long>(first_token) * K;
    pair_start += static_cast<long long>(tile) * (num_neuron_groups + 1);
    const unsigned* quad_pairs = opaque(pairs + first_pair + quad);
    float* lane_sums = opaque(partial + blockIdx.y * partial_stride + first_pair + 8 * t + quad);
    const unsigned short* lane_columns = opaque(w_up + 8 * t);

    // the first slabs, and what the first work needs
    const int slab_bytes = tile_tokens * kRowBytes;
    const int slabs_a_step = dynamic_smem_bytes() >= 2 * slab_bytes ? 2 : 1;
    Step step = {smem_address(slabs), slab_bytes, false, false};
    fetch_slabs(step.slabs, slab_bytes, x, num_tokens, K, slab_begin,
                min(slab_begin + slabs_a_step, slab_end));
    WorkQueue queue(pair_start, range_begin + warp, range_end, slab_begin, slab_end, slabs_a_step,
                    lane);
    Work work = queue.next();
    Weights weights;
    Rows rows;
    unsigned codes[4];
    const int second_end = slabs_a_step == 2 ? slab_end : 0;
    load_weights(weights, lane_columns, N, K, work, second_end, quad);
    load_codes(codes, quad_pairs + work.first, work.last - work.first, quad);

    for (int slab = slab_begin; slab < slab_end; slab += slabs_a_step) {
        // the step's slabs are there; those of the next one come into L2 meanwhile
        const int next_slab = slab + slabs_a_step;
        const int next_end = min(next_slab + slabs_a_step, slab_end);
        wait_for_copies<0>();
        __syncthreads();
        prefetch_slabs(x, num_tokens, K, next_slab, next_end);
        step.two_slabs = min(next_slab, slab_end) - slab == 2;

        while (work.slab == slab) {
            const Work next = queue.next();
            Weights next_weights;
            load_weights(next_weights, lane_columns, N, K, next, second_end, quad);
            compute_work(step, work, next, codes, weights, rows, quad_pairs, lane_sums, quad, t);
            work = next, weights = next_weights;
        }
        step.add = true;
        if (next_slab < slab_end) {
            __syncthreads();
            fetch_slabs(step.slabs, slab_bytes, x, num_tokens, K, next_slab, next_end);
        }
    }
}
