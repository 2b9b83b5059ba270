// few_walk: up, h and down of few tokens, straight from a dense gate; a token is a cluster's.
//
// The blocks of a cluster share what fired for their token: each makes the list of all of it, or,
// where there are more neurons than its threads look at in one go, of its range of neurons. A
// thread has 16 bytes of a row: 8 columns of K in bf16, 16 in e4m3. Of kBatch pairs at a time it
// asks for those of each row of W_up, and at once for those of W_down, so that both are under way;
// with several ways, 2 or 4, each takes every ways-th batch by threads of its own. Both products
// are mma's (few_walk_numbers.cuh).
//
// The blocks' sums of y go to the block that owns the columns (st.async: a barrier of the cluster
// would carry a fence over all memory), which adds them up in a fixed order. Nothing overflows, no
// row is heavy: any density is exact, and NaN fires as ever. (Weights are finite: Inf or
// NaN in a row of W_down makes NaN of columns beside its own.)
//
// `walk_token` follows few_linear, behind whose wait all that came before has ended, or starts when
// the gate product has ended. So x may be read before the wait.
#pragma once

#include "spec.cuh"
#include "ffn/few_walk_numbers.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bf16.cuh"
#include "ptx/cluster.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"

namespace few_walk {

constexpr int kMostThreads = spec::FEW_WALK_BLOCK, kMostWarps = kMostThreads / 32;
constexpr int kChunks = spec::FEW_WALK_CHUNKS;  // of 8 gates, that a thread has at a time
constexpr int kWords = 4 * kChunks;
constexpr int kHeadBytes = 2 * kMostWarps * 4 + 16;  // sums of warps; a barrier
static_assert(kHeadBytes == spec::FEW_WALK_HEAD);
constexpr int kQuads = spec::FEW_WALK_QUADS;  // sums of a pair that a warp leaves

struct Sizes {
    int N, K;
    int cap;          // places of a list
    int ways, warps;  // warps of a way
    int columns;      // of y that a block owns

    // Bytes of shared memory.
    __device__ constexpr unsigned parts() const {  // of a way
        return 2 * warps * kQuads * kBatch * 4;
    }
    __device__ constexpr unsigned slots(int size) const { return 4 * size * ways * columns; }
    __device__ constexpr unsigned bytes(int size) const {
        return kHeadBytes + 8 * cap + ways * parts() + slots(size);
    }
};

// ALL: each block looks at all neurons in one go, and has every SIZEth pair. Else it has a range.
template <class Weight, bool ALL, int SIZE>
class Walk {
    using Memory = typename Weight::Memory;

  public:
    Scales scales;
    const Memory *w_up, *w_down;  // from the thread's column on
    const unsigned short* b_up;
    unsigned row_bytes, head, list, gates;  // list: neurons; gates: of each, fp32
    int num;                                // pairs of the block

