// few_down: y = hidden W_down^T + b_down (+ residual) of 1 to 64 tokens, over the neurons that fired
// for any of them (few_hidden.cu).
//
// w_down by rows of neurons, [N, K]. A block has 16 columns of y, makes a list of the neurons that
// fired, and its eight warps take 16 neurons each in turn:
//
//     y^T [16 columns, tokens] += W^T [16 columns, 16 neurons] hidden [16 neurons, tokens]
//
// both turned over by ldmatrix. The warps' sums are added up in the order of warps, neurons in
// ascending order in each: the bits do not depend on time.
//
// Launch: few_down_1, _2, _4 or _8 for so many octets of tokens; 256 threads, K / 16 blocks. Dynamic
// shared memory: 2 bytes for each neuron, rounded up to 16, and kWarps * kStages * stage_bytes(OCTETS),
// which the sums take over at the end.
#include "few.cuh"
#include "warp.cuh"

namespace {

constexpr int kColumns = 16;  // of y
constexpr int kStages = 4;
constexpr int kWeightBytes = few::kRows * kColumns * 2;  // of 16 neurons

constexpr int octet_bytes(int octets) { return few::kRows * few::kOctet * 2 * (octets < 2 ? 2 : octets); }
constexpr int stage_bytes(int octets) { return kWeightBytes + octet_bytes(octets); }

// Four 8 x 8 matrices, transposed; lane i gives row i % 8 of matrix i / 8. All lanes have read when
// this returns.
__device__ __forceinline__ void read_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(smem_row)
                 : "memory");
}

// The neurons that fired, in ascending order; how many. All threads of the block.
__device__ __forceinline__ int make_list(unsigned short* list, const unsigned short* fired, int N) {
    __shared__ int of_warps[few::kWarps];
    const int num = (N + few::kRows - 1) / few::kRows, lane = threadIdx.x % 32;
    const int each = (num + few::kThreads - 1) / few::kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, num), end = min(begin + each, num);
    int own = 0;
    for (int i = begin; i < end; ++i) own += __popc(fired[i]);
    const int upto = scan_warp(own, lane);
    if (lane == 31) of_warps[threadIdx.x / 32] = upto;
    __syncthreads();
    int at = upto - own, total = 0;
#pragma unroll
    for (int i = 0; i < few::kWarps; ++i) {
        if (i < static_cast<int>(threadIdx.x) / 32) at += of_warps[i];
        total += of_warps[i];
    }
    for (int i = begin; i < end; ++i)
        for (unsigned left = fired[i]; left; left &= left - 1)
            list[at++] = static_cast<unsigned short>(i * few::kRows + __ffs(left) - 1);
    __syncthreads();
    return total;
}

template <int OCTETS>
struct Feed {
    static constexpr int kTokens = few::kOctet * OCTETS;
    const unsigned short* w_down;  // from the block's first column on
    const unsigned short* hidden;
    const unsigned short* list;
    int num, K;
    char* ring;  // the warp's

    // Neurons group * 16 .. of the list: weights [16][32 bytes], their two halves exchanged in rows
    // 4 to 7 and 12 to 15 against bank conflicts, and hidden [octet][16][16 bytes]. Zeros behind the end.
    __device__ __forceinline__ void bring(int stage, int group) const {
        char* to = ring + stage * stage_bytes(OCTETS);
        const int lane = threadIdx.x % 32;
        {
            const int row = lane / 2, half = lane % 2, i = group * few::kRows + row;
            copy(to + row * 32 + (half ^ (row >> 2 & 1)) * 16, i,
                 w_down + half * 8, K);
        }
#pragma unroll
        for (int at = lane; at < few::kRows * OCTETS; at += 32)
            copy(to + kWeightBytes + at * 16, group * few::kRows + at % few::kRows,
                 hidden + at / few::kRows * few::kOctet, kTokens);
    }

