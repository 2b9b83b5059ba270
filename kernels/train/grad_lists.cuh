// The lists of the backward pass: where its sums read which row, and with what values.
//
// A pair is a (token, neuron that fired). Rows that get sums (tokens for grad_x, neurons for the
// weights' gradients) stand in fours; the rows that are summed up (the other side) in panels. For
// each q = four * num_panels + panel, `grad_lists` lays out rounds of 16 slots, as `plan` does for
// `down`, but a slot has several values:
//
//   heads  int2 [Q]: first round, a multiple of 8, and number of rounds
//   codes  uint32 [rounds / 4, 2, 16]: of slot s in round r of the two, and of the round two behind
//          in the upper half: row in four << 13 | other row in panel
//   pairs  uint2 [rounds, 2, 4]: record t has the slots 2t, 2t + 1, 2t + 8, 2t + 9, 16 bits each:
//          grad_gate of the slots' pairs, then grad_up
//   hidden uint2 [rounds, 4]: h of them, in the same order
//   masks  uint32 [rounds / 8, 16]: of 8 rounds, word 4 r + t has in bit i of byte j whether slot j
//          of record t in round i belongs to row r of the four
//
// Slots prefer other rows of their bank class (tile/lists.cuh); which slot a pair takes depends on
// the pairs alone, never on time.
#pragma once
#include "spec.cuh"
#include "tile/round_masks.cuh"

constexpr int FOUR = spec::GRAD_FOUR;  // rows that share rounds: two values each, the n of one mma
constexpr int LIST_ALIGNMENT = BATCH;  // of a list's first round
constexpr int FOUR_MASKS = 16;         // words for 8 rounds
constexpr int CODES_TOGETHER = 4;      // rounds

// Whether there are sums of heavy rows, to which those of the lists are added.
__device__ __forceinline__ bool any_heavy(const int* heavy_count) {
    return heavy_count && *heavy_count > 0;
}
