// SiLU as transformers computes it in bf16.
#pragma once

#include "ptx/arithmetic.cuh"
#include "tile/bf16.cuh"

// Of a gate that is rounded to bf16; rounded.
__device__ __forceinline__ float silu_of(float gate) {
    constexpr float kLog2OfE = 1.44269504f;
    return rounded(gate * reciprocal(1.f + power_of_two(-kLog2OfE * gate)));
}
