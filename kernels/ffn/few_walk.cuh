// few_walk: up, h and down of few tokens, straight from a dense gate; a token is a cluster's.
//
// The blocks of a cluster share what fired for their token: each makes the list of all of it, or,
// where there are more neurons than its threads look at in one go, of its range of neurons. A
// thread has 8 columns of K. Of kBatch pairs at a time it asks for its 16 bytes of each row of W_up,
// and at once for those of W_down, so that both are under way; with two ways every other batch is
// another half of the block's. Both products are mma's of which a part is wanted: so each takes a
// fraction of the instructions that unpacking and adding up would, and what a kernel's first run
// through its code costs is in proportion to those (0.1 us for a hundred).
//
//     dot products with x      rows: eights of a pair's columns; columns: eights of x; the diagonal
//     sums of h times rows     rows: columns of y; columns: which lane's; k: pairs of that lane
//
// The blocks' sums of y go to the block that owns the columns (st.async: a barrier of the cluster
// would carry a fence over all memory), which adds them up in a fixed order. Nothing overflows, no
// row is heavy: any density is exact, and NaN fires as ever. (Weights are finite: Inf or
// NaN in a row of W_down makes NaN of columns beside its own.)
//
// It follows few_linear, behind whose wait all that came before has ended, or starts when the gate
// product has ended. So x may be read before the wait.
#pragma once

#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bf16.cuh"
#include "ptx/cluster.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"

namespace few_walk {

constexpr int kBatch = spec::FEW_WALK_BATCH;  // pairs of which rows are under way, of a way
constexpr int kMostThreads = spec::FEW_WALK_BLOCK, kMostWarps = kMostThreads / 32;
constexpr int kChunks = spec::FEW_WALK_CHUNKS;  // of 8 gates, that a thread has at a time
constexpr int kWords = 4 * kChunks;
constexpr int kHeadBytes = 2 * kMostWarps * 4 + 16;  // sums of warps; a barrier
static_assert(kHeadBytes == spec::FEW_WALK_HEAD);
constexpr int kEights = spec::FEW_WALK_EIGHTS;       // sums of a pair that a warp leaves

using Rows = uint4[kBatch];

struct Sizes {
    int N, K;
    int cap;          // places of a list
    int ways, warps;  // warps of a way
    int columns;      // of y that a block owns

