// hidden: h = gate * up of each pair, of the parts of its dot product that `up` left, into the
// lists of `down`; and the masks of those (round_masks.cuh).
//
// Launch: blocks of 256 threads, grid (tiles, any).
#include "twell_lists.cuh"
#include "round_masks.cuh"
#include "twell.cuh"

namespace {

// h of the tile's pairs, into the rounds.
__device__ __forceinline__ void fill_values(const float* partial, long long partial_stride, int Q,
                                            const uint2* pairs, int num_pairs,
                                            const unsigned short* b_up, unsigned short* rounds) {
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < num_pairs;
         i += gridDim.y * blockDim.x) {
        const uint2 pair = __ldg(pairs + i);
        const unsigned gate = rounds[pair.y];
        float sum = 0;
#pragma unroll 4
        for (int q = 0; q < Q; ++q) sum += partial[q * partial_stride + i];
        if (b_up) sum += bf16_value(b_up[pair.x >> 16]);
        rounds[pair.y] = bf16_bits(bf16_value(gate) * bf16_value(bf16_bits(sum)));
    }
}

// Masks of (group, panel)s, one a warp at a time.
__device__ __forceinline__ void make_masks(const int* num_rounds, const unsigned short* rounds,
                                           int group_rounds, int begin, int end, unsigned* masks) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int q = begin + blockIdx.y * warps + threadIdx.x / 32; q < end; q += gridDim.y * warps) {
        const int num = __ldg(num_rounds + q);
        const long long first = static_cast<long long>(q) * group_rounds * ROUND_HALVES;
        const uint2* codes = reinterpret_cast<const uint2*>(rounds + first) + 2 * lane + 1;
        unsigned* to = masks + static_cast<long long>(q) * batches_of(group_rounds) * BATCH_MASKS;
        for (int round = 0; round < num; round += BATCH) {
            const bool any = round + lane / ROUND_RECORDS < num;
            const uint2 code = any ? codes[round * ROUND_RECORDS * 2] : make_uint2(0, 0);
            to[round / BATCH * BATCH_MASKS + lane] = batch_mask(code, lane);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    hidden(const float* partial, long long partial_stride, int Q, const int* pair_start,
           const uint2* pairs, int M, int N, int tile_tokens, int cap, int num_panels,
           int group_rounds, const unsigned short* b_up, const int* num_rounds,
           unsigned short* rounds, unsigned* masks) {
    const int tile = blockIdx.x, num_neuron_groups = (N + NEURONS - 1) / NEURONS;
    const int num_pairs =
        pair_start[static_cast<long long>(tile) * (num_neuron_groups + 1) + num_neuron_groups];
    const long long first_pair = static_cast<long long>(tile) * tile_tokens * cap;
    const int first_group = tile * (tile_tokens / GROUP);
    const int last_group = min(first_group + tile_tokens / GROUP, (M + GROUP - 1) / GROUP);
    make_masks(num_rounds, rounds, group_rounds, first_group * num_panels, last_group * num_panels,
               masks);
    fill_values(partial + first_pair, partial_stride, Q, pairs + first_pair, num_pairs, b_up,
                rounds);
}
