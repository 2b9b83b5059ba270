// heavy_hidden and heavy_down over bf16 and e4m3: heavy.cuh has it all.
#include "ffn/heavy.cuh"

using product::Bf16;
using product::E4m3;

#define TWELL_HEAVY_HIDDEN(name, numbers)                                                         \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)  \
        name(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap gate_map, \
             const __grid_constant__ TensorMap up_map, const unsigned short* b_gate,              \
             const unsigned short* b_up, const int* heavy_rows, const int* heavy_count, int few,  \
             int window_start, int window, int num_columns, int num_inner,                        \
             unsigned short* hidden, const float2* token_scales, const float* gate_scales,        \
             const float* up_scales) {                                                            \
        extern __shared__ unsigned char dynamic_memory[];                                         \
        wait_for_previous();                                                                      \
        let_next_start();                                                                         \
        const int num_rows = rows_in_window(heavy_count, few, window_start, window);              \
        if (num_rows == 0) return;                                                                \
        HiddenTiles<numbers::kScaled> tiles{                                                      \
            {token_scales, gate_scales, up_scales, heavy_rows, window_start},                     \
            Patch(patches(dynamic_memory)), b_gate, b_up, num_rows, num_columns, hidden};         \
        const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns / 2}; \
        product::run<numbers::Rows>(shape, &x_map, &gate_map, &up_map, dynamic_memory, tiles);    \
    }

#define TWELL_HEAVY_DOWN(name, numbers)                                                           \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)  \
        name(const __grid_constant__ TensorMap hidden_map,                                        \
             const __grid_constant__ TensorMap down_map, const unsigned short* b_down,            \
             const int* heavy_rows, const int* heavy_count, int few, int window_start, int window,\
             int num_columns, int num_inner, unsigned short* y, const float* column_scales) {     \
        extern __shared__ unsigned char dynamic_memory[];                                         \
        wait_for_previous();                                                                      \
        let_next_start();                                                                         \
        const int num_rows = rows_in_window(heavy_count, few, window_start, window);              \
        if (num_rows == 0) return;                                                                \
        DownTiles<numbers::kScaled> tiles{{column_scales}, Patch(patches(dynamic_memory)), b_down,\
                                heavy_rows, window_start, num_rows, num_inner, y};                \
        const product::Shape shape{num_rows, num_inner, num_columns, product::kBlockColumns};     \
        product::run<Across>(shape, &hidden_map, &down_map, &down_map, dynamic_memory, tiles);    \
    }

#define TWELL_HEAVY(name, numbers, kernel) TWELL_HEAVY_##kernel(name, numbers)

TWELL_ENTRIES(TWELL_HEAVY)
