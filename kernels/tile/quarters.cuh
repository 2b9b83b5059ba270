// Weights in 4 bits on tensor cores: a word is the a of one mma, eight values of 0 to 15, each for 8
// less. 0x4300 | value is 128 + value in bf16: so sums begin with -136 times those of x.
#pragma once

#include "ptx/mma.cuh"

// -136 times the sum of b, to all sums.
__device__ __forceinline__ void add_least(float (&sums)[4], unsigned b0, unsigned b1) {
    constexpr unsigned kAll = 0xc308c308;
    multiply_add(sums, kAll, kAll, kAll, kAll, b0, b1);
}

__device__ __forceinline__ void add_quarters(float (&sums)[4], unsigned word, unsigned b0,
                                             unsigned b1) {
    unsigned a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = (word >> 4 * i & 0x000f000fu) | 0x43004300u;
    multiply_add(sums, a[0], a[1], a[2], a[3], b0, b1);
}
