// few_down: y = hidden W_down^T + b_down (+ residual) of 1 to 64 tokens, over the neurons that
// fired for any of them (few_hidden.cu).
//
// w_down by rows of neurons, [N, K]. A block makes a list of the neurons that fired, and has 16
// TILES columns of y, of 16 neurons after the other:
//
//     y^T [16 columns, tokens] += W^T [16 columns, 16 neurons] hidden [16 neurons, tokens]
//
// both turned over by ldmatrix. `few_down` is for one or two tokens: 16 columns, few neurons. L2
// takes so many requests a clock, whatever their size: so for more tokens, who want more neurons,
// blocks of `few_down_wide` have 64 columns, 128 bytes of a neuron in bf16, and the four blocks of
// a cluster a quarter of the neurons each. Before sm_90 there are no clusters: they have as many
// columns as `few_down`, 32 bytes, the least that comes from L2.
//
// Which warp of which block takes which place of the list is fixed, sums are added up in the order
// of warps and blocks: the bits do not depend on time.
//
// scale is float32 [K], of the columns of y, or null if this kind of weights has none
// (tile/weights.cuh).
//
// Launch: few_down, few_down_wide_1, _2, _4 or _8 for so many octets of tokens; 256 threads; of K
// columns each block owns 16 TILES / BLOCKS. Dynamic shared memory: the list, 2 bytes a neuron,
// rounded up to 16, and Down::kBytes. `few_down` lists so many neurons at a time, and goes through
// several lists if more fired: what it does not take is left to the kernels around it, which start
// before it ends.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/cluster.cuh"
#include "tile/few_product.cuh"
#include "tile/warp.cuh"
#include "tile/weights.cuh"

namespace {

// Of the neurons that fired, in ascending order, number `from` and up to `cap` behind it, to shared
// memory; how many fired. All threads of the block.
__device__ __forceinline__ int make_list(unsigned list, const unsigned short* fired, int N,
                                         int from, int cap) {
    __shared__ int of_warps[few::kWarps];
    const int num = (N + 2 * few::kRows - 1) / (2 * few::kRows), lane = threadIdx.x % 32;
    int total = 0;
    // two row blocks a thread, in turns
#pragma unroll 1
    for (int first = 0; first < num; first += few::kThreads) {
        const int both = first + threadIdx.x;
        unsigned left = both < num ? load_written_word(fired + 2 * both) : 0;
        const int own = __popc(left), upto = scan_warp(own, lane);
        if (lane == 31) of_warps[threadIdx.x / 32] = upto;
        __syncthreads();
        int place = total + upto - own - from;
#pragma unroll
        for (int i = 0; i < few::kWarps; ++i) {
            if (i < static_cast<int>(threadIdx.x) / 32) place += of_warps[i];
            total += of_warps[i];
        }
#pragma unroll 1
        for (; left; left &= left - 1, ++place)
            if (static_cast<unsigned>(place) < static_cast<unsigned>(cap))
                store_shared_half(list + 2 * place, both * 2 * few::kRows + __ffs(left) - 1);
        __syncthreads();
    }
    return total;
}

// TILES of 16 columns of a kind of weights, and BLOCKS that share the neurons.
template <class Weight, int OCTETS, int TILES, int BLOCKS>
class Down {
    static constexpr int kAtOnce = Weight::kEights;  // tiles that are read at once: 32 bytes
    static_assert(TILES % kAtOnce == 0);
    static constexpr int kTokens = few::kOctet * OCTETS;
    static constexpr int kStages = spec::FEW_DOWN_STAGES;
    static constexpr int kChunks = 2 * TILES / kAtOnce;  // of 16 bytes, of a neuron's weights
    static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8);
    static constexpr int kWeightBytes = few::kRows * kChunks * 16;
    static constexpr int kHiddenBytes = few::kRows * 16 * (OCTETS < 2 ? 2 : OCTETS);
    static constexpr int kStageBytes = kWeightBytes + kHiddenBytes;
    static constexpr int kSums = TILES * OCTETS * few::kBlockSums;  // of a warp

  public:
    static constexpr int kRingBytes = few::kWarps * kStages * kStageBytes;
    static constexpr int kSumBytes = few::kWarps * kSums * 4;
    static constexpr unsigned kBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;

    const typename Weight::Memory* w_down;  // from the block's first column on
    const unsigned short* hidden;
    unsigned list, memory;  // addresses in shared memory
    int num;                // of the list
    unsigned row_bytes;     // of w_down

