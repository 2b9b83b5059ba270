// few_walk_S: a token by a cluster of S blocks (few_walk.cuh). `_all`: each block looks at all
// neurons. `columns` is the first number lest N and K lie in eight bytes and are loaded as a pair: the
// pair costs registers where there are none left, and some entries spill.
#include "ffn/few_walk.cuh"

#define TWELL_FEW_WALK(name, all, size)                                                           \
    extern "C" __global__ void __cluster_dims__(size, 1, 1)                                       \
        __launch_bounds__(few_walk::kMostThreads, 1) few_walk_##name(                             \
            const unsigned short* x, const unsigned short* w_up, const unsigned short* w_down,    \
            const unsigned short* b_up, const unsigned short* b_down,                             \
            const unsigned short* gate, const unsigned short* residual, int columns, int N,       \
            int K, int cap, int ways, int warps, int* counts, unsigned short* y) {                \
        extern __shared__ uint4 memory[];                                                         \
        few_walk::walk_token<all, size>(x, w_up, w_down, b_up, b_down, gate, residual,            \
                                        {N, K, cap, ways, warps, columns}, counts, y, memory);    \
    }

TWELL_FEW_WALK(2, false, 2)
TWELL_FEW_WALK(3, false, 3)
TWELL_FEW_WALK(4, false, 4)
TWELL_FEW_WALK(6, false, 6)
TWELL_FEW_WALK(8, false, 8)
TWELL_FEW_WALK(2_all, true, 2)
TWELL_FEW_WALK(3_all, true, 3)
TWELL_FEW_WALK(4_all, true, 4)
TWELL_FEW_WALK(6_all, true, 6)
TWELL_FEW_WALK(8_all, true, 8)
