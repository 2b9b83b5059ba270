// Powers of two that float32 holds as normal numbers.
#pragma once

__device__ __forceinline__ float power_of_two_of(int exponent) {
    return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
}

// Exactly.
__device__ __forceinline__ float one_over_power_of_two(float power) {
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The least e with value < 2^e, of a normal number that is not negative.
__device__ __forceinline__ int exponent_above(float value) {
    return static_cast<int>(__float_as_uint(value) >> 23) - 126;
}
