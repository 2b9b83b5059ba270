// few_walk_S: a token by a cluster of S blocks (few_walk.cuh). `_all`: each block looks at all
// neurons. `columns` stands in front of N and K on purpose: in the same eight bytes they would be
// loaded as a pair, which takes more registers than there are, and some entries would spill.
//
// Over e4m3 weights there are scales, float32: up_scale [N] of rows of W_up, down_scale [K] of
// columns of y, and K is a multiple of 128. They multiply the sums before the biases are added. Over
// bf16 they are null.
#include "spec.cuh"
#include "ffn/few_walk.cuh"

using few_walk::Bf16;
using few_walk::E4m3;

#define TWELL_FEW_WALK(name, numbers, all, size)                                                  \
    extern "C" __global__ void __cluster_dims__(size, 1, 1)                                       \
        __launch_bounds__(few_walk::kMostThreads, 1) name(                                        \
            const unsigned short* x, const numbers::Number* w_up,                                 \
            const numbers::Number* w_down, const unsigned short* b_up,                            \
            const unsigned short* b_down, const unsigned short* gate,                             \
            const unsigned short* residual, int columns, int N, int K, int cap, int ways,         \
            int warps, int* counts, unsigned short* y, const float* up_scale,                     \
            const float* down_scale) {                                                            \
        extern __shared__ uint4 memory[];                                                         \
        few_walk::walk_token<all, size>(numbers{{up_scale, down_scale}}, x, w_up, w_down, b_up,   \
                                        b_down, gate, residual,                                   \
                                        {N, K, cap, ways, warps, columns}, counts, y, memory);    \
    }

TWELL_ENTRIES(TWELL_FEW_WALK)