    // Adds the neurons of the list to the sums of a warp.
    __device__ __forceinline__ void multiply(float (&sums)[TILES][OCTETS][4]) const {
        const int lane = threadIdx.x % 32, step = few::kWarps * BLOCKS;
        const int num_groups = (num + few::kRows - 1) / few::kRows;
        const int rank = BLOCKS > 1 ? static_cast<int>(cluster_rank()) : 0;
        const int first = threadIdx.x / 32 * BLOCKS + rank;
#pragma unroll 1
        for (int i = 0; i < kStages; ++i) {
            if (first + i * step < num_groups) bring(i, first + i * step);
            commit_copies();
        }
        const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
        int stage = 0;
#pragma unroll 1
        for (int group = first; group < num_groups; group += step) {
            wait_for_copies<kStages - 1>();
            __syncwarp();
            const unsigned at = stage_at(stage);
            unsigned a[TILES][4];
            read_tiles(a, at, row, half);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet += 2) {
                unsigned b[4];
                read_transposed(b, at + kWeightBytes + octet * 256 + lane * 16);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    unsigned (&w)[4] = a[tile];
                    multiply_add(sums[tile][octet], w[0], w[1], w[2], w[3], b[0], b[1]);
                    if (OCTETS > 1)
                        multiply_add(sums[tile][octet + (OCTETS > 1)], w[0], w[1], w[2], w[3], b[2],
                                     b[3]);
                }
            }
            __syncwarp();
            const int next = group + kStages * step;
            if (next < num_groups) bring(stage, next);
            commit_copies();
            if (++stage == kStages) stage = 0;
        }
    }

    // Two chunks of a neuron, turned over: kAtOnce tiles, whose rows are columns of y. Of 16 bits a
    // weight a chunk is half of a tile, and they are in their order. Else a unit of 16 bits has
    // several columns: of those 0 and 1, or 2 and 3, the one is in row g, the other in row g + 8.
    __device__ __forceinline__ static void read_tiles(unsigned (&a)[TILES][4], unsigned at, int row,
                                                      int half) {
#pragma unroll
        for (int first = 0; first < TILES; first += kAtOnce) {
            unsigned words[4];
            read_transposed(words, at + place_of_chunk(row, 2 * first / kAtOnce + half));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const int tile = first + i % 2 * (kAtOnce / 2) + j / 2;
                    a[tile][kAtOnce > 1 ? i / 2 * 2 + j % 2 : i] = Weight::pair(words[i], j);
                }
        }
    }

    // The sums of all warps to shared memory: [warp][tile][octet][kBlockSums].
    __device__ __forceinline__ void store(const float (&sums)[TILES][OCTETS][4]) const {
        const int lane = threadIdx.x % 32;
        __syncthreads();
        const unsigned to = memory + threadIdx.x / 32 * kSums * 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    store_shared_float(
                        to + 4 * ((tile * OCTETS + octet) * few::kBlockSums +
                                  few::place_of_sum(lane / 4 + j / 2 * 8, lane % 4 * 2 + j % 2)),
                        sums[tile][octet][j]);
        __syncthreads();
    }

    // Adds up the warps' sums, into those of the first.
    __device__ __forceinline__ void add_warps() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kSums; i += few::kThreads)
            store_shared_float(memory + 4 * i, sum_at(i));
    }

    // Sum of a column, of the block's warps.
    __device__ __forceinline__ float sum(int column, int token) const {
        return sum_at(place(column, token));
    }

    // The same, of all blocks; after add_warps() in each.
    __device__ __forceinline__ float sum_of_blocks(int column, int token) const {
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < BLOCKS; ++rank)
            sum += load_cluster_float(address_in_block(memory + 4 * place(column, token), rank));
        return sum;
    }

  private:
    // Of a column of the block's, as read_tiles has them.
    __device__ __forceinline__ static int place(int column, int token) {
        int tile = column / 16, row = column % 16;
        if constexpr (kAtOnce > 1) {
            const int chunk = column / Weight::kEach, in = column % Weight::kEach;
            tile = chunk * (kAtOnce / 2) + in % kAtOnce / 2;
            row = in / kAtOnce + in % kAtOnce % 2 * 8;
        }
        return (tile * OCTETS + token / few::kOctet) * few::kBlockSums +
               few::place_of_sum(row, token % few::kOctet);
    }

    __device__ __forceinline__ float sum_at(int i) const {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < few::kWarps; ++warp)
            sum += load_shared_float(memory + 4 * (warp * kSums + i));
        return sum;
    }

    __device__ __forceinline__ unsigned stage_at(int stage) const {
        return memory + (threadIdx.x / 32 * kStages + stage) * kStageBytes;
    }

    // Where 16 bytes of a neuron lie: so that the 8 rows of a matrix lie in different banks.
    __device__ __forceinline__ static int place_of_chunk(int row, int chunk) {
        const int turn = kChunks == 8 ? row & 7 : kChunks == 4 ? row >> 1 & 3 : row >> 2 & 1;
        return (row * kChunks + (chunk ^ turn)) * 16;
    }

    // Neurons 16 group .. of the list: weights, and hidden [octet][16][16 bytes]. Zeros behind the
    // end.
    __device__ __forceinline__ void bring(int stage, int group) const {
        const unsigned to = stage_at(stage);
#pragma unroll
        for (int i = threadIdx.x % 32; i < few::kRows * kChunks; i += 32) {
            const int row = i / kChunks, chunk = i % kChunks, place = group * few::kRows + row;
            copy_async_or_zero(
                place < num, to + place_of_chunk(row, chunk),
                offset_by(Weight::at(w_down, chunk * Weight::kEach), neuron(place), row_bytes));
        }
#pragma unroll
        for (int i = threadIdx.x % 32; i < few::kRows * OCTETS; i += 32) {
            const int row = i / OCTETS, octet = i % OCTETS, place = group * few::kRows + row;
            copy_async_or_zero(place < num, to + kWeightBytes + (octet * few::kRows + row) * 16,
                               offset_by(hidden + octet * few::kOctet, neuron(place), 2 * kTokens));
        }
    }

    // Behind the list's end the last one.
    __device__ __forceinline__ unsigned neuron(int place) const {
        return load_shared_half(list + 2 * min(place, num - 1));
    }
};

