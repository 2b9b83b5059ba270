// walk_gate and walk_gate_e4m3 (walk.cuh). Over e4m3 x, W_up and W_down have scales; over bf16 these
// are null.
#include "ffn/walk.cuh"

#define TWELL_WALK(name, numbers)                                                                 \
    extern "C" __global__ void __launch_bounds__(spec::WALK_BLOCK, 1)                             \
        name(const numbers::Number* x, const numbers::Number* w_up,                               \
             const numbers::Number* w_down, const unsigned short* b_up,                           \
             const unsigned short* b_down, const unsigned short* gate, int N, int K, int cap,     \
             int ways, int* heavy_rows, int* heavy_count, numbers::Number* x_rows,                \
             unsigned short* y, const float2* token_scales, const float* neuron_scales,           \
             const float* column_scales) {                                                        \
        extern __shared__ uint4 memory[];                                                         \
        Walk<numbers> way{{{token_scales, neuron_scales, column_scales}},                         \
                          x, w_up, w_down, b_up, b_down, y, K, cap, ways};                        \
        way.find_place(reinterpret_cast<unsigned*>(memory));                                      \
        wait_for_previous();                                                                      \
        let_next_start();                                                                         \
        const Dense row{gate + static_cast<long long>(blockIdx.x) * N, N};                        \
        walk_token(way, row, heavy_rows, heavy_count, x_rows);                                    \
    }

TWELL_ENTRIES(TWELL_WALK)
