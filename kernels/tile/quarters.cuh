// Weights in 4 bits, 0 to 15, by numbers of 8 bits with a sign, on tensor cores, exactly.
#pragma once

#include "ptx/mma.cuh"

// Sums of 32 products are whole numbers below 2^16: as the bits of a float, kWhole and the sum.
constexpr float kWhole = 12582912.f;  // 1.5 x 2^23
constexpr int kWholeBits = 0x4b400000;

// Of 16 rows and 32 columns: `low` and `high` have, a byte a column, what a row g and the row g + 8
// have in columns 4 t and 16 + 4 t, and the three behind each.
__device__ __forceinline__ void multiply_quarters(int (&sums)[4], unsigned low, unsigned high,
                                                  unsigned b0, unsigned b1) {
    constexpr unsigned kQuarters = 0x0f0f0f0f;
    multiply_bytes(sums, low & kQuarters, low >> 4 & kQuarters, high & kQuarters,
                   high >> 4 & kQuarters, b0, b1, kWholeBits);
}