    // How many of the neurons that the block looks at fired.
    __device__ __forceinline__ int make_list(const unsigned short* gate, int N, int rank) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = blockDim.x;
        const int begin = ALL ? 0 : N / 8 * rank / SIZE;
        const int end = ALL ? N / 8 : N / 8 * (rank + 1) / SIZE;
        unsigned sums = head;
        int found = 0;
#pragma unroll 1
        for (int base = begin; base < end; base += kChunks * threads) {
            const int first = base + threadIdx.x;
            uint4 eights[kChunks];
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                eights[i] = make_uint4(0, 0, 0, 0);
                load_written_if(first + i * threads < end, gate + 8 * (first + i * threads),
                                eights[i]);
            }
            unsigned words[kWords];
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                words[4 * i] = eights[i].x, words[4 * i + 1] = eights[i].y;
                words[4 * i + 2] = eights[i].z, words[4 * i + 3] = eights[i].w;
            }
            unsigned fired = 0;  // bit i: low half of word i; bit 16 + i: high half
#pragma unroll
            for (int i = 0; i < kWords; ++i) fired |= fires_pair(words[i]) & 0x10001u << i;
            const int own = __popc(fired), upto = scan_warp(own, lane);
            if (lane == 31) store_shared_word(sums + 4 * warp, upto);
            __syncthreads();
            const int of_lane = 32 * lane < threads ? load_shared_word(sums + 4 * lane) : 0;
            const int of_warps = scan_warp(of_lane, lane);
            int to = found + __shfl_sync(~0u, of_warps - of_lane, warp) + upto - own;
            found += __shfl_sync(~0u, of_warps, 31);
#pragma unroll 1
            for (; fired; fired &= fired - 1, ++to) {
                if (ALL && to % SIZE != rank) continue;
                const unsigned bit = __ffs(fired) - 1, word = bit % 16;
                unsigned both = words[0];
#pragma unroll
                for (int i = 1; i < kWords; ++i)
                    if (word == i) both = words[i];
                const int place = 4 * (ALL ? to / SIZE : to);
                store_shared_word(list + place,
                                  8 * (first + word / 4 * threads) + 2 * (word % 4) + bit / 16);
                store_shared_word(gates + place, bit & 16 ? both & 0xffff0000u : both << 16);
            }
            if (ALL) break;
            sums = 2 * head + kMostWarps * 4 - sums;  // by turns
        }
        __syncthreads();
        num = ALL ? (found - rank + SIZE - 1) / SIZE : found;
        return found;
    }

    // Each `ways`th batch, into sums of columns of y.
    __device__ __forceinline__ void run(const typename Numbers<Weight>::Input& x, int way,
                                        const Sizes& sizes, unsigned parts,
                                        typename Numbers<Weight>::Sums& y) const {
        const int step = kBatch * sizes.ways;
        Rows up, down;
        float scale = 1.f;
        int base = opaque(kBatch * way - step);
#pragma unroll 1
        while (true) {
            const bool has = base >= 0;  // else nothing is under way yet
            const unsigned here = parts + (base & step ? sizes.parts() / 2 : 0);  // by turns
            if (has)
                leave_parts(up, x,
                            here + (threadIdx.x / 32 - way * sizes.warps) * kQuads * kBatch * 4);
            const bool goes_on = base + step < num;
            if (goes_on) load_batch(up, w_up, base + step);
            if (has) {
                sync_some(1 + way, 32 * sizes.warps);
                y.add(down, find_hidden(here, sizes.warps, base, scale));
            }
            if (!goes_on) break;
            load_batch(down, w_down, base + step);
            if constexpr (Weight::kRowScales) scale = load_scale(base + step);
            base += step;
        }
    }

  private:
    // The rows of the list's places `base` on; behind its end the last one's.
    __device__ __forceinline__ void load_batch(Rows& rows, const Memory* weight, int base) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            rows[i] = load_constant(
                offset_by(weight, load_shared_word(list + 4 * min(base + i, num - 1)), row_bytes));
    }

    // Of each pair the sums over the columns of quads of lanes, to [quads][pairs].
    __device__ __forceinline__ static void leave_parts(const Rows& up,
                                                       const typename Numbers<Weight>::Input& x,
                                                       unsigned to) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float sums[kBatch];
        Numbers<Weight>::find_dots(up, x, sums);
        if (t == g / 2) {
            to += 4 * kBatch * g;
            store_shared_floats(to, make_float4(sums[0], sums[1], sums[2], sums[3]));
            store_shared_floats(to + 16, make_float4(sums[4], sums[5], sums[6], sums[7]));
        }
    }

    // Of the row of W_up whose pair `find_hidden` has in this lane.
    __device__ __forceinline__ float load_scale(int base) const {
        const int place = base + threadIdx.x % 32 / 4;
        return scales.of_neuron(load_shared_word(list + 4 * min(place, num - 1)));
    }

    // To lanes 8 i: h of pairs 2 i and 2 i + 1, bf16; 0 behind the list's end.
    __device__ __forceinline__ unsigned find_hidden(unsigned parts, int warps, int base,
                                                    float scale) const {
        const int lane = threadIdx.x % 32, place = base + lane / 4;
        const unsigned at = 4 * min(place, num - 1);
        const float gate = load_shared_float(gates + at);
        float up = 0;
        unsigned from = parts + 4 * (lane % 4 * kBatch + lane / 4);
#pragma unroll 1
        for (int i = 0; i < warps; i += 2, from += 2 * kQuads * kBatch * 4)
#pragma unroll
            for (int j = 0; j < kQuads / 2; ++j) up += load_shared_float(from + 16 * j * kBatch);
        up += __shfl_xor_sync(~0u, up, 1);
        up += __shfl_xor_sync(~0u, up, 2);
        if constexpr (Weight::kRowScales) up *= scale;
        if (b_up) up += bf16_value(b_up[load_shared_word(list + at)]);
        const float h = place < num ? gate * rounded(up) : 0.f;
        return bf16_pair(h, __shfl_xor_sync(~0u, h, 4));
    }
};

