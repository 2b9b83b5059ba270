// Operands of wgmma (ptx/wgmma.cuh) in shared memory, as the copy engine leaves them there.
#pragma once

#include "ptx/wgmma.cuh"

// A descriptor tells wgmma where an operand lies, in units of 16 bytes: its address, the "leading"
// and the "stride" offset, and the swizzle. The unit of the swizzle is an atom of 8 rows, 1024
// bytes; base_offset stays 0 as long as addresses are multiples of that, but for what is added
// along a row.
__device__ __forceinline__ unsigned long long swizzled_descriptor(unsigned address,
                                                                  unsigned leading,
                                                                  unsigned stride) {
    const unsigned long long swizzle_128 = 1;
    // in a cluster the address tells the block too, in bits that are not the descriptor's
    return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
           static_cast<unsigned long long>(stride >> 4) << 32 | swizzle_128 << 62;
}

// K-major, one box of any number of rows. Stride: from 8 rows to the next 8, one atom. Leading: not
// used, 1 by the book. What the next product sums over is 32 bytes further along each row.
struct Along {
    static constexpr bool kAcross = false;
    static constexpr int kNext = 32 >> 4;  // from product to product

    __device__ __forceinline__ static unsigned long long descriptor(unsigned address) {
        return swizzled_descriptor(address, 16, 1024);
    }

    __device__ __forceinline__ static void multiply(float (&sums)[128], unsigned long long rows,
                                                    unsigned long long columns, int add) {
        wgmma_64x256x16<0>(sums, rows, columns, add);
    }
};

// MN-major, boxes of 64 rows one behind the other, 64 columns each. An atom is 64 columns x 8 of
// what is summed over. Leading: from 64 columns to the next 64, one box. Stride: from 8 of what is
// summed over to the next 8, one atom; the next 16 are two atoms further.
struct Across {
    static constexpr bool kAcross = true;
    static constexpr int kNext = 2048 >> 4;
    static constexpr int kBoxBytes = 64 * 128;

    __device__ __forceinline__ static unsigned long long descriptor(unsigned address) {
        return swizzled_descriptor(address, kBoxBytes, 1024);
    }

    __device__ __forceinline__ static void multiply(float (&sums)[128], unsigned long long rows,
                                                    unsigned long long columns, int add) {
        wgmma_64x256x16<1>(sums, rows, columns, add);
    }
};
