// up: for each pair (token, neuron that fired) the dot product of the token's x and the neuron's row
// of W_up, in parts over ranges of K. hidden: from those parts h = gate * up, into the lists of `down`.
//
// x stays and the weights pass by. A block has a tile of tokens and a range of K, cut into slabs of
// 64 columns: the tile's slab of x lies in shared memory, [tile_tokens][64], and each warp takes
// every 16th group of 8 neurons. Of a group it fetches the 8 x 64 weights straight into the layout
// of the mma's b, and for 16 pairs at a time the pairs' rows of x as its a:
//
//     sums [16 pairs, 8 neurons] = x [16 pairs, 64] W_up[8 neurons, 64]^T
//
// Of a pair's 8 sums one is wanted. Tensor cores have that to spare; shared memory has not, and it
// is read 128 bytes a pair and slab, nothing twice. Weights cost N K 2 / tile_tokens bytes of L2 a
// token, records and sums 16 bytes a pair and slab: tiles as large as shared memory allows.
//
// A slab's row is 128 bytes, its 16-byte chunk c at place c ^ (row & 7). Thread t of a quad reads
// chunks t and t + 4, so that its columns of K are not those the mma names; a and b agree, and the
// order of a sum's terms is free. Eight lanes read two rows at once, without conflict if bit 2 of the
// rows differs: that is why `plan` alternates tokens 0-3 and 4-7 of their groups.
//
// pair_start, pairs: see plan.cu. partial float32 [Q, partial_stride], in the order of pairs; only
// the warp that owns a neuron group touches its sums, slab after slab, so they do not depend on time.
//
// Launch of up: blocks of 512 threads, grid (tiles, Q, neuron ranges), Q = ceil(K / 64 /
// slabs_per_range). Dynamic shared memory: 2 * tile_tokens * 128 bytes; with tile_tokens * 128 only, a
// slab is fetched between two others instead of behind the one before. K a multiple of 64,
// tile_tokens of 8, cap * tile_tokens below 2^31.
// Launch of hidden: blocks of 256 threads, grid (tiles, any).
#include "twell_lists.cuh"
#include "round_masks.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kSlab = 64;       // columns of K
constexpr int kRowBytes = 128;  // of a slab
constexpr int kBlock = 32;      // pairs that a warp computes at a time, 8 for each of 4 places

// Pairs of one neuron group, to be computed in one slab.
struct Work {
    int slab, neuron_group;
    int first, last;  // pairs of the tile
};

// The work of a warp: its neuron groups that have pairs, slab after slab. Each lane looks at one of
// the next 32 groups, and has the bounds of the 32 behind under way.
struct Walk {
    const int* pair_start;
    int begin, end, slab_end, lane;
    int slab, base, first, last;  // of the 32 groups at hand
    unsigned left;                // lanes whose group is still to come
    int ahead_slab, ahead_base, ahead_first, ahead_last;

    __device__ __forceinline__ Walk(const int* pair_start, int begin, int end, int slab,
                                    int slab_end, int lane)
        : pair_start(pair_start), begin(begin), end(end), slab_end(slab_end), lane(lane),
          slab(slab), base(begin), first(0), last(0), left(0), ahead_slab(slab),
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
            if (slab == slab_end) return {slab, 0, 0, 0};
            left = __ballot_sync(~0u, last > first);
            ahead_base += kWarps * 32;
            if (ahead_base >= end) ahead_base = begin, ++ahead_slab;
            look_ahead();
        }
        const int from = __ffs(left) - 1;
        left &= left - 1;
        return {slab, base + kWarps * from, __shfl_sync(~0u, first, from),
                __shfl_sync(~0u, last, from)};
    }
};

// Starts copying a slab of the tile's x.
__device__ __forceinline__ void fetch_slab(unsigned to, const unsigned short* x, int num_tokens,
                                           int K, int slab) {
    const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;
    to += first * kRowBytes + ((chunk ^ (first & 7)) << 4);
    const unsigned short* from = x + static_cast<long long>(first) * K + slab * kSlab + chunk * 8;
#pragma unroll 2
    for (int row = first; row < num_tokens; row += kThreads / 8) {
        copy_async(to, from);
        to += kThreads / 8 * kRowBytes;
        from += static_cast<long long>(kThreads / 8) * K;
    }
}

__device__ __forceinline__ void prefetch_slab(const unsigned short* x, int num_tokens, int K,
                                              int slab) {
    for (int row = threadIdx.x; row < num_tokens; row += kThreads)
        prefetch_into_l2(x + static_cast<long long>(row) * K + slab * kSlab);
}