// Where the block stands in its cluster, the thread in its block, and all in shared memory.
struct Place {
    int rank, way, thread;  // the thread in its way
    unsigned head, barrier, list, parts, slots;

    template <class Weight>
    __device__ __forceinline__ static Place find(const Sizes& sizes, const uint4* memory) {
        Place at;
        at.rank = cluster_rank();
        at.way = 0;
#pragma unroll
        for (int i = 1; i < kWays<Weight>; ++i)
            at.way += static_cast<int>(threadIdx.x) >= 32 * sizes.warps * i;
        at.thread = threadIdx.x - 32 * sizes.warps * at.way;
        at.head = opaque(smem_address(memory)), at.barrier = at.head + kHeadBytes - 16;
        at.list = at.head + kHeadBytes, at.parts = at.list + 8 * sizes.cap;
        at.slots = at.parts + sizes.ways * sizes.parts();
        return at;
    }

    // The barrier that counts what the cluster's blocks send to this one.
    template <int SIZE>
    __device__ __forceinline__ void begin(const Sizes& sizes) const {
        if (threadIdx.x == 0) {
            barrier_init(barrier, 1);
            barrier_init_fence();
            const int num = min(sizes.columns, sizes.K - rank * sizes.columns);  // none, maybe
            barrier_expect_bytes(barrier, num > 0 ? 4 * SIZE * sizes.ways * num : 0);
        }
        cluster_arrive_relaxed();
    }
};

template <class Weight, bool ALL, int SIZE>
__device__ __forceinline__ Walk<Weight, ALL, SIZE> walk_at(const Place& at, const Scales& scales,
                                                           const Sizes& sizes,
                                                           const typename Weight::Memory* w_up,
                                                           const typename Weight::Memory* w_down,
                                                           const unsigned short* b_up, int column) {
    Walk<Weight, ALL, SIZE> walk;
    walk.scales = scales;
    walk.w_up = opaque(Weight::at(w_up, column));
    walk.w_down = opaque(Weight::at(w_down, column)), walk.b_up = b_up;
    walk.row_bytes = Weight::bytes(sizes.K);
    walk.head = at.head, walk.list = at.list, walk.gates = at.list + 4 * sizes.cap;
    return walk;
}

