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
// blocks of `few_down_wide` have 64 columns, 128 bytes of a neuron, and the four blocks of a
// cluster a quarter of the neurons each (before sm_90 there are no clusters: 16 columns, as
// `few_down`).
//
// Which warp of which block takes which place of the list is fixed, sums are added up in the order
// of warps and blocks: the bits do not depend on time.
//
// Launch: few_down, few_down_wide_1, _2, _4 or _8 for so many octets of tokens; 256 threads, K / 16
// blocks. Dynamic shared memory: the list, 2 bytes a neuron, rounded up to 16, and Down::kBytes.
// `few_down` lists so many neurons at a time, and goes through several lists if more fired: what it
// does not take is left to the kernels around it, which start before it ends.
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

namespace {

constexpr int kFewListed = 2048, kAllListed = 65536;
#if __CUDA_ARCH__ >= 900
constexpr int kWideTiles = 4;
#else
constexpr int kWideTiles = 1;
#endif

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

// TILES of 16 columns, and as many blocks that share the neurons.
template <int OCTETS, int TILES>
class Down {
    static constexpr int kTokens = few::kOctet * OCTETS;
    static constexpr int kStages = 4;
    static constexpr int kChunks = 2 * TILES;  // of 16 bytes, of a neuron's weights
    static constexpr int kWeightBytes = few::kRows * kChunks * 16;
    static constexpr int kHiddenBytes = few::kRows * 16 * (OCTETS < 2 ? 2 : OCTETS);
    static constexpr int kStageBytes = kWeightBytes + kHiddenBytes;
    static constexpr int kSums = TILES * OCTETS * few::kBlockSums;  // of a warp

  public:
    static constexpr int kRingBytes = few::kWarps * kStages * kStageBytes;
    static constexpr int kSumBytes = few::kWarps * kSums * 4;
    static constexpr unsigned kBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;

    const unsigned short *w_down, *hidden;  // w_down from the block's first column on
    unsigned list, memory;                  // addresses in shared memory
    int num;                                // of the list
    unsigned row_bytes;                     // of w_down

    // Adds the neurons of the list to the sums of a warp.
    __device__ __forceinline__ void multiply(float (&sums)[TILES][OCTETS][4]) const {
        const int lane = threadIdx.x % 32, step = few::kWarps * TILES;
        const int num_groups = (num + few::kRows - 1) / few::kRows;
        const int rank = TILES > 1 ? static_cast<int>(cluster_rank()) : 0;
        const int first = threadIdx.x / 32 * TILES + rank;
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
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                read_transposed(a[tile], at + place_of_chunk(row, 2 * tile + half));
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet += 2) {
                unsigned b[4];
                read_transposed(b, at + kWeightBytes + octet * 256 + lane * 16);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    unsigned(&w)[4] = a[tile];
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
                    store_shared_float(to + 4 * ((tile * OCTETS + octet) * few::kBlockSums +
                                           few::place_of_sum(lane / 4 + j / 2 * 8,
                                                             lane % 4 * 2 + j % 2)),
                                 sums[tile][octet][j]);
        __syncthreads();
    }

