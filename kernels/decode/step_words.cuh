// What the blocks of `step` (step.cuh) hand each other: words that say themselves whether they are
// there.
//
// A word for other blocks holds a value and a tag, the number of its use. Who waits for it reads it
// until it has the tag: no fence, no flag beside it, and as fast as L2 is. Each word is written
// before each use anew, so its last tag is the one before.
#pragma once

#include "ptx/barriers.cuh"
#include "ptx/handover.cuh"

// A float with its tag.
__device__ __forceinline__ unsigned long long tagged(float value, unsigned tag) {
    return static_cast<unsigned long long>(tag) << 32 | __float_as_uint(value);
}

// The bits of a bf16 with as many of a tag.
__device__ __forceinline__ unsigned tagged(unsigned bits, unsigned tag) {
    return bits << 16 | (tag & 0xffff);
}

// Where the word of a column lies: of 64 columns the first fours of all eights come first, so that
// lanes that await eights read whole lines.
__device__ __forceinline__ int word_of(int column) {
    return (column & ~63) | (column & 4) << 3 | (column & 56) >> 1 | (column & 3);
}

// Two floats, each with a whole word of tag beside it: {low, tag, high, tag}.
__device__ __forceinline__ void store_floats(uint4* to, float low, float high, unsigned tag) {
    store_relaxed_longs(to, tagged(low, tag), tagged(high, tag));
}

__device__ __forceinline__ uint4 load_floats(const uint4* from) {
    unsigned long long low, high;
    load_relaxed_longs(from, low, high);
    return make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                      static_cast<unsigned>(high), static_cast<unsigned>(high >> 32));
}

// The eight warps that compute.
__device__ __forceinline__ void sync_consumers() { sync_some(1, 256); }
