// up over bf16: up.cuh has it all.
#include "ffn/up.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    up(const unsigned short* x, const unsigned short* w_up, int M, int N, int K, int tile_tokens,
       int cap, int slabs_per_range, const int* pair_start, const unsigned* pairs, float* partial,
       long long partial_stride) {
    extern __shared__ __align__(128) uint4 slabs[];
    dot_tile<Bf16>(x, w_up, M, N, K, tile_tokens, cap, slabs_per_range, pair_start, pairs, partial,
                   partial_stride, slabs);
}
