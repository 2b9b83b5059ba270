// few_walk_S: a token by a cluster of S blocks (few_walk.cuh). `_all`: each block looks at all
// neurons. `columns` stands in front of N and K on purpose: in the same eight bytes they would be
// loaded as a pair, which takes more registers than there are, and some entries would spill.
#include "spec.cuh"
#include "ffn/few_walk.cuh"

#define TWELL_FEW_WALK(name, all, size)                                                        \
    extern "C" __global__ void __cluster_dims__(size, 1, 1)                                    \
        __launch_bounds__(few_walk::kMostThreads, 1) name(                                     \
            const unsigned short* x, const unsigned short* w_up, const unsigned short* w_down, \
            const unsigned short* b_up, const unsigned short* b_down,                          \
            const unsigned short* gate, const unsigned short* residual, int columns, int N,    \
            int K, int cap, int ways, int warps, int* counts, unsigned short* y) {             \
        extern __shared__ uint4 memory[];                                                      \
        few_walk::walk_token<all, size>(few_walk::Bf16{}, x, w_up, w_down, b_up, b_down, gate, \
                                        residual, {N, K, cap, ways, warps, columns}, counts,   \
                                        y, memory);                                            \
    }

TWELL_ENTRIES(TWELL_FEW_WALK)
