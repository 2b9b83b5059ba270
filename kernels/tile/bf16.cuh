// A bf16 value by its bits.
#pragma once

#include "ptx/bf16.cuh"

__device__ __forceinline__ float bf16_value(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ unsigned bf16_bits(float value) {
    return bf16_pair(value, 0.f) & 0xffff;
}

__device__ __forceinline__ float rounded(float value) { return bf16_value(bf16_bits(value)); }