// The block's sums go to the owners of their columns; what came for its own is added up, and makes
// the row of y that begins at `row`.
template <class Weight, int SIZE>
__device__ __forceinline__ void finish_row(const Place& at, const Scales& scales,
                                           const typename Numbers<Weight>::Sums& sums,
                                           const Sizes& sizes, const unsigned short* b_down,
                                           const unsigned short* residual, long long row,
                                           unsigned short* y) {
    const int columns = sizes.columns, K = sizes.K;
    int column = sums.first_column(at.thread), owner = 0;
    if (column < K) {
#pragma unroll 1
        for (; column >= columns; column -= columns) ++owner;
        const unsigned place = at.slots + 4 * ((at.rank * sizes.ways + at.way) * columns + column);
        const unsigned to = address_in_block(place, owner);
        const unsigned their_barrier = address_in_block(at.barrier, owner);
#pragma unroll
        for (int i = 0; i < Weight::kEach / 4; ++i)
            store_cluster_async(to + 16 * i, their_barrier, sums.four(i));
    }
    const int own = 4 * threadIdx.x, n = at.rank * columns + own;
    if (own >= columns || n >= K) return;
    uint2 bias = {}, more = {};
    if (b_down) bias = *reinterpret_cast<const uint2*>(b_down + n);
    if (residual) more = load_written_pair(residual + row + n);
    uint4 own_scales = {};
    if constexpr (Weight::kRowScales) own_scales = scales.of_columns(n);
    barrier_wait(at.barrier, 0);
    float total[4] = {};
#pragma unroll 1
    for (int i = 0; i < sizes.ways; ++i)
#pragma unroll
        for (int block = 0; block < SIZE; ++block) {
            const uint4 four =
                load_shared(at.slots + 4 * ((block * sizes.ways + i) * columns + own));
            total[0] += __uint_as_float(four.x), total[1] += __uint_as_float(four.y);
            total[2] += __uint_as_float(four.z), total[3] += __uint_as_float(four.w);
        }
    if constexpr (Weight::kRowScales) {
        total[0] *= __uint_as_float(own_scales.x), total[1] *= __uint_as_float(own_scales.y);
        total[2] *= __uint_as_float(own_scales.z), total[3] *= __uint_as_float(own_scales.w);
    }
    total[0] += bf16_value(bias.x & 0xffff), total[1] += bf16_value(bias.x >> 16);
    total[2] += bf16_value(bias.y & 0xffff), total[3] += bf16_value(bias.y >> 16);
    if (residual) {
        total[0] = rounded(total[0]) + bf16_value(more.x & 0xffff);
        total[1] = rounded(total[1]) + bf16_value(more.x >> 16);
        total[2] = rounded(total[2]) + bf16_value(more.y & 0xffff);
        total[3] = rounded(total[3]) + bf16_value(more.y >> 16);
    }
    store_pair(y + row + n, bf16_pair(total[0], total[1]), bf16_pair(total[2], total[3]));
}

template <class Weight, bool ALL, int SIZE>
__device__ __forceinline__ void walk_token(const Scales& scales, const unsigned short* x,
                                           const typename Weight::Memory* w_up,
                                           const typename Weight::Memory* w_down,
                                           const unsigned short* b_up, const unsigned short* b_down,
                                           const unsigned short* gate,
                                           const unsigned short* residual, const Sizes& sizes,
                                           int* counts, unsigned short* y, const uint4* memory) {
    let_next_start();  // before the wait: of what comes, only weights are read before its own
    if (dynamic_smem_bytes() < sizes.bytes(SIZE) ||
        (ALL && sizes.N / 8 > kChunks * static_cast<int>(blockDim.x)))
        __trap();
    const int token = blockIdx.x / SIZE, K = sizes.K;
    const Place at = Place::find<Weight>(sizes, memory);
    at.begin<SIZE>(sizes);

    const long long row = static_cast<long long>(token) * K;
    const bool is_there = Weight::kEach * at.thread < K;
    const int column = is_there ? Weight::kEach * at.thread : 0;
    Walk<Weight, ALL, SIZE> walk =
        walk_at<Weight, ALL, SIZE>(at, scales, sizes, w_up, w_down, b_up, column);
    typename Numbers<Weight>::Input own_x = Numbers<Weight>::load(x + row + column);
    if (!is_there) own_x = {};
    Numbers<Weight>::settle(own_x);
    cluster_wait();  // all blocks are there, and their barriers

    wait_for_previous();
    const int found =
        walk.make_list(gate + static_cast<long long>(token) * sizes.N, sizes.N, at.rank);
    if (counts && threadIdx.x == 0 && found && (!ALL || at.rank == 0))
        atomicAdd(counts + token, found);
    typename Numbers<Weight>::Sums sums;
    if (walk.num > kBatch * at.way)
        walk.run(own_x, at.way, sizes, at.parts + at.way * sizes.parts(), sums);
    finish_row<Weight, SIZE>(at, scales, sums, sizes, b_down, residual, row, y);
}

}  // namespace few_walk
