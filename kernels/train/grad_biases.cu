// grad_biases: the gradients of the biases of gate and up, sums of grad_gate and of grad_up of each
// neuron, over the lists of neurons (grad_lists.cuh). Adds to what is there if *heavy_count > 0.
//
// Launch: blocks of 128 threads, a warp a four of neurons; sums float32 [2, N].
#include "spec.cuh"
#include "tile/bf16.cuh"
#include "tile/lists.cuh"
#include "tile/warp.cuh"
#include "train/grad_lists.cuh"

extern "C" __global__ void __launch_bounds__(spec::GRAD_BIASES_BLOCK)
    grad_biases(const int2* heads, const unsigned* codes, const uint2* pairs, int N, int num_panels,
                const int* heavy_count, float* sums) {
    const int four = blockIdx.x * (spec::GRAD_BIASES_BLOCK / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (four * FOUR >= N) return;
    float found[FOUR][2] = {};
    for (int panel = 0; panel < num_panels; ++panel) {
        const int2 head = heads[static_cast<long long>(four) * num_panels + panel];
        for (int i = lane; i < head.y * ROUND_RECORDS; i += 32) {
            const long long record = static_cast<long long>(head.x) * ROUND_RECORDS + i;
            const long long at = record / 4 * 8 + record % 4;
            const int round = record / 4 % CODES_TOGETHER;
            const unsigned* words = codes + record / 16 * 32 + round % 2 * ROUND + record % 4 * 2;
            const uint2 gate = pairs[at], up = pairs[at + 4];
#pragma unroll
            for (int slot = 0; slot < 4; ++slot) {
                const int shift = slot % 2 * 16;
                const unsigned code = words[slot / 2 * CLASSES + slot % 2] >> round / 2 * 16;
                const int row = code >> COLUMN_BITS & (FOUR - 1);
                const float of_gate = bf16_value((slot < 2 ? gate.x : gate.y) >> shift & 0xffff);
                const float of_up = bf16_value((slot < 2 ? up.x : up.y) >> shift & 0xffff);
#pragma unroll
                for (int r = 0; r < FOUR; ++r) {
                    found[r][0] += r == row ? of_gate : 0.f;
                    found[r][1] += r == row ? of_up : 0.f;
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < FOUR; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = sum_over_lanes(found[r][i]);
            const int neuron = four * FOUR + r;
            if (lane > 0 || neuron >= N) continue;
            float* at = sums + static_cast<long long>(i) * N + neuron;
            *at = sum + (any_heavy(heavy_count) ? *at : 0.f);
        }
}
