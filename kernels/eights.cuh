// Eight bf16 values, 16 bytes of memory, and the arithmetic of RMSNorm and attention on them: fp32
// inside, rounded to bf16 where torch rounds. One instruction a function, no CUDA header.
#pragma once

#include "twell.cuh"

// ---- memory

// Into `v`, of what nobody writes while the kernel runs; nothing if it is not wanted. A predicate,
// no branch.
__device__ __forceinline__ void load_streamed_if(bool wanted, const void* from, uint4& v) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0;"
        " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

// As `load_streamed_if`, of a word, and asked for where it stands.
__device__ __forceinline__ int load_here(const int* from) {
    int word;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}

// ---- arithmetic

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

__device__ __forceinline__ float rounded(float value) { return bf16_value(bf16_bits(value)); }

__device__ __forceinline__ void unpack(const uint4& eight, float (&values)[8]) {
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
    return make_uint4(bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3]),
                      bf16_pair(values[4], values[5]), bf16_pair(values[6], values[7]));
}

__device__ __forceinline__ float sum_of_squares(const float (&values)[8]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[i] * values[i];
    return sum;
}

// As transformers' LlamaRMSNorm: rounded before the weight, and after it.
__device__ __forceinline__ void normalise(float (&values)[8], float root, const uint4& weight) {
    float weights[8];
    unpack(weight, weights);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = rounded(rounded(values[i] * root) * weights[i]);
}
