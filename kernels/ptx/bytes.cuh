// Sums of products of bytes.
#pragma once

// sum and the products of four bytes of a, without a sign, by those of b, with one.
__device__ __forceinline__ int add_products_of_bytes(int sum, unsigned a, unsigned b) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}
