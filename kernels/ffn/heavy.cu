// heavy_gather, heavy_hidden and heavy_down over bf16: heavy.cuh has it all.
#include "ffn/heavy.cuh"

extern "C" __global__ void __launch_bounds__(spec::GATHER_BLOCK)
    heavy_gather(const unsigned short* x, const int* heavy_rows, const int* heavy_count,
                 int few, int window_start, int window, int num_inner, unsigned short* x_rows) {
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    for (int i = blockIdx.x; i < num_rows; i += gridDim.x) {
        const long long row = heavy_rows ? heavy_rows[window_start + i] : window_start + i;
        const uint4* source = reinterpret_cast<const uint4*>(x + row * num_inner);
        uint4* target =
            reinterpret_cast<uint4*>(x_rows + static_cast<long long>(i) * num_inner);
        for (int chunk = threadIdx.x; chunk < num_inner / 8; chunk += blockDim.x)
            target[chunk] = source[chunk];
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_hidden(const __grid_constant__ TensorMap x_map,
                 const __grid_constant__ TensorMap gate_map,
                 const __grid_constant__ TensorMap up_map, const unsigned short* b_gate,
                 const unsigned short* b_up, const int* heavy_count, int few,
                 int window_start, int window, int num_columns, int num_inner,
                 unsigned short* hidden) {
    extern __shared__ unsigned char dynamic_memory[];
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    if (num_rows == 0) return;
    HiddenTiles<> tiles{{}, Patch(patches(dynamic_memory)), b_gate, b_up, num_rows, num_columns, hidden};
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns / 2};
    product::run(shape, &x_map, &gate_map, &up_map, dynamic_memory, tiles);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_down(const __grid_constant__ TensorMap hidden_map,
               const __grid_constant__ TensorMap down_map, const unsigned short* b_down,
               const int* heavy_rows, const int* heavy_count, int few,
               int window_start, int window, int num_columns, int num_inner, unsigned short* y) {
    extern __shared__ unsigned char dynamic_memory[];
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    if (num_rows == 0) return;
    DownTiles<> tiles{{}, Patch(patches(dynamic_memory)), b_down, heavy_rows, window_start,
                    num_rows, num_inner, y};
    const product::Shape shape{num_rows, num_inner, num_columns, product::kBlockColumns};
    product::run<Across>(shape, &hidden_map, &down_map, &down_map, dynamic_memory, tiles);
}
