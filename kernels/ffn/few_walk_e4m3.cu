// few_walk over e4m3 weights with scales, float32: up_scale [N] of rows of W_up, down_scale [K] of
// columns of y. They multiply the sums before the biases are added. K a multiple of 128; all else
// as few_walk.cu.
#include "spec.cuh"
#include "ffn/few_walk.cuh"

#define TWELL_FEW_WALK(name, all, size)                                                        \
    extern "C" __global__ void __cluster_dims__(size, 1, 1)                                    \
        __launch_bounds__(few_walk::kMostThreads, 1) name(                                     \
            const unsigned short* x, const unsigned char* w_up, const unsigned char* w_down,   \
            const unsigned short* b_up, const unsigned short* b_down,                          \
            const unsigned short* gate, const unsigned short* residual, int columns, int N,    \
            int K, int cap, int ways, int warps, int* counts, unsigned short* y,               \
            const float* up_scale, const float* down_scale) {                                  \
        extern __shared__ uint4 memory[];                                                      \
        const few_walk::E4m3 numbers = {up_scale, down_scale};                                 \
        few_walk::walk_token<all, size>(numbers, x, w_up, w_down, b_up, b_down, gate,          \
                                        residual, {N, K, cap, ways, warps, columns}, counts,   \
                                        y, memory);                                            \
    }

TWELL_ENTRIES(TWELL_FEW_WALK)
