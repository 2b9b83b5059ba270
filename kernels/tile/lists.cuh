// The lists between the packed gate and the two sparse products: sizes, and where a slot lies.
// `plan` writes them, `up` reads the pairs, `hidden` and `down` the rounds; the head of plan.cu
// describes them.
#pragma once
#include "spec.cuh"

using spec::TILE;               // gate columns that a cell of counts and entries spans
using spec::GROUP;              // consecutive tokens that share rounds: the n of one mma
using spec::ROUND;              // slots a round holds: the k of one mma
constexpr int CLASSES = 8;      // bank classes: columns whose low three bits are equal share banks
constexpr int NEURONS = GROUP;  // consecutive neurons whose pairs lie together: the n of one mma

using spec::COLUMN_BITS;  // of a code: token in group << 13 | column in panel
constexpr int COLUMN_MASK = (1 << COLUMN_BITS) - 1;
constexpr unsigned PAD = 0x8000;  // value of a slot without a pair: -0, which adds nothing

constexpr int NOT_FINITE = 1 << 30;  // in a count: the tile holds NaN or Inf

// A round is four records of 16 bytes, one for each thread of a quad. Record t holds the slots
// 2t, 2t + 1, 2t + 8, 2t + 9: four values, then their four codes, 16 bits each.
constexpr int ROUND_RECORDS = 4;
constexpr int ROUND_HALVES = spec::ROUND_BYTES / 2;  // 16-bit units of a round
constexpr int CODE_HALVES = 4;  // a slot's code lies so many units behind its value

constexpr unsigned NO_LINK = ~0u;  // of a slot without a pair

// The i-th slot of a class: round i / 2, slot class + 8 * (i & 1). Slots are counted from round 0
// in the order in which they lie in memory.
__device__ __forceinline__ int slot_of_class(int bank_class, int i) {
    return (i >> 1) * ROUND + (bank_class >> 1) * 4 + (i & 1) * 2 + (bank_class & 1);
}

// Where the value of such a slot lies, in 16-bit units.
__device__ __forceinline__ int value_of_slot(int slot) { return slot / 4 * 8 + slot % 4; }
