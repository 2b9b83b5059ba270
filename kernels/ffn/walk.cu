// walk_gate over bf16 (walk.cuh).
#include "ffn/walk.cuh"

extern "C" __global__ void __launch_bounds__(spec::WALK_BLOCK, 1)
    walk_gate(const unsigned short* x, const unsigned short* w_up, const unsigned short* w_down,
              const unsigned short* b_up, const unsigned short* b_down, const unsigned short* gate,
              int N, int K, int cap, int ways, int* heavy_rows, int* heavy_count,
              unsigned short* x_rows, unsigned short* y) {
    extern __shared__ uint4 memory[];
    const long long token = blockIdx.x;
    Walk<Bf16> way{{}, x, w_up, w_down, b_up, b_down, y, K, cap, ways};
    way.find_place(reinterpret_cast<unsigned*>(memory));
    wait_for_previous();
    let_next_start();
    const Dense row{gate + token * N, N};
    walk_token(way, row, heavy_rows, heavy_count, x_rows);
}