    __device__ __forceinline__ void copy(char* to, int i, const unsigned short* from,
                                         int stride) const {
        if (i < num)
            copy_async(smem_address(to), from + static_cast<long long>(list[i]) * stride);
        else
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
};

template <int OCTETS>
__device__ __forceinline__ void down(const unsigned short* w_down, const unsigned short* hidden,
                                     const unsigned short* fired, const unsigned short* b_down,
                                     const unsigned short* residual, int M, int N, int K,
                                     unsigned short* y) {
    extern __shared__ uint4 memory[];
    unsigned short* list = reinterpret_cast<unsigned short*>(memory);
    char* rings = reinterpret_cast<char*>(memory) + (2 * N + 15) / 16 * 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_column = blockIdx.x * kColumns;
    wait_for_previous();
    let_next_start();
    const int num = make_list(list, fired, N);
    const Feed<OCTETS> feed = {w_down + first_column, hidden, list, num, K,
                               rings + warp * kStages * stage_bytes(OCTETS)};

    const int num_groups = (num + few::kRows - 1) / few::kRows;
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        if (warp + i * few::kWarps < num_groups) feed.bring(i, warp + i * few::kWarps);
        commit_copies();
    }
    float sums[OCTETS][4] = {};
    const int matrix_row = lane / 16 * 8 + lane % 8;
    const unsigned weights_at = matrix_row * 32 + ((lane >> 3 ^ matrix_row >> 2) & 1) * 16;
    int stage = 0;
    for (int group = warp; group < num_groups; group += few::kWarps) {
        wait_for_copies<kStages - 1>();
        __syncwarp();
        const unsigned at = smem_address(feed.ring) + stage * stage_bytes(OCTETS);
        unsigned a[4];
        read_transposed(a, at + weights_at);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet += 2) {
            unsigned b[4];
            read_transposed(b, at + kWeightBytes + octet * 256 + lane * 16);
            multiply_add(sums[octet], a[0], a[1], a[2], a[3], b[0], b[1]);
            if (octet + 1 < OCTETS)
                multiply_add(sums[octet + (OCTETS > 1)], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
        __syncwarp();
        const int next = group + kStages * few::kWarps;
        if (next < num_groups) feed.bring(stage, next);
        commit_copies();
        if (++stage == kStages) stage = 0;
    }

    // the warps' sums, [octet][token][column]
    __syncthreads();
    float* parts = reinterpret_cast<float*>(rings);
    constexpr int kParts = OCTETS * few::kBlockSums;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            parts[warp * kParts + octet * few::kBlockSums +
                  few::place_of_sum(lane / 4 + j / 2 * 8, lane % 4 * 2 + j % 2)] = sums[octet][j];
    __syncthreads();
    for (int i = threadIdx.x; i < M * kColumns; i += few::kThreads) {
        const int column = i % kColumns, token = i / kColumns;
        const float* own = parts + token / few::kOctet * few::kBlockSums +
                           few::place_of_sum(column, token % few::kOctet);
        float sum = b_down ? bf16_value(b_down[first_column + column]) : 0.f;
#pragma unroll
        for (int j = 0; j < few::kWarps; ++j) sum += own[j * kParts];
        const long long at = static_cast<long long>(token) * K + first_column + column;
        if (residual) sum = few::rounded(sum) + bf16_value(residual[at]);
        y[at] = static_cast<unsigned short>(bf16_bits(sum));
    }
}

}  // namespace

#define TWELL_FEW_DOWN(octets)                                                                   \
    extern "C" __global__ void __launch_bounds__(few::kThreads)                                  \
        few_down_##octets(const unsigned short* w_down, const unsigned short* hidden,            \
                          const unsigned short* fired, const unsigned short* b_down,             \
                          const unsigned short* residual, int M, int N, int K, unsigned short* y) { \
        down<octets>(w_down, hidden, fired, b_down, residual, M, N, K, y);                       \
    }

TWELL_FEW_DOWN(1)
TWELL_FEW_DOWN(2)
TWELL_FEW_DOWN(4)
TWELL_FEW_DOWN(8)
