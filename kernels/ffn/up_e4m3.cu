// up over e4m3: of rows of x and W_up in e4m3, two to a short, without their scales (up.cuh).
#include "ffn/up.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    up_e4m3(const unsigned short* x, const unsigned short* w_up, int M, int N, int K,
            int tile_tokens, int cap, int slabs_per_range, const int* pair_start,
            const unsigned* pairs, float* partial, long long partial_stride) {
    extern __shared__ __align__(128) uint4 slabs[];
    dot_tile<E4m3>(x, w_up, M, N, K, tile_tokens, cap, slabs_per_range, pair_start, pairs, partial,
                   partial_stride, slabs);
}
