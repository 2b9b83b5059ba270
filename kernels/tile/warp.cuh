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

// The sum over each LANES lanes side by side, a power of two, in all of them.
template <int LANES = 32>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

// Of the first 2 `num` sums the lane keeps half, the upper one if it `is_high`, as the first `num`.
// It gives the others to the lane `apart` from it, and adds what that gives.
template <int ALL>
__device__ __forceinline__ void exchange_halves(float (&sums)[ALL], int num, bool is_high,
                                                int apart) {
#pragma unroll
    for (int i = 0; i < num; ++i) {
        const float kept = is_high ? sums[i + num] : sums[i];
        const float given = is_high ? sums[i] : sums[i + num];
        sums[i] = kept + __shfl_xor_sync(~0u, given, apart);
    }
}

// How many of `bits` are set below `place`: where what belongs to that bit goes in a list.
__device__ __forceinline__ int num_set_below(unsigned bits, int place) {
    return __popc(bits & ((1u << place) - 1));
}
