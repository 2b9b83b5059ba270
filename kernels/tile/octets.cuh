// Weighted sums of rows that lie in shared memory: what `down` and grad_sums have in common.
//
// A plane has 16 bytes of each row, 8 columns. A round is 16 slots, each with a row and a value:
//
//     sums [8, 8 columns] += V [8, 16 slots] rows [16 slots, 8 columns]
//
// V is the upper half of the a of an mma; of its lower half nothing is wanted, and whatever a
// register holds is there. The rows are its b, two matrices of 8 x 8 by ldmatrix: so four matrices,
// a register each, are two rounds of one plane, and each lane looks up one row for two rounds.
#pragma once
#include "ptx/arithmetic.cuh"
#include "ptx/mma.cuh"

constexpr int kPlaneRow = 16;  // bytes of a row in a plane
constexpr int kFlip = 4;       // row n of plane 1 lies in place n ^ kFlip

// The rows of a round's slots 0-7 and 8-15, and of the round behind if there are two: lane i has
// the address of that of slot i % 16 of round i / 16. If there is one, the upper half is not used.
template <bool TWO>
__device__ __forceinline__ void load_octets(unsigned (&octets)[4], unsigned smem_row) {
    if (TWO)
        load_matrices_transposed(octets, smem_row);
    else
        load_two_matrices_transposed(octets, smem_row);
}

// A lane has of row g of V the slots 2t, 2t + 1 in `low`, 2t + 8, 2t + 9 in `high`; and in sums[0]
// and sums[1] columns 2t, 2t + 1 of row g of the sums. The other two sums are anything.
__device__ __forceinline__ void add_octets(float (&sums)[4], unsigned low, unsigned high,
                                           unsigned octet0, unsigned octet1) {
    multiply_add_upper(sums, low, high, octet0, octet1);
}

// The values that are a row's: of each byte of its mask, one a slot, bit i says whether the slot of
// round i is.
__device__ __forceinline__ void keep_own(uint2 values, unsigned mask, int i, unsigned& low,
                                         unsigned& high) {
    const unsigned signs = mask << (7 - i);
    low = values.x & permute_bytes(signs, 0, 0x9988);
    high = values.y & permute_bytes(signs, 0, 0xbbaa);
}
