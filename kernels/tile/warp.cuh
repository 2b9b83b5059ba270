// What the 32 lanes of a warp do together.
#pragma once

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ int scan_warp(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}