// LISTED: neurons that are listed at a time.
template <class Weight, int OCTETS, int TILES, int BLOCKS, int LISTED>
__device__ constexpr unsigned needed_bytes(int, int N, int) {
    return (2 * (LISTED < N ? LISTED : N) + 15) / 16 * 16 +
           Down<Weight, OCTETS, TILES, BLOCKS>::kBytes;
}

template <class Weight, int OCTETS, int TILES, int BLOCKS, int LISTED>
__device__ __forceinline__ void down(const typename Weight::Memory* w_down,
                                     const unsigned short* hidden, const unsigned short* fired,
                                     const unsigned short* b_down, const unsigned short* residual,
                                     int M, int N, int K, unsigned short* y, const float* scale) {
    constexpr int kOwn = 16 * TILES / BLOCKS;  // columns of y, of a block
    extern __shared__ uint4 memory[];
    const int cap = LISTED < N ? LISTED : N;
    const unsigned list = opaque(smem_address(memory)), stages = list + (2 * cap + 15) / 16 * 16;
    if (dynamic_smem_bytes() < needed_bytes<Weight, OCTETS, TILES, BLOCKS, LISTED>(M, N, K))
        __trap();
    const int rank = BLOCKS > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int first_column = (blockIdx.x - rank) * kOwn;
    let_next_start();  // before the wait: of what comes, only weights are read before its own
    wait_for_previous();
    const int total = make_list(list, fired, N, 0, cap);
    using Product = Down<Weight, OCTETS, TILES, BLOCKS>;
    Product product = {Weight::at(w_down, first_column),       hidden, list, stages, 0,
                       static_cast<unsigned>(Weight::bytes(K))};
    float sums[TILES][OCTETS][4] = {};
    for (int from = 0;;) {
        product.num = min(total - from, cap);
        product.multiply(sums);
        if ((from += cap) >= total) break;
        __syncthreads();  // the list is still read
        make_list(list, fired, N, from, cap);
    }
    product.store(sums);
    if (BLOCKS > 1) {
        product.add_warps();
        cluster_sync();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < M * kOwn; i += few::kThreads) {
        const int own = rank * kOwn + i % kOwn, token = i / kOwn, n = first_column + own;
        float sum = BLOCKS > 1 ? product.sum_of_blocks(own, token) : product.sum(own, token);
        sum = Weight::scaled(sum, scale, n);
        if (b_down) sum += bf16_value(b_down[n]);
        const long long at = static_cast<long long>(token) * K + n;
        if (residual) sum = rounded(sum) + written_value(residual + at);
        y[at] = static_cast<unsigned short>(bf16_bits(sum));
    }
    if (BLOCKS > 1) cluster_sync();  // the others read this block's sums
}

}  // namespace

#define TWELL_FEW_DOWN(name, Weight, octets, tiles, blocks, listed)                                \
    extern "C" __global__ void TWELL_CLUSTER(blocks) __launch_bounds__(few::kThreads) name(        \
        const Weight::Memory* w_down, const unsigned short* hidden, const unsigned short* fired,   \
        const unsigned short* b_down, const unsigned short* residual, int M, int N, int K,         \
        unsigned short* y, const float* scale) {                                                   \
        down<Weight, octets, tiles, blocks, listed>(w_down, hidden, fired, b_down, residual, M, N, \
                                                    K, y, scale);                                  \
    }

#if __CUDA_ARCH__ >= 900
#define TWELL_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define TWELL_CLUSTER(blocks)
#endif

TWELL_ENTRIES(TWELL_FEW_DOWN)