// Of the lane's neuron, columns of the lane's two chunks.
struct Weights {
    uint4 low, high;
};

// `lane_columns`: the lane's first chunk of neuron 0 in slab 0.
__device__ __forceinline__ Weights load_weights(const unsigned short* lane_columns, int N, int K,
                                                const Work& work, int quad) {
    const int neuron = min(work.neuron_group * NEURONS + quad, N - 1);
    const uint4* from = reinterpret_cast<const uint4*>(
        lane_columns + static_cast<long long>(neuron) * K + work.slab * kSlab);
    return {load_streamed(from), load_streamed(from + 4)};
}

// Token and column of the quad's pairs, 8 apart; there are `num` from the first quad's on.
__device__ __forceinline__ void load_codes(unsigned (&codes)[4], const uint2* quad_pairs, int num,
                                           int quad) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_if(8 * i + quad < num, &quad_pairs[8 * i].x, codes[i]);
}

// Sixteen pairs, of which the lane has a row in each half, against eight neurons.
__device__ __forceinline__ void multiply_rows(float (&sums)[4], const uint4& low, const uint4& low8,
                                              const uint4& high, const uint4& high8,
                                              const Weights& w) {
    multiply_add(sums, low.x, low8.x, low.y, low8.y, w.low.x, w.low.y);
    multiply_add(sums, low.z, low8.z, low.w, low8.w, w.low.z, w.low.w);
    multiply_add(sums, high.x, high8.x, high.y, high8.y, w.high.x, w.high.y);
    multiply_add(sums, high.z, high8.z, high.w, high8.w, w.high.z, w.high.w);
}

// Up to 8 * PLACES pairs of one neuron group. Returns in thread t of a quad the sum of the quad's pair
// in place t. Rows of pairs that there are not keep what they held: no other sum depends on them.
template <int PLACES>
__device__ __forceinline__ float dot_pairs(unsigned slab, const unsigned (&codes)[4],
                                           const Weights& weights, int num, int quad, int t) {
    uint4 low[PLACES], high[PLACES];
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
        const bool any = 8 * i + quad < num;
        const unsigned row = scale_and_add(codes[i] & 0xffff, kRowBytes, slab);
        const unsigned at = scale_and_add((codes[i] ^ t) & 7, 16, row);
        load_shared_if(any, at, low[i]);
        load_shared_if(any, at ^ 64, high[i]);
    }
    float sums[PLACES / 2][4] = {};
#pragma unroll
    for (int i = 0; i < PLACES; i += 2)
        multiply_rows(sums[i / 2], low[i], low[i + 1], high[i], high[i + 1], weights);

    // of a pair's sums, the one of its neuron: from whichever of the quad's threads has it
    float own[PLACES];
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
        const float(&both)[4] = sums[i / 2];
        const float sum = codes[i] & 1 << 16 ? both[i % 2 * 2 + 1] : both[i % 2 * 2];
        own[i] = __shfl_sync(~0u, sum, codes[i] >> 17, 4);
    }
    const float first = t & 1 ? own[1] : own[0];
    return PLACES == 4 && t & 2 ? (t & 1 ? own[PLACES - 1] : own[PLACES - 2]) : first;
}