    // Bytes of shared memory.
    __device__ constexpr unsigned parts() const { return 2 * warps * kEights * kBatch * 4; }  // of a way
    __device__ constexpr unsigned slots(int size) const { return 4 * size * ways * columns; }
    __device__ constexpr unsigned bytes(int size) const {
        return kHeadBytes + 8 * cap + ways * parts() + slots(size);
    }
};

// ALL: each block looks at all neurons in one go, and has every SIZEth pair. Else it has a range.
template <bool ALL, int SIZE>
class Walk {
  public:
    const unsigned short *w_up, *w_down, *b_up;  // weights from the thread's column on
    unsigned row_bytes, head, list, gates;       // list: neurons; gates: of each, fp32
    int num;                                     // pairs of the block

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
                store_shared_word(list + place, 8 * (first + word / 4 * threads) + 2 * (word % 4) +
                                                    bit / 16);
                store_shared_word(gates + place, bit & 16 ? both & 0xffff0000u : both << 16);
            }
            if (ALL) break;
            sums = 2 * head + kMostWarps * 4 - sums;  // by turns
        }
        __syncthreads();
        num = ALL ? (found - rank + SIZE - 1) / SIZE : found;
        return found;
    }

    // The thread's columns of y, as `multiply_down` has them, over each `ways`th batch.
    __device__ __forceinline__ void run(const uint4& x, int way, const Sizes& sizes,
                                        unsigned parts, float (&y)[4][4]) const {
        const int step = kBatch * sizes.ways;
        Rows up, down;
        int base = opaque(kBatch * way - step);
#pragma unroll 1
        while (true) {
            const bool has = base >= 0;  // else nothing is under way yet
            const unsigned here = parts + (base & step ? sizes.parts() / 2 : 0);  // by turns
            if (has)
                leave_parts(up, x, here + (threadIdx.x / 32 - way * sizes.warps) * kEights *
                                              kBatch * 4);
            const bool goes_on = base + step < num;
            if (goes_on) load_batch(up, w_up, base + step);
            if (has) {
                sync_some(1 + way, 32 * sizes.warps);
                multiply_down(down, find_hidden(here, sizes.warps, base), y);
            }
            if (!goes_on) break;
            load_batch(down, w_down, base + step);
            base += step;
        }
    }

  private:
    // The rows of the list's places `base` on; behind its end the last one's.
    __device__ __forceinline__ void load_batch(Rows& rows, const unsigned short* weight,
                                               int base) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            rows[i] = load_constant(
                offset_by(weight, load_shared_word(list + 4 * min(base + i, num - 1)), row_bytes));
    }

    // Of each pair the sums over eights of the warp's columns, to [eights][pairs].
    __device__ __forceinline__ static void leave_parts(const Rows& up, const uint4& x,
                                                       unsigned to) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float sums[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            // rows g of `a` have words 0 and 2, rows g + 8 words 1 and 3
            float a[4] = {}, b[4] = {};
            multiply_add(a, up[i].x, up[i].y, up[i].z, up[i].w, x.x, x.z);
            multiply_add(b, up[i].x, up[i].y, up[i].z, up[i].w, x.y, x.w);
            sums[i] = g % 2 ? a[1] + b[3] : a[0] + b[2];
        }
        if (t == g / 2) {
            to += 4 * kBatch * g;
            store_shared_floats(to, make_float4(sums[0], sums[1], sums[2], sums[3]));
            store_shared_floats(to + 16, make_float4(sums[4], sums[5], sums[6], sums[7]));
        }
    }

    // To lanes 8 i: h of pairs 2 i and 2 i + 1, bf16; 0 behind the list's end.
    __device__ __forceinline__ unsigned find_hidden(unsigned parts, int warps, int base) const {
        const int lane = threadIdx.x % 32, place = base + lane / 4;
        const unsigned at = 4 * min(place, num - 1);
        const float gate = load_shared_float(gates + at);
        float up = 0;
        unsigned from = parts + 4 * (lane % 4 * kBatch + lane / 4);
#pragma unroll 1
        for (int i = 0; i < warps; i += 2, from += 2 * kEights * kBatch * 4)
#pragma unroll
            for (int j = 0; j < kEights / 2; ++j) up += load_shared_float(from + 16 * j * kBatch);
        up += __shfl_xor_sync(~0u, up, 1);
        up += __shfl_xor_sync(~0u, up, 2);
        if (b_up) up += bf16_value(b_up[load_shared_word(list + at)]);
        const float h = place < num ? gate * rounded(up) : 0.f;
        return bf16_pair(h, __shfl_xor_sync(~0u, h, 4));
    }

    // y += h of each pair times its row. y[i][0] and [2]: columns 2 i and 2 i + 1 of the eight of
    // lane 2 t of the quad (t = 2: 0, t = 3: 2), [1] and [3]: of the one behind it.
    __device__ __forceinline__ static void multiply_down(const Rows& down, unsigned hidden,
                                                         float (&y)[4][4]) {
        const bool is_own = threadIdx.x % 4 == threadIdx.x / 4 % 4;
        unsigned h[kBatch / 2];
#pragma unroll
        for (int i = 0; i < kBatch / 2; ++i) {
            h[i] = __shfl_sync(~0u, hidden, 8 * i);
            if (!is_own) h[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < kBatch; i += 4) {
            const uint4 &a = down[i], &b = down[i + 1], &c = down[i + 2], &d = down[i + 3];
            add_pairs(y[0], a.x, b.x, c.x, d.x, h[i / 2], h[i / 2 + 1]);
            add_pairs(y[1], a.y, b.y, c.y, d.y, h[i / 2], h[i / 2 + 1]);
            add_pairs(y[2], a.z, b.z, c.z, d.z, h[i / 2], h[i / 2 + 1]);
            add_pairs(y[3], a.w, b.w, c.w, d.w, h[i / 2], h[i / 2 + 1]);
        }
    }

    // Two columns of four pairs.
    __device__ __forceinline__ static void add_pairs(float (&y)[4], unsigned a, unsigned b,
                                                     unsigned c, unsigned d, unsigned h,
                                                     unsigned more) {
        multiply_add(y, permute_bytes(a, b, 0x5410), permute_bytes(a, b, 0x7632),
                     permute_bytes(c, d, 0x5410), permute_bytes(c, d, 0x7632), h, more);
    }
};

