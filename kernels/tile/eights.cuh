// Eight bf16 values, 16 bytes of memory, and RMSNorm on them: fp32 inside, rounded to bf16 where
// torch rounds.
#pragma once

#include "ptx/bf16.cuh"
#include "tile/bf16.cuh"

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
