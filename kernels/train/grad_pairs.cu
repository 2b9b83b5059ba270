// grad_pairs: of each pair (token, neuron that fired) the gradients of its gate and its up, of the
// parts of grad_h = grad_y . w_down that `up` left.
//
//   kept    gate | up << 16, from the forward pass (`hidden`)
//   grad_h  = sum of the parts + penalty * sign(gate * up), bf16
//   grads   grad_h * up | grad_h * gate << 16
//
// add_parts: of each pair the sum of the parts, in the place of the first; so that what goes by
// links after that (`hidden_kept`) has one to look for.
//
// All in the order of `pairs` (plan.cu). penalty: a float32 on the device, or null.
//
// Launch: grid (tiles, any), blocks of 256 threads. tile_tokens * cap and partial_stride are
// multiples of 4.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "tile/bf16.cuh"
#include "tile/lists.cuh"

namespace {

constexpr int kThreads = spec::GRAD_PAIRS_BLOCK;

__device__ __forceinline__ unsigned grads_of(float sum, unsigned kept, float penalty) {
    const float gate = bf16_value(kept & 0xffff), up = bf16_value(kept >> 16);
    const float hidden = bf16_value(bf16_bits(gate * up));
    const float sign = hidden > 0.f ? penalty : hidden < 0.f ? -penalty : 0.f;
    const float grad = bf16_value(bf16_bits(sum + sign));
    return bf16_pair(grad * up, grad * gate);
}

// Parts of the four pairs at `i`, added up.
__device__ __forceinline__ float4 sum_of_parts(const float4* parts, long long stride,
                                               int num_ranges, int i) {
    float4 sum = parts[i];
#pragma unroll 4
    for (int range = 1; range < num_ranges; ++range) {
        const float4 part = __ldg(parts + range * stride + i);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
}

__device__ __forceinline__ int pairs_of_tile(const int* pair_start, int tile, int N) {
    const int num_groups = (N + NEURONS - 1) / NEURONS;
    return pair_start[static_cast<long long>(tile) * (num_groups + 1) + num_groups];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    add_parts(float* partial, long long partial_stride, int num_ranges, const int* pair_start,
              int N, int tile_tokens, int cap) {
    const int num = pairs_of_tile(pair_start, blockIdx.x, N);
    const long long first = static_cast<long long>(blockIdx.x) * tile_tokens * cap;
    float4* parts = reinterpret_cast<float4*>(partial + first);
    for (int i = blockIdx.y * kThreads + threadIdx.x; 4 * i < num; i += gridDim.y * kThreads)
        parts[i] = sum_of_parts(parts, partial_stride / 4, num_ranges, i);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_pairs(const float* partial, long long partial_stride, int num_ranges,
               const int* pair_start, const unsigned* kept, const float* penalty_at, int N,
               int tile_tokens, int cap, unsigned* grads) {
    const int num = pairs_of_tile(pair_start, blockIdx.x, N);
    const long long first = static_cast<long long>(blockIdx.x) * tile_tokens * cap;
    const float penalty = penalty_at ? *penalty_at : 0.f;
    const float4* parts = reinterpret_cast<const float4*>(partial + first);
    const uint4* kept_at = reinterpret_cast<const uint4*>(kept + first);
    uint4* to = reinterpret_cast<uint4*>(grads + first);
    for (int i = blockIdx.y * kThreads + threadIdx.x; 4 * i < num; i += gridDim.y * kThreads) {
        const float4 sum = sum_of_parts(parts, partial_stride / 4, num_ranges, i);
        const uint4 values = __ldg(kept_at + i);
        to[i] = make_uint4(grads_of(sum.x, values.x, penalty), grads_of(sum.y, values.y, penalty),
                           grads_of(sum.z, values.z, penalty), grads_of(sum.w, values.w, penalty));
    }
}
