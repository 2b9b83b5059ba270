// few_walk_S: a token by a cluster of S blocks (few_walk.cuh). `_all`: each block looks at all
// neurons. `columns` stands in front of N and K on purpose: in the same eight bytes they would be
// loaded as a pair, which takes more registers than there are, and some entries would spill.
//
// up_scale and down_scale are float32, [N] of the rows of W_up and [K] of the columns of y, or null
// if their kind of weights has none (tile/weights.cuh).
#include "spec.cuh"
#include "ffn/few_walk.cuh"

#define TWELL_FEW_WALK(name, Weight, all, size)                                                   \
    extern "C" __global__ void __cluster_dims__(size, 1, 1)                                       \
        __launch_bounds__(few_walk::kMostThreads, 1) name(                                        \
            const unsigned short* x, const Weight::Memory* w_up, const Weight::Memory* w_down,    \
            const unsigned short* b_up, const unsigned short* b_down, const unsigned short* gate, \
            const unsigned short* residual, int columns, int N, int K, int cap, int ways,         \
            int warps, int* counts, unsigned short* y, const float* up_scale,                     \
            const float* down_scale) {                                                            \
        extern __shared__ uint4 memory[];                                                         \
        few_walk::walk_token<Weight, all, size>(                                                  \
            {up_scale, down_scale}, x, w_up, w_down, b_up, b_down, gate, residual,                \
            {N, K, cap, ways, warps, columns}, counts, y, memory);                                \
    }

TWELL_ENTRIES(TWELL_FEW_WALK)
