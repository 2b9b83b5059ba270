// Integers, pointers and fp32: what the compiler would do in more instructions, or more exactly.
#pragma once

// a b + c
__device__ __forceinline__ unsigned scale_and_add(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// `index` times `bytes` further on.
template <class T>
__device__ __forceinline__ T* offset_by(T* pointer, unsigned index, unsigned bytes) {
    T* moved;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(moved) : "r"(index), "r"(bytes), "l"(pointer));
    return moved;
}

// Bytes of {high, low}, one for each of the selector's nibbles; a nibble's top bit asks for the
// byte's sign eight times over instead.
__device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

__device__ __forceinline__ float reciprocal_root(float value) {
    float root;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}

__device__ __forceinline__ float reciprocal(float value) {
    float one_over;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one_over) : "f"(value));
    return one_over;
}

__device__ __forceinline__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
