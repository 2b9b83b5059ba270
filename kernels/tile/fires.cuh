// What fires (README.md): a gate above 0, or NaN, as it is once it is rounded to bf16.
#pragma once

#include "ptx/bf16.cuh"

__device__ __forceinline__ bool fires(float gate) { return !(gate <= 0.f); }

// The gate where it fires, else +0.
__device__ __forceinline__ float keep_fired(float gate) { return fires(gate) ? gate : 0.f; }

// 0xffff in each half that fires. From sm_90 on.
__device__ __forceinline__ unsigned fires_pair(unsigned gates) {
    return greater_or_nan_pair(gates, 0);
}