// All pairs of `work` in its slab. `codes` are those of its first pairs, and then of the next work's.
// lane_sums: of the quad's pair in place t.
__device__ __forceinline__ void compute_work(unsigned slab, const Work& work, const Work& next,
                                             bool add, unsigned (&codes)[4],
                                             const Weights& weights, const uint2* quad_pairs,
                                             float* lane_sums, int quad, int t) {
    int first = work.first, num = work.last - work.first;
    do {
        // codes of the pairs behind are on their way meanwhile
        const bool more = num > kBlock;
        const int behind = more ? first + kBlock : next.first;
        const int num_behind = more ? num - kBlock : next.last - next.first;
        unsigned codes_behind[4];
        load_codes(codes_behind, quad_pairs + behind, num_behind, quad);

        const float sum = num > 16 ? dot_pairs<4>(slab, codes, weights, num, quad, t)
                                   : dot_pairs<2>(slab, codes, weights, num, quad, t);
        if (8 * t + quad < num) {
            if (add)
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
       int cap, int slabs_per_range, const int* pair_start, const uint2* pairs, float* partial,
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
    const uint2* quad_pairs = opaque(pairs + first_pair + quad);
    float* lane_sums = opaque(partial + blockIdx.y * partial_stride + first_pair + 8 * t + quad);
    const unsigned short* lane_columns = opaque(w_up + 8 * t);

    // the first slab, and what the first work needs
    const int slab_bytes = tile_tokens * kRowBytes;
    const unsigned slabs_address = smem_address(slabs);
    const bool two_slabs = dynamic_smem_bytes() >= 2 * slab_bytes;
    fetch_slab(slabs_address, x, num_tokens, K, slab_begin);
    commit_copies();
    Walk walk(pair_start, range_begin + warp, range_end, slab_begin, slab_end, lane);
    Work work = walk.next();
    Weights weights;
    unsigned codes[4];
    if (work.last > 0) weights = load_weights(lane_columns, N, K, work, quad);
    load_codes(codes, quad_pairs + work.first, work.last - work.first, quad);

    bool add = false;  // to what earlier slabs gave
    for (int slab = slab_begin; slab < slab_end; ++slab) {
        // this slab, and the next one on its way
        const int place = two_slabs ? (slab - slab_begin) & 1 : 0;
        wait_for_copies<0>();
        __syncthreads();
        if (slab + 1 < slab_end) {
            if (two_slabs)
                fetch_slab(slabs_address + (place ^ 1) * slab_bytes, x, num_tokens, K, slab + 1);
            else
                prefetch_slab(x, num_tokens, K, slab + 1);
        }
        commit_copies();
        const unsigned rows = slabs_address + place * slab_bytes;

        while (work.slab == slab) {
            const Work next = walk.next();
            Weights next_weights;
            if (next.last > 0) next_weights = load_weights(lane_columns, N, K, next, quad);
            compute_work(rows, work, next, add, codes, weights, quad_pairs, lane_sums, quad, t);
            work = next, weights = next_weights;
        }
        add = true;
        if (!two_slabs && slab + 1 < slab_end) {
            __syncthreads();
            fetch_slab(slabs_address, x, num_tokens, K, slab + 1);
            commit_copies();
        }
    }
}

// h of the tile's pairs, into the rounds.
__device__ __forceinline__ void fill_values(const float* partial, long long partial_stride, int Q,
                                            const uint2* pairs, int num_pairs,
                                            const unsigned short* b_up, unsigned short* rounds) {
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < num_pairs;
         i += gridDim.y * blockDim.x) {
        const uint2 pair = __ldg(pairs + i);
        const unsigned gate = rounds[pair.y];
        float sum = 0;
#pragma unroll 4
        for (int q = 0; q < Q; ++q) sum += partial[q * partial_stride + i];
        if (b_up) sum += bf16_value(b_up[pair.x >> 16]);
        rounds[pair.y] = bf16_bits(bf16_value(gate) * bf16_value(bf16_bits(sum)));
    }
}

// Masks of (group, panel)s, one a warp at a time.
__device__ __forceinline__ void make_masks(const int* num_rounds, const unsigned short* rounds,
                                           int group_rounds, int begin, int end, unsigned* masks) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int q = begin + blockIdx.y * warps + threadIdx.x / 32; q < end; q += gridDim.y * warps) {
        const int num = __ldg(num_rounds + q);
        const long long first = static_cast<long long>(q) * group_rounds * ROUND_HALVES;
        const uint2* codes = reinterpret_cast<const uint2*>(rounds + first) + 2 * lane + 1;
        unsigned* to = masks + static_cast<long long>(q) * batches_of(group_rounds) * BATCH_MASKS;
        for (int round = 0; round < num; round += BATCH) {
            const bool any = round + lane / ROUND_RECORDS < num;
            const uint2 code = any ? codes[round * ROUND_RECORDS * 2] : make_uint2(0, 0);
            to[round / BATCH * BATCH_MASKS + lane] = batch_mask(code, lane);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    hidden(const float* partial, long long partial_stride, int Q, const int* pair_start,
           const uint2* pairs, int M, int N, int tile_tokens, int cap, int num_panels,
           int group_rounds, const unsigned short* b_up, const int* num_rounds,
           unsigned short* rounds, unsigned* masks) {
    const int tile = blockIdx.x, num_neuron_groups = (N + NEURONS - 1) / NEURONS;
    const int num_pairs =
        pair_start[static_cast<long long>(tile) * (num_neuron_groups + 1) + num_neuron_groups];
    const long long first_pair = static_cast<long long>(tile) * tile_tokens * cap;
    const int first_group = tile * (tile_tokens / GROUP);
    const int last_group = min(first_group + tile_tokens / GROUP, (M + GROUP - 1) / GROUP);
    make_masks(num_rounds, rounds, group_rounds, first_group * num_panels, last_group * num_panels,
               masks);
    fill_values(partial + first_pair, partial_stride, Q, pairs + first_pair, num_pairs, b_up,
                rounds);
}
