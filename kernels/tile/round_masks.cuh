// Which slots of a round belong to which token of the group, as `down` wants to know it: a bit
// each. `hidden` makes these masks of the codes in the rounds, once for all blocks of `down`.
//
//   masks uint32 [(groups, panels), ceil(group_rounds / 8), 32]: of each batch of 8 rounds a word a
//   lane. Lane 4 g + t has, in bit i of byte j, whether slot j of record t in round i holds a pair
//   of token g; of rounds that there are not, anything. Pads count as pairs of token 0.
#pragma once
#include "spec.cuh"
#include "tile/lists.cuh"

using spec::BATCH;  // rounds that have their masks together
using spec::BATCH_MASKS;

__device__ __forceinline__ int batches_of(int num_rounds) {
    return (num_rounds + BATCH - 1) / BATCH;
}

// Bits 0, 4, .. 28 moved together.
__device__ __forceinline__ unsigned every_fourth_bit(unsigned bits) {
    bits &= 0x11111111;
    bits = (bits | bits >> 3) & 0x03030303;
    bits = (bits | bits >> 6) & 0x000f000f;
    return (bits | bits >> 12) & 0xff;
}

// The lane's mask; lane 4 i + t brings the codes of record t in round i.
__device__ __forceinline__ unsigned batch_mask(uint2 codes, int lane) {
    unsigned mask = 0;
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
        const unsigned code = (slot < 2 ? codes.x : codes.y) >> (slot % 2 * 16);
        unsigned same = ~0u;
#pragma unroll
        for (int bit = 0; bit < 3; ++bit) {
            const unsigned set = __ballot_sync(~0u, (code & 1u << (COLUMN_BITS + bit)) != 0);
            same &= lane >> (2 + bit) & 1 ? set : ~set;
        }
        mask |= every_fourth_bit(same >> (lane & 3)) << (8 * slot);
    }
    return mask;
}
