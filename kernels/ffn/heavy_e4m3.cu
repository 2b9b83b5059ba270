// The heavy rows over e4m3 (heavy.cuh). x_rows, W_gate and W_up are e4m3 with scales; the hidden
// state is bf16, and so W_down is made bf16, without its scales, if more than `few` rows are heavy.
//   heavy_gather   (heavy.cu) x_rows in shorts; behind a walk x_rows are there
//   heavy_widen    wide [N, K] bf16 = w_down [N, K] e4m3
//   heavy_hidden_e4m3, heavy_down_e4m3: as heavy_hidden, and heavy_down over `wide`
//
// Launch: widen any grid x 256 threads, num_bytes a multiple of 16; the others as in heavy.cuh,
// boxes of e4m3 twice as wide.
#include "ffn/heavy.cuh"
#include "tile/e4m3.cuh"

extern "C" __global__ void __launch_bounds__(spec::GATHER_BLOCK)
    heavy_widen(const uint4* w_down, long long num_bytes, const int* heavy_count, int few,
                uint4* wide) {
    wait_for_previous();
    let_next_start();
    if (*heavy_count <= few) return;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
         i < num_bytes / 16; i += stride) {
        const uint4 sixteen = load_streamed(w_down + i);
        wide[2 * i] = e4m3_as_bf16(sixteen.x, sixteen.y);
        wide[2 * i + 1] = e4m3_as_bf16(sixteen.z, sixteen.w);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_hidden_e4m3(const __grid_constant__ TensorMap x_map,
                      const __grid_constant__ TensorMap gate_map,
                      const __grid_constant__ TensorMap up_map, const unsigned short* b_gate,
                      const unsigned short* b_up, const int* heavy_rows, const int* heavy_count,
                      int few, int window_start, int window, int num_columns, int num_inner,
                      unsigned short* hidden, const float2* token_scales,
                      const float* gate_scales, const float* up_scales) {
    extern __shared__ unsigned char dynamic_memory[];
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    if (num_rows == 0) return;
    HiddenTiles<ScaledHidden> tiles{
        {token_scales, gate_scales, up_scales, heavy_rows, window_start},
        Patch(patches(dynamic_memory)),
        b_gate,
        b_up,
        num_rows,
        num_columns,
        hidden};
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns / 2};
    product::run<AlongE4m3>(shape, &x_map, &gate_map, &up_map, dynamic_memory, tiles);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_down_e4m3(const __grid_constant__ TensorMap hidden_map,
                    const __grid_constant__ TensorMap down_map, const unsigned short* b_down,
                    const int* heavy_rows, const int* heavy_count, int few, int window_start,
                    int window, int num_columns, int num_inner, unsigned short* y,
                    const float* column_scales) {
    extern __shared__ unsigned char dynamic_memory[];
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    if (num_rows == 0) return;
    DownTiles<ScaledDown> tiles{{column_scales}, Patch(patches(dynamic_memory)), b_down, heavy_rows,
                                window_start,    num_rows,                       num_inner, y};
    const product::Shape shape{num_rows, num_inner, num_columns, product::kBlockColumns};
    product::run<Across>(shape, &hidden_map, &down_map, &down_map, dynamic_memory, tiles);
}
