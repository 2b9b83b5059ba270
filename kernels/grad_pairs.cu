// grad_pairs: of each pair (token, neuron that fired) the gradients of its gate and its up, of the
// parts of grad_h = grad_y . w_down that `up` left.
//
//   kept    gate | up << 16, from the forward pass (`hidden`)
//   grad_h  = sum of the parts + penalty * sign(gate * up), bf16
//   grads   grad_h * up | grad_h * gate << 16
//
// All in the order of `pairs` (plan.cu). penalty: a float32 on the device, or null.
//
// Launch: grid (tiles, any), blocks of 256 threads. tile_tokens * cap and stride are multiples of 4.
#include "twell_lists.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ unsigned grads_of(float sum, unsigned kept, float penalty) {
    const float gate = bf16_value(kept & 0xffff), up = bf16_value(kept >> 16);
    const float hidden = bf16_value(bf16_bits(gate * up));
    const float sign = hidden > 0.f ? penalty : hidden < 0.f ? -penalty : 0.f;
    const float grad = bf16_value(bf16_bits(sum + sign));
    return bf16_pair(grad * up, grad * gate);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    grad_pairs(const float* partial, long long stride, int Q, const int* pair_start,
               const unsigned* kept, const float* penalty_at, int N, int tile_tokens, int cap,
               unsigned* grads) {
    const int tile = blockIdx.x, num_groups = (N + NEURONS - 1) / NEURONS;
    const int num = pair_start[static_cast<long long>(tile) * (num_groups + 1) + num_groups];
    const long long first = static_cast<long long>(tile) * tile_tokens * cap;
    const float penalty = penalty_at ? *penalty_at : 0.f;
    const float4* parts = reinterpret_cast<const float4*>(partial + first);
    const uint4* kept_at = reinterpret_cast<const uint4*>(kept + first);
    uint4* to = reinterpret_cast<uint4*>(grads + first);
    for (int i = blockIdx.y * kThreads + threadIdx.x; 4 * i < num; i += gridDim.y * kThreads) {
        float4 sum = __ldg(parts + i);
        for (int q = 1; q < Q; ++q) {
            const float4 part = __ldg(parts + q * (stride / 4) + i);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        const uint4 values = __ldg(kept_at + i);
        to[i] = make_uint4(grads_of(sum.x, values.x, penalty), grads_of(sum.y, values.y, penalty),
                           grads_of(sum.z, values.z, penalty), grads_of(sum.w, values.w, penalty));
    }
}
