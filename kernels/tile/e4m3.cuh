// e4m3 values as bf16, exactly: bf16 has the same sign, more exponent and more mantissa.
#pragma once

#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"

// Bytes `first` and `second` of a word, as a pair.
__device__ __forceinline__ unsigned e4m3_pair(unsigned word, int first, int second) {
    const unsigned upper = permute_bytes(word, 0, 0x4 | first << 4 | 0x4 << 8 | second << 12);
    // exponent and mantissa, where bf16 has the lowest bits of its exponent: 2^-120 of the value
    const unsigned small = (upper & 0x80008000) | (upper >> 4 & 0x07f007f0);
    return multiply_add_pairs(small, 0x7b807b80, 0x80008000);
}

// The eight values of two words, in order.
__device__ __forceinline__ uint4 e4m3_as_bf16(unsigned low, unsigned high) {
    return make_uint4(e4m3_pair(low, 0, 1), e4m3_pair(low, 2, 3), e4m3_pair(high, 0, 1),
                      e4m3_pair(high, 2, 3));
}

// 16 e4m3 values, in the order of their bytes.
__device__ __forceinline__ void unpack(const uint4& sixteen, float (&values)[16]) {
    const unsigned words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned pair = e4m3_pair(words[i / 2], i % 2 * 2, i % 2 * 2 + 1);
        values[2 * i] = __uint_as_float(pair << 16);
        values[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
}
