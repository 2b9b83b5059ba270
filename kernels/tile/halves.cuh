// Eight f16 values, 16 bytes; and bf16 values as f16, which has less range but more bits: times a
// power of two by which the largest of them is near 2^15. What is lost is below 2^-39 of that. NaN
// and infinities stay.
#pragma once

#include "ptx/bf16.cuh"
#include "ptx/halves.cuh"

// The largest of eight values and `most`, in each half, by their bits without the sign.
__device__ __forceinline__ unsigned most_of(const uint4& v, unsigned most) {
    return __vmaxu2(__vmaxu2(most, __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff)),
                    __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
}

// 2^(14 - the exponent of the largest), by the exponent of a bf16: that is 2^(bits >> 7 - 127).
__device__ __forceinline__ unsigned power_for_f16(unsigned most) {
    return min(268 - (most >> 7), 253u);
}

// `powers`: that power in both halves, power << 7 | power << 23.
__device__ __forceinline__ unsigned scaled_f16(unsigned values, unsigned powers) {
    const unsigned scaled = multiply_add_pairs(values, powers, 0x80008000);
    return f16_pair(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
}

// What sums of such values are multiplied by to be those of the values.
__device__ __forceinline__ float power_back(unsigned power) {
    return __uint_as_float((254 - power) << 23);
}

__device__ __forceinline__ void unpack_f16(const uint4& eight, float (&values)[8]) {
    unpack_f16_pair(eight.x, values[0], values[1]);
    unpack_f16_pair(eight.y, values[2], values[3]);
    unpack_f16_pair(eight.z, values[4], values[5]);
    unpack_f16_pair(eight.w, values[6], values[7]);
}
