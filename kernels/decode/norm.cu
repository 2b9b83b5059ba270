// rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, for each row of x [B, K], bf16.
// embed_norm: the same of rows of a table [., K], picked by int32 tokens [B], which go to x, too; it
// begins a step, and clears what the step counts.
//
// Rounded as transformers' LlamaRMSNorm in bf16: x / sqrt(..), and once more after the weight. A
// row is a block, which has all of it under way at once and meets at one barrier: with few rows
// latency is all that counts.
//
// Launch: a block a row, of ceil(K / 8) threads rounded up to warps, at most 1024. K a multiple of
// 8 up to 16384; rows are contiguous.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kMaxWarps = spec::NORM_WARPS;
constexpr int kParts = spec::NORM_PARTS;  // eights of a thread

// The sum over the block of one value a thread; every thread gets it.
__device__ __forceinline__ float sum_over_block(float value, float* sums) {
    value = sum_over_lanes(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    const int num_warps = blockDim.x / 32;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < num_warps; ++i) sum += sums[i];
    return sum;
}

// What of a row's weights a thread needs; no kernel writes them.
__device__ __forceinline__ void load_weights(uint4 (&weights)[kParts], const uint4* weight,
                                             int num) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int i = threadIdx.x + part * blockDim.x;
        weights[part] = make_uint4(0, 0, 0, 0);
        load_streamed_if(i < num, weight + i, weights[part]);
    }
}

// One row, by the block; it goes to `copy`, too, if that is not null.
__device__ __forceinline__ void normalise_row(const uint4* x, const uint4 (&weights)[kParts],
                                              float eps, int num, uint4* copy, uint4* y) {
    __shared__ float sums[kMaxWarps];
    uint4 row[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int i = threadIdx.x + part * blockDim.x;
        row[part] = make_uint4(0, 0, 0, 0);
        if (i < num) row[part] = load_written(x + i);
    }
    float values[kParts][8];
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        unpack(row[part], values[part]);
        sum += sum_of_squares(values[part]);
    }
    const float share = 1.f / (8 * num);
    const float root = reciprocal_root(sum_over_block(sum, sums) * share + eps);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        const int i = threadIdx.x + part * blockDim.x;
        normalise(values[part], root, weights[part]);
        if (i < num) y[i] = pack(values[part]);
        if (i < num && copy) copy[i] = row[part];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    rms_norm(const uint4* x, const uint4* weight, float eps, int K, uint4* y) {
    let_next_start();
    const int num = K / 8;
    const long long start = static_cast<long long>(blockIdx.x) * num;
    uint4 weights[kParts];
    load_weights(weights, weight, num);
    wait_for_previous();
    normalise_row(x + start, weights, eps, num, nullptr, y + start);
}

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    embed_norm(const int* tokens, const uint4* table, const uint4* weight, float eps, int K,
               int* counts, int num_counts, uint4* x, uint4* y) {
    let_next_start();
    const int num = K / 8;
    const long long start = static_cast<long long>(blockIdx.x) * num;
    uint4 weights[kParts];
    load_weights(weights, weight, num);
    wait_for_previous();
    const long long token = tokens[blockIdx.x];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_counts; i += gridDim.x * blockDim.x)
        counts[i] = 0;
    normalise_row(table + token * num, weights, eps, num, x + start, y + start);
}
