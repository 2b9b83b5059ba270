// walk_gate over e4m3: x, W_up and W_down with scales (walk.cuh).
#include "ffn/walk.cuh"

extern "C" __global__ void __launch_bounds__(spec::WALK_BLOCK, 1)
    walk_gate_e4m3(const unsigned char* x, const unsigned char* w_up, const unsigned char* w_down,
                   const unsigned short* b_up, const unsigned short* b_down,
                   const unsigned short* gate, int N, int K, int cap, int ways, int* heavy_rows,
                   int* heavy_count, unsigned char* x_rows, unsigned short* y,
                   const float2* token_scales, const float* neuron_scales,
                   const float* column_scales) {
    extern __shared__ uint4 memory[];
    Walk<E4m3> way{{token_scales, neuron_scales, column_scales},
                   x, w_up, w_down, b_up, b_down, y, K, cap, ways};
    way.find_place(reinterpret_cast<unsigned*>(memory));
    wait_for_previous();
    let_next_start();
    const Dense row{gate + static_cast<long long>(blockIdx.x) * N, N};
    walk_token(way, row, heavy_rows, heavy_count, x_rows);
}
