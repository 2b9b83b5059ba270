// Products of codes of 4 bits, on tensor cores for bytes: as whole numbers, which are exact.
//
// A word has eight codes of -8 to 7, of columns 0 to 7: byte i has column 2 i in its upper half and
// 2 i + 1 in its lower half. `even_codes` and `odd_codes` are bytes of 16 times the codes.
//
// What they are multiplied by is made a whole number of 16 bits, and that two bytes:
//
//     value = number x back       number = 256 upper + lower       -128 <= upper, lower <= 127
//
// `back` is a power of two, by which the largest of some values that go together has 15 bits: so
// those that are 2^-7 of it or more are exact, as they are bf16, and what is lost is below 2^-15 of
// it. If one of them is not finite `back` is NaN.
#pragma once

#include "ptx/arithmetic.cuh"
#include "tile/halves.cuh"

__device__ __forceinline__ unsigned even_codes(unsigned word) { return word & 0xf0f0f0f0; }
__device__ __forceinline__ unsigned odd_codes(unsigned word) { return word << 4 & 0xf0f0f0f0; }

// Of values whose largest is `most`, by its upper 16 bits without the sign.
struct Whole {
    float times, back;

    __device__ __forceinline__ explicit Whole(unsigned most) {
        const unsigned power = power_for_f16(most);
        times = __uint_as_float(power << 23);
        back = most < 0x7f80 ? power_back(power) : __uint_as_float(0x7fc00000);
    }

    // The lower byte of the number is its lowest; the upper one is the second byte of 128 more.
    __device__ __forceinline__ int operator()(float value) const {
        return min(__float2int_rn(value * times), 127 * 256 + 127);
    }
};

// The lowest bytes of four words; the second ones.
__device__ __forceinline__ unsigned lowest_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return permute_bytes(permute_bytes(a, b, 0x0040), permute_bytes(c, d, 0x0040), 0x5410);
}
__device__ __forceinline__ unsigned second_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return permute_bytes(permute_bytes(a, b, 0x0051), permute_bytes(c, d, 0x0051), 0x5410);
}

// Rows of four bytes become columns.
__device__ __forceinline__ void transpose_bytes(unsigned (&rows)[4]) {
    const unsigned a = permute_bytes(rows[0], rows[1], 0x5140);
    const unsigned b = permute_bytes(rows[2], rows[3], 0x5140);
    const unsigned c = permute_bytes(rows[0], rows[1], 0x7362);
    const unsigned d = permute_bytes(rows[2], rows[3], 0x7362);
    rows[0] = permute_bytes(a, b, 0x5410), rows[1] = permute_bytes(a, b, 0x7632);
    rows[2] = permute_bytes(c, d, 0x5410), rows[3] = permute_bytes(c, d, 0x7632);
}