template <bool ALL, int SIZE>
__device__ __forceinline__ void walk_token(
    const unsigned short* x, const unsigned short* w_up, const unsigned short* w_down,
    const unsigned short* b_up, const unsigned short* b_down, const unsigned short* gate,
    const unsigned short* residual, const Sizes& sizes, int* counts, unsigned short* y,
    const uint4* memory) {
    let_next_start();  // before the wait: of what comes, only weights are read before its own
    if (dynamic_smem_bytes() < sizes.bytes(SIZE) ||
        (ALL && sizes.N / 8 > kChunks * static_cast<int>(blockDim.x)))
        __trap();
    const int rank = cluster_rank(), token = blockIdx.x / SIZE, K = sizes.K;
    const int way = static_cast<int>(threadIdx.x) >= 32 * sizes.warps;
    const int thread = threadIdx.x - 32 * sizes.warps * way, columns = sizes.columns;
    const unsigned head = opaque(smem_address(memory)), barrier = head + kHeadBytes - 16;
    const unsigned list = head + kHeadBytes, parts = list + 8 * sizes.cap;
    const unsigned slots = parts + sizes.ways * sizes.parts();
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        const int num = min(columns, K - rank * columns);  // none, maybe
        barrier_expect_bytes(barrier, num > 0 ? 4 * SIZE * sizes.ways * num : 0);
    }
    cluster_arrive_relaxed();

    const long long row = static_cast<long long>(token) * K;
    const bool is_there = 8 * thread < K;
    const int column = is_there ? 8 * thread : 0;
    Walk<ALL, SIZE> walk;
    walk.w_up = opaque(w_up + column), walk.w_down = opaque(w_down + column), walk.b_up = b_up;
    walk.row_bytes = 2 * K, walk.head = head, walk.list = list, walk.gates = list + 4 * sizes.cap;
    uint4 eight = load_written(x + row + column);
    if (!is_there) eight = make_uint4(0, 0, 0, 0);
    cluster_wait();  // all blocks are there, and their barriers

    wait_for_previous();
    const int found = walk.make_list(gate + static_cast<long long>(token) * sizes.N, sizes.N, rank);
    if (counts && threadIdx.x == 0 && found && (!ALL || rank == 0))
        atomicAdd(counts + token, found);
    float sums[4][4] = {};
    if (walk.num > kBatch * way)
        walk.run(eight, way, sizes, parts + way * sizes.parts(), sums);

    // each lane of a quad sends an eight that it has
    const int t = threadIdx.x % 4;
    int at = 8 * (thread / 4 * 4 + t % 2 * 2 + t / 2), owner = 0;
    if (at < K) {
#pragma unroll 1
        for (; at >= columns; at -= columns) ++owner;
        const unsigned place = slots + 4 * ((rank * sizes.ways + way) * columns + at);
        const unsigned to = address_in_block(place, owner);
        const unsigned their_barrier = address_in_block(barrier, owner);
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            store_cluster_async(to + 8 * i, their_barrier,
                                make_float4(t / 2 ? sums[i][1] : sums[i][0],
                                            t / 2 ? sums[i][3] : sums[i][2],
                                            t / 2 ? sums[i + 1][1] : sums[i + 1][0],
                                            t / 2 ? sums[i + 1][3] : sums[i + 1][2]));
    }
    const int own = 4 * threadIdx.x, n = rank * columns + own;
    if (own >= columns || n >= K) return;
    uint2 bias = {}, more = {};
    if (b_down) bias = *reinterpret_cast<const uint2*>(b_down + n);
    if (residual) more = load_written_pair(residual + row + n);
    barrier_wait(barrier, 0);
    float total[4] = {};
#pragma unroll 1
    for (int i = 0; i < sizes.ways; ++i)
#pragma unroll
        for (int block = 0; block < SIZE; ++block) {
            const uint4 four =
                load_shared(slots + 4 * ((block * sizes.ways + i) * columns + own));
            total[0] += __uint_as_float(four.x), total[1] += __uint_as_float(four.y);
            total[2] += __uint_as_float(four.z), total[3] += __uint_as_float(four.w);
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

}  // namespace few_walk
