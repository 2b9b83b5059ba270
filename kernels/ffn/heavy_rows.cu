// heavy_gather and heavy_widen: heavy.cuh has it all.
#include "ffn/heavy.cuh"
#include "tile/e4m3.cuh"

extern "C" __global__ void __launch_bounds__(spec::GATHER_BLOCK)
    heavy_gather(const unsigned short* x, const int* heavy_rows, const int* heavy_count,
                 int few, int window_start, int window, int num_inner, unsigned short* x_rows) {
    wait_for_previous();
    let_next_start();
    const int num_rows = rows_in_window(heavy_count, few, window_start, window);
    for (int i = blockIdx.x; i < num_rows; i += gridDim.x) {
        const long long row = heavy_rows[window_start + i];
        const uint4* source = reinterpret_cast<const uint4*>(x + row * num_inner);
        uint4* target =
            reinterpret_cast<uint4*>(x_rows + static_cast<long long>(i) * num_inner);
        for (int chunk = threadIdx.x; chunk < num_inner / 8; chunk += blockDim.x)
            target[chunk] = source[chunk];
    }
}

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
