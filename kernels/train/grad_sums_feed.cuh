// What the kernels of grad_sums.cu read of the lists: a warp's fours, round after round, by
// cp.async onto stages of its own.
#pragma once

#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "tile/lists.cuh"
#include "train/grad_lists.cuh"

namespace {

constexpr int kCodeBytes = 32;                 // of a round
constexpr int kStep = 2 * BATCH, kStages = 2;  // rounds of a step, at most
constexpr unsigned kNothing = ~0u;             // in place of a number of rounds: no four is left

enum class Sums { Both, One, Merged };  // grad_gate_up, grad_down, grad_x

// What of a slot's values a kernel reads.
template <Sums KIND>
struct Values {
    static constexpr int kBytes = KIND == Sums::One ? 32 : 64;  // of a round
    static constexpr int kStageBytes = kStep * (kCodeBytes + kBytes);
};

struct Lists {
    const int2* heads;
    const uint4* codes;
    const uint4* values;
    const unsigned* masks;
};

// A step on its way.
struct Step {
    int left;           // rounds of its four from there on
    unsigned masks[2];  // of its slots, for 8 rounds each
};

// Brings the rounds of a warp's fours onto its stages, step after step. Heads are looked up for 32
// fours at a time, one a lane, and for the 32 behind before they are needed.
template <Sums KIND>
struct Feed {
    Lists lists;                  // from the lane's place on
    const int2* heads;            // of four 0 in this panel
    const uint4 *codes, *values;  // of the step to come, the lane's
    const unsigned* masks;
    int num_fours, stride, panels, lane;
    int four;                                               // of the step to come
    unsigned counts, counts_behind, firsts, firsts_behind;  // the lane's
    int from;                                               // the lane with the four's head
    int left;                                               // rounds of the four that are to come

    __device__ __forceinline__ Feed(const Lists& all, int panel, int num_fours, int first,
                                    int stride, int panels, int lane)
        : lists{all.heads, opaque(all.codes + lane), opaque(all.values + lane),
                opaque(all.masks + (lane >> 3) * 4 + (lane & 3))},
          heads(all.heads + panel), num_fours(num_fours), stride(stride), panels(panels),
          lane(lane), four(first), counts_behind(kNothing), firsts_behind(0), from(0) {
        look_up(first + lane * stride);
        look_up(first + (32 + lane) * stride);
        seek();
    }

    __device__ __forceinline__ void look_up(int four) {
        counts = counts_behind, counts_behind = kNothing;
        firsts = firsts_behind;
        const int2* at = offset_by(heads, four, 8 * panels);
        const unsigned* head = reinterpret_cast<const unsigned*>(at);
        load_constant_word_if(four < num_fours, head, firsts_behind);
        load_constant_word_if(four < num_fours, head + 1, counts_behind);
    }

    __device__ __forceinline__ void seek() {
        left = __shfl_sync(~0u, static_cast<int>(counts), from);
        const unsigned first = __shfl_sync(~0u, firsts, from);
        codes = offset_by(lists.codes, first, kCodeBytes);
        values = offset_by(lists.values, first, Values<KIND>::kBytes);
        masks = offset_by(lists.masks, first / BATCH, FOUR_MASKS * 4);
    }

    // Starts to bring a step, to the lane's place on a stage: codes, and behind them values.
    __device__ __forceinline__ Step bring(unsigned stage) {
        const int num = left;
        const unsigned values_at = stage + kStep * kCodeBytes;
        if (lane / 8 * CODES_TOGETHER < num) copy_async(stage, codes);
        if constexpr (KIND == Sums::One) {
            if (lane / 2 < num) copy_async(values_at, values);
        } else {
            if (lane / 4 < num) copy_async(values_at, values);
            if (lane / 4 + BATCH < num)
                copy_async(values_at + BATCH * Values<KIND>::kBytes, values + 32);
        }
        commit_copies();
        const Step step{num, load_constant_or_leave(num > 0, masks),
                        load_constant_or_leave(num > BATCH, masks + FOUR_MASKS)};
        if (num > kStep) {
            left -= kStep;
            codes += kStep * kCodeBytes / 16, values += kStep * Values<KIND>::kBytes / 16;
            masks += 2 * FOUR_MASKS;
        } else {
            four += stride;
            if (++from == 32) from = 0, look_up(four + (32 + lane) * stride);
            seek();
        }
        return step;
    }
};

}  // namespace