    // Adds up the warps' sums, into those of the first.
    __device__ __forceinline__ void add_warps() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kSums; i += few::kThreads)
            store_shared_float(memory + 4 * i, sum_at(i));
    }

    // Sum of a column of tile `tile`, of the block's warps.
    __device__ __forceinline__ float sum(int tile, int column, int token) const {
        return sum_at(place(tile, column, token));
    }

    // The same, of all blocks; after add_warps() in each.
    __device__ __forceinline__ float sum_of_blocks(int tile, int column, int token) const {
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < TILES; ++rank)
            sum += load_cluster_float(
                address_in_block(memory + 4 * place(tile, column, token), rank));
        return sum;
    }

  private:
    __device__ __forceinline__ static int place(int tile, int column, int token) {
        return (tile * OCTETS + token / few::kOctet) * few::kBlockSums +
               few::place_of_sum(column, token % few::kOctet);
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
        return (row * kChunks + (chunk ^ (TILES > 1 ? row & 7 : row >> 2 & 1))) * 16;
    }

    // Neurons 16 group .. of the list: weights, and hidden [octet][16][16 bytes]. Zeros behind the
    // end.
    __device__ __forceinline__ void bring(int stage, int group) const {
        const unsigned to = stage_at(stage);
#pragma unroll
        for (int i = threadIdx.x % 32; i < few::kRows * kChunks; i += 32) {
            const int row = i / kChunks, chunk = i % kChunks, place = group * few::kRows + row;
            copy_async_or_zero(place < num, to + place_of_chunk(row, chunk),
                               offset_by(w_down + chunk * 8, neuron(place), row_bytes));
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
template <int OCTETS, int TILES, int LISTED>
__device__ __forceinline__ void down(const unsigned short* w_down, const unsigned short* hidden,
                                     const unsigned short* fired, const unsigned short* b_down,
                                     const unsigned short* residual, int M, int N, int K,
                                     unsigned short* y) {
    extern __shared__ uint4 memory[];
    const int cap = LISTED < N ? LISTED : N;
    const unsigned list = opaque(smem_address(memory)), stages = list + (2 * cap + 15) / 16 * 16;
    if (dynamic_smem_bytes() < (2 * (LISTED < N ? LISTED : N) + 15) / 16 * 16 +
                                   Down<OCTETS, TILES>::kBytes)
        __trap();
    const int rank = TILES > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int first_column = (blockIdx.x - rank) * 16;
    let_next_start();  // before the wait: of what comes, only weights are read before its own
    wait_for_previous();
    const int total = make_list(list, fired, N, 0, cap);
    Down<OCTETS, TILES> product = {w_down + first_column, hidden, list, stages, 0, 2u * K};
    float sums[TILES][OCTETS][4] = {};
    for (int from = 0;;) {
        product.num = min(total - from, cap);
        product.multiply(sums);
        if ((from += cap) >= total) break;
        __syncthreads();  // the list is still read
        make_list(list, fired, N, from, cap);
    }
    product.store(sums);
    if (TILES > 1) {
        product.add_warps();
        cluster_sync();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < M * 16; i += few::kThreads) {
        const int column = i % 16, token = i / 16, n = first_column + rank * 16 + column;
        float sum = TILES > 1 ? product.sum_of_blocks(rank, column, token)
                              : product.sum(0, column, token);
        if (b_down) sum += bf16_value(b_down[n]);
        const long long at = static_cast<long long>(token) * K + n;
        if (residual) sum = rounded(sum) + written_value(residual + at);
        y[at] = static_cast<unsigned short>(bf16_bits(sum));
    }
    if (TILES > 1) cluster_sync();  // the others read this block's sums
}

}  // namespace

extern "C" __global__ void __launch_bounds__(few::kThreads)
    few_down(const unsigned short* w_down, const unsigned short* hidden,
             const unsigned short* fired, const unsigned short* b_down,
             const unsigned short* residual, int M, int N, int K, unsigned short* y) {
    down<1, 1, kFewListed>(w_down, hidden, fired, b_down, residual, M, N, K, y);
}

#if __CUDA_ARCH__ >= 900
#define TWELL_CLUSTER __cluster_dims__(4, 1, 1)
#else
#define TWELL_CLUSTER
#endif

#define TWELL_FEW_DOWN(octets)                                                                 \
    extern "C" __global__ void TWELL_CLUSTER __launch_bounds__(few::kThreads)                  \
        few_down_wide_##octets(const unsigned short* w_down, const unsigned short* hidden,     \
                               const unsigned short* fired, const unsigned short* b_down,      \
                               const unsigned short* residual, int M, int N, int K,            \
                               unsigned short* y) {                                            \
        down<octets, kWideTiles, kAllListed>(w_down, hidden, fired, b_down, residual, M, N, K, \
                                             y);                                               \
    }

TWELL_FEW_DOWN(1)
TWELL_FEW_DOWN(2)
TWELL_FEW_DOWN(4)
TWELL_FEW_DOWN(8)
