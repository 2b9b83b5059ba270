// Two bf16 values in a word, the first in the low half; each result is rounded to nearest even.
#pragma once

__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// From sm_90 on, as add_pairs.
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}

__device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
    unsigned sums;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    return sums;
}

// a b + c, rounded once.
__device__ __forceinline__ unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    unsigned sums;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
    return sums;
}

// 0xffff in each half where a > b, or where one of them is NaN. From sm_90 on.
__device__ __forceinline__ unsigned greater_or_nan_pair(unsigned a, unsigned b) {
    unsigned halves;
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(halves) : "r"(a), "r"(b));
    return halves;
}
