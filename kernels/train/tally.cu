// tally: the sum of |h| over the heavy rows of a window, of what `heavy_hidden` left; one sum a
// block, to be added up. (That of the other rows comes from `hidden_kept`.)
//
// Launch: any grid of blocks of 256 threads; sums float32 [blocks]. num_columns a multiple of 8,
// hidden at a multiple of 16 bytes.
#include "spec.cuh"
#include "tile/bf16.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kThreads = spec::GATHER_BLOCK, kWarps = kThreads / 32;

__device__ __forceinline__ float sum_of_pair(unsigned pair) {
    return fabsf(bf16_value(pair & 0xffff)) + fabsf(bf16_value(pair >> 16));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    tally(const uint4* hidden, const int* heavy_count, int window_start, int window,
          int num_columns, float* sums) {
    __shared__ float warp_sums[kWarps];
    const int num_rows = max(0, min(window, *heavy_count - window_start));
    const long long num = static_cast<long long>(num_rows) * (num_columns / 8);
    float sum = 0;
    for (long long i = blockIdx.x * kThreads + threadIdx.x; i < num; i += gridDim.x * kThreads) {
        const uint4 eight = hidden[i];
        sum += sum_of_pair(eight.x) + sum_of_pair(eight.y);
        sum += sum_of_pair(eight.z) + sum_of_pair(eight.w);
    }
    sum = sum_over_lanes(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float all = 0;
    for (int warp = 0; warp < kWarps; ++warp) all += warp_sums[warp];
    sums[blockIdx.x] = all;
}
