// The kinds of weights: how they lie in memory, and how they become what a product takes.
//
// A kernel has one of these structs as a template parameter and knows nothing else of its weights.
// Another kind is one more struct here, and a row of KINDS in twell_spec.py. Each one has
//
//     Memory          what pointers to weights point to
//     kMultiple       the number of weights in a row is a multiple of this
//     kInF16          whether it becomes f16 for the mma, where all of x can: x is f16 then, too,
//                     times a power of two (tile/halves.cuh). Elsewhere it becomes bf16
//     kRowScales      whether each row has a scale, fp32: `scaled` multiplies the sum of a row by
//                     it, before a bias is added. Of W_down by rows of neurons there is one for
//                     each column of y instead, which multiplies the sum over neurons
//     kGroupScales    whether groups of weights along a row share scales, as in int4. Such a kind,
//                     and int8, have none of what follows
//     as_bf16         eight of the weights in 16 bytes, number `part`, as operands of the mma
//     as_f16          the same, if kInF16
//     pair            of two units of 16 bits, which are a word, weight `i` of each, as bf16
//     unpack          all weights in 16 bytes, as floats
//     Eight, unpack_eight    eight weights; as floats, on Hopper
//
// and what OfBits counts.
#pragma once

#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "ptx/halves.cuh"
#include "ptx/mma.cuh"
#include "tile/eights.cuh"
#include "tile/halves.cuh"

// What follows from the bits of a weight.
template <int BITS, class MEMORY>
struct OfBits {
    static constexpr bool kGroupScales = false;
    using Memory = MEMORY;
    static constexpr int kBits = BITS;
    static constexpr int kEach = 128 / BITS;   // weights in 16 bytes
    static constexpr int kEights = kEach / 8;  // eights of them: x is so many times as long

    // Of `num` weights that are whole bytes; and where those behind them lie.
    __device__ static constexpr int bytes(int num) { return num * BITS / 8; }
    template <class Int>
    __device__ __forceinline__ static const MEMORY* at(const MEMORY* from, Int num) {
        constexpr int kInOne = 8 * sizeof(MEMORY) / BITS;
        return from + num / kInOne;
    }
};

// ---- bf16

struct Bf16 : OfBits<16, unsigned short> {
    using Eight = uint4;
    static constexpr int kMultiple = 64;
    static constexpr bool kInF16 = false, kRowScales = false;

    __device__ __forceinline__ static float scaled(float sum, const float*, int) { return sum; }

    __device__ __forceinline__ static uint4 as_bf16(const uint4& chunk, int) { return chunk; }
    __device__ __forceinline__ static unsigned pair(unsigned word, int) { return word; }

    __device__ __forceinline__ static void unpack(const uint4& chunk, float (&values)[8]) {
        ::unpack(chunk, values);
    }
    __device__ __forceinline__ static void unpack_eight(const uint4& eight, float (&values)[8]) {
        ::unpack(eight, values);
    }
};

// ---- e4m3

// Bytes `first` and `second` of a word of e4m3, as bf16, exactly: that has the same sign, more
// exponent and more mantissa.
__device__ __forceinline__ unsigned e4m3_pair(unsigned word, int first, int second) {
    const unsigned upper = permute_bytes(word, 0, 0x4 | first << 4 | 0x4 << 8 | second << 12);
    // exponent and mantissa, where bf16 has the lowest bits of its exponent: 2^-120 of the value
    const unsigned small = (upper & 0x80008000) | (upper >> 4 & 0x07f007f0);
    return multiply_add_pairs(small, 0x7b807b80, 0x80008000);
}

struct E4m3 : OfBits<8, unsigned char> {
    using Eight = uint2;
    static constexpr int kMultiple = 128;
    static constexpr bool kInF16 = true, kRowScales = true;

    __device__ __forceinline__ static float scaled(float sum, const float* scales, int row) {
        return sum * scales[row];
    }

    __device__ __forceinline__ static uint4 as_bf16(const uint4& chunk, int part) {
        const unsigned low = part ? chunk.z : chunk.x, high = part ? chunk.w : chunk.y;
        return make_uint4(e4m3_pair(low, 0, 1), e4m3_pair(low, 2, 3), e4m3_pair(high, 0, 1),
                          e4m3_pair(high, 2, 3));
    }
    __device__ __forceinline__ static uint4 as_f16(const uint4& chunk, int part) {
        return e4m3_as_f16(part ? chunk.z : chunk.x, part ? chunk.w : chunk.y);
    }
    __device__ __forceinline__ static unsigned pair(unsigned word, int i) {
        return e4m3_pair(word, i, 2 + i);
    }

    __device__ __forceinline__ static void unpack(const uint4& chunk, float (&values)[16]) {
        const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const unsigned pair = e4m3_pair(words[i / 2], i % 2 * 2, i % 2 * 2 + 1);
            values[2 * i] = __uint_as_float(pair << 16);
            values[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
        }
    }
    __device__ __forceinline__ static void unpack_eight(const uint2& eight, float (&values)[8]) {
        unpack_f16(e4m3_as_f16(eight.x, eight.y), values);
    }
};

// ---- int4: codes of -8 to 7, of which `step` alone has products (tile/nibbles.cuh)

struct Int4 : OfBits<4, unsigned char> {
    static constexpr bool kInF16 = false, kRowScales = false, kGroupScales = true;
};

// ---- int8: codes of -127 to 127, of which `step` alone has products, those of its head

struct Int8 : OfBits<8, signed char> {
    static constexpr bool kInF16 = false, kRowScales = false;
};

// ---- of each kind

// Eight of the weights in 16 bytes, as f16 or bf16.
template <class Weight, bool IN_F16>
__device__ __forceinline__ uint4 operands_of(const uint4& chunk, int part) {
    if constexpr (IN_F16)
        return Weight::as_f16(chunk, part);
    else
        return Weight::as_bf16(chunk, part);
}

// The mma of either.
template <bool IN_F16>
__device__ __forceinline__ void multiply_add_either(float (&sums)[4], unsigned a0, unsigned a1,
                                                    unsigned a2, unsigned a3, unsigned b0,
                                                    unsigned b1) {
    if constexpr (IN_F16)
        multiply_add_f16(sums, a0, a1, a2, a3, b0, b1);
    else
        multiply_add(sums, a0, a1, a2, a3, b0, b1);
}
