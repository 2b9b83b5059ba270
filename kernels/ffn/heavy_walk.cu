// heavy_walk, of a packed gate, and heavy_walk_gate, of a dense one, over bf16 and e4m3
// (heavy_walk.cuh). Over e4m3 x and the weights have scales, of a token's two the first
// (quantise_rows.cu), and K is a multiple of 128; over bf16 these are null. Of the arguments behind
// them each reads those of its gate.
#include "ffn/heavy_walk.cuh"

using few_heavy::Bf16;
using few_heavy::E4m3;
constexpr int kSize = spec::HEAVY_WALK_SIZE;

#define TWELL_HEAVY_WALK(name, numbers, packed)                                                   \
    extern "C" __global__ void __cluster_dims__(kSize, 1, 1)                                      \
        __launch_bounds__(few_walk::kMostThreads, 1)                                              \
            name(const numbers::Number* x, const numbers::Number* w_up,                           \
                 const numbers::Number* w_down, const unsigned short* b_up,                       \
                 const unsigned short* b_down, const int* heavy_rows, const int* heavy_count,     \
                 int columns, int N, int K, int cap, int ways, int warps, int few,                \
                 unsigned short* y, const float2* token_scales, const float* up_scales,           \
                 const float* down_scales, const unsigned short* gate, const int* counts,         \
                 const int* entries, int num_tiles, int num_slots,                                \
                 const numbers::Number* w_gate, const unsigned short* b_gate,                     \
                 const float* gate_scales) {                                                      \
        extern __shared__ uint4 memory[];                                                         \
        const few_heavy::HeavyRows<numbers> rows = {                                              \
            {{{up_scales, down_scales}}, {token_scales, gate_scales}}, x, w_up, w_down, b_up,     \
            b_down, heavy_rows, heavy_count, few, {N, K, cap, ways, warps, columns}, y};          \
        if constexpr (packed)                                                                     \
            rows.walk<kSize>(few_heavy::PackedGate<numbers>{counts, entries, num_tiles,           \
                                                            num_slots, x, w_gate, b_gate},        \
                             memory);                                                             \
        else                                                                                      \
            rows.walk<kSize>(few_heavy::DenseGate{gate}, memory);                                 \
    }

TWELL_ENTRIES(TWELL_HEAVY_WALK)
