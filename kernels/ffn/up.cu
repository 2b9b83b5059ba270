// up and up_e4m3: up.cuh has it all. In e4m3 rows of x and W_up have two numbers to a short, and the
// sums are without their scales.
#include "ffn/up.cuh"

#define TWELL_UP(name, numbers)                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                     \
        name(const unsigned short* x, const unsigned short* w_up, int M, int N, int K,            \
             int tile_tokens, int cap, int slabs_per_range, const int* pair_start,                \
             const unsigned* pairs, float* partial, long long partial_stride) {                   \
        extern __shared__ __align__(128) uint4 slabs[];                                           \
        dot_tile<numbers>(x, w_up, M, N, K, tile_tokens, cap, slabs_per_range, pair_start, pairs, \
                          partial, partial_stride, slabs);                                        \
    }

TWELL_ENTRIES(TWELL_UP)
