// Screened gates in `step` (step.cuh): of W_gate a copy in 4 bits is read whole, and by rows what it
// lets through; of neurons that share one gate, that gate alone.
//
//     a neuron is a candidate     where x . copy > limits[n], or NaN
//
// The first num_own neurons have gates of their own, and a limit each, which all those of a row block
// of 16 have that begins below num_own. All neurons behind these row blocks share the gate of the
// first of them. The copy goes by row blocks, and these by slabs of 64 columns, of 576 bytes:
//
//     [lane 4 g + t][half, pair]  a word: eight values of rows g and g + 8, columns 32 half + 8 t +
//                                 4 pair + 0 .. 3; bits 4 i are of register i's low half, bits
//                                 16 + 4 i of its high half (tile/quarters.cuh)
//     [g][half][2]                bf16: the scales of rows g and g + 8 for these 32 columns
//
// What is not finite in x or in a scale makes sums that are NaN.
//
// Which neurons are candidates is told to all blocks, and each takes as many of them: what fires in
// one block's rows is no more its work than another's.
//
// A unit of the ring is a row block's part of K that two warps have; so four of them follow each
// other, and each warp has its slice of all rows of the block.
#pragma once

#include "decode/step_attend.cuh"
#include "ptx/barriers.cuh"
#include "ptx/copies.cuh"
#include "ptx/handover.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/quarters.cuh"
#include "tile/warp.cuh"

namespace {

struct Screened : Attention {
    using Attention::Attention;
    static constexpr int kSlabs = K / 64 / kWarps;  // of a warp
    static constexpr int kGates = 2 * kGroup;       // rows of the gate, at a time
    static constexpr int kRowBytes = Layers::kRowBytes;

    // The limits of the block's neurons, to shared memory; wait_for_copies waits.
    __device__ __forceinline__ void fetch_limits(const Layer& layer,
                                                 const Share& share) const {
        copy_async_if(thread() < share.num, memory + kLimits + 16 * thread(),
                      layer.limits + kQuad * (share.first + thread()));
        commit_copies();
    }

    // What the copy's gates are, of the warp's part of x: to the sums. `share` goes by row blocks.
    __device__ __forceinline__ void screen(const Share& share) {
        const int lane = thread() % 32, warp = thread() / 32;
#pragma unroll 1
        for (int row = 0; row < kQuad * share.num; row += kScreenRows) {
            float all[4] = {};
#pragma unroll 1
            for (int part = 0; part < 4; ++part) {
                barrier_wait(full(slot), parity);
                if (warp / 2 == part)
                    add_slabs(all, memory + kRing + slot * kUnitBytes +
                                       warp % 2 * (kSlabs * kSlabBytes));
                __syncwarp();
                if (lane == 0) barrier_arrive(empty(slot));
                if (++slot == kUnits) slot = 0, parity ^= 1;
            }
            if (lane % 4 == 0) {  // all columns are the same
                float* to = sums() + (row + lane / 4) * kWarps + warp;
                to[0] = all[0], to[8 * kWarps] = all[2];
            }
        }
    }

    // The gates of the block's part of all candidates: those that fire, {neuron, gate}; how many.
    // Behind them, if their gate fires, `shared` of the neurons that share one. Each warp makes the
    // list for itself.
    __device__ __forceinline__ int list_screened(const Layer& layer, const Share& share,
                                                 const Share& shared, const X& x, unsigned tag,
                                                 float2* list) {
        const int lane = thread() % 32;
        const int num_masks = (layer.num_own + kScreenRows - 1) / kScreenRows;
        const int first_shared = num_masks * kScreenRows;
        int* candidates = at<int>(kCandidates);
        tell_candidates(share, tag);
        const int own = take_candidates(num_masks, tag, candidates);
        const int all = own + (shared.num > 0);
        if (shared.num > 0 && thread() == 0) candidates[own] = first_shared;
        sync_consumers();
        sums_at ^= 1;
        make_gates(layer, candidates, all, x);
        int num = 0;
#pragma unroll 1
        for (int first = 0; first < own; first += 32) {
            const bool is_there = first + lane < own;
            const int neuron = is_there ? candidates[first + lane] : 0;
            const float gate = is_there ? gate_of(layer, first + lane, neuron) : 0.f;
            const bool fired = is_there && fires(gate);
            const unsigned fire = __ballot_sync(~0u, fired);
            if (fired)
                list[num + num_set_below(fire, lane)] = make_float2(__int_as_float(neuron), gate);
            num += __popc(fire);
        }
        if (shared.num > 0) {
            const float gate = gate_of(layer, own, first_shared);
            if (fires(gate)) {
                for (int i = lane; i < shared.num; i += 32)
                    list[num + i] =
                        make_float2(__int_as_float(first_shared + shared.first + i), gate);
                num += shared.num;
            }
        }
        __syncwarp();
        return num;
    }

  private:
    // The warp's slabs of a row block, at `from`.
    __device__ __forceinline__ void add_slabs(float (&all)[4], unsigned from) const {
        const int lane = thread() % 32;
        const unsigned x = memory + dealt() + lane % 4 * 16;
#pragma unroll 2
        for (int slab = 0; slab < kSlabs; ++slab, from += kSlabBytes) {
            const uint4 words = load_shared(from + 16 * lane);
            const uint2 scales = read_shared_pair(from + 512 + lane / 4 * 8);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // eights lie as {x, z, y, w}
                const uint4 v = load_shared(x + (2 * slab + half) * 64);
                float own[4] = {};
                add_least(own, v.x, v.z), add_least(own, v.y, v.w);
                add_quarters(own, half ? words.z : words.x, v.x, v.z);
                add_quarters(own, half ? words.w : words.y, v.y, v.w);
                const unsigned both = half ? scales.y : scales.x;
#pragma unroll
                for (int j = 0; j < 4; j += 2)
                    all[j] += own[j] * __uint_as_float(j ? both & 0xffff0000u : both << 16);
            }
        }
    }

    // Tells all blocks which of this one's neurons are candidates.
    __device__ __forceinline__ void tell_candidates(const Share& share, unsigned tag) const {
        const int row = thread(), lane = thread() % 32;
        const bool is_there = row < kQuad * share.num;
        const bool may_fire =
            is_there && !(sum_of_warps(sums() + row * kWarps) <= at<float>(kLimits)[row]);
        const unsigned all = __ballot_sync(~0u, may_fire);
        if (is_there && lane % kScreenRows == 0)
            store_relaxed_word(mask_words() + (kQuad * share.first + row) / kScreenRows,
                               tagged(all >> lane & 0xffff, tag));
    }

    // The block's share of all candidates, in ascending order; how many.
    __device__ __forceinline__ int take_candidates(int num_masks, unsigned tag,
                                                   int* candidates) const {
        constexpr int kMasks = (kMostRows / kScreenRows * 132 + kConsumers - 1) / kConsumers;
        constexpr int kFours = (kMasks + 3) / 4;
        const int first = thread() * 4 * kFours, lane = thread() % 32;
        unsigned masks[4 * kFours];
        int num = 0;
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const uint4 four = await_masks(first + 4 * i, num_masks, tag);
            masks[4 * i] = four.x, masks[4 * i + 1] = four.y;
            masks[4 * i + 2] = four.z, masks[4 * i + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < 4 * kFours; ++i) num += __popc(masks[i]);
        const int upto = scan_warp(num, lane);
        int* counts = at<int>(kCounts);
        if (lane == 31) counts[thread() / 32] = upto;
        sync_consumers();
        int place = upto - num, all = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            if (i < thread() / 32) place += counts[i];
            all += counts[i];
        }
        const int blocks = gridDim.x, begin = all * block() / blocks;
        const int own = all * (block() + 1) / blocks - begin;
#pragma unroll
        for (int i = 0; i < 4 * kFours; ++i)
#pragma unroll 1
            for (unsigned left = masks[i]; left; left &= left - 1, ++place)
                if (static_cast<unsigned>(place - begin) < static_cast<unsigned>(own))
                    candidates[place - begin] = (first + i) * kScreenRows + __ffs(left) - 1;
        return own;
    }

    // Four of the masks, without their tags; 0 behind the last one.
    __device__ __forceinline__ uint4 await_masks(int first, int num, unsigned tag) const {
        unsigned tries = 0;
        uint4 v = {};
#pragma unroll 1
        while (first < num) {
            v = load_relaxed(mask_words() + first);
            const bool has[3] = {first + 1 < num, first + 2 < num, first + 3 < num};
            const unsigned wrong = (v.x ^ tag) | (has[0] ? v.y ^ tag : 0) |
                                   (has[1] ? v.z ^ tag : 0) | (has[2] ? v.w ^ tag : 0);
            v = make_uint4(v.x >> 16, has[0] ? v.y >> 16 : 0, has[1] ? v.z >> 16 : 0,
                           has[2] ? v.w >> 16 : 0);
            if (!(wrong & 0xffff)) break;
            lose_patience(tries);
        }
        return v;
    }

    // Row i of a group of gates, in one half of a neuron's place.
    __device__ __forceinline__ int place_of(int in, int i) const {
        return kRows + (in * kGroup + i % kGroup) * kNeuronBytes + i / kGroup * kRowBytes;
    }

    // Of a group of candidates, by the first warp.
    __device__ __forceinline__ void bring_gates(const Layer& layer, const int* candidates,
                                                int first, int num, int group) const {
        const int lane = thread() % 32, here = min(kGates, num - first), in = group % kGroups;
        if (lane == 0 && here > 0) barrier_expect_bytes(row_full(in), here * kRowBytes);
        __syncwarp();
        if (lane < here)
            copy_bulk(memory + place_of(in, lane),
                      layer.gate + static_cast<long long>(candidates[first + lane]) * K, kRowBytes,
                      row_full(in), passing_by());
    }

    // The parts of the candidates' gates' sums, in their order.
    __device__ __forceinline__ void make_gates(const Layer& layer, const int* candidates,
                                               int num, const X& x) {
        if (thread() < 32) {
            bring_gates(layer, candidates, 0, num, row_group);
            if (kGroups > 1 && num > kGates)
                bring_gates(layer, candidates, kGates, num, row_group + 1);
        }
#pragma unroll 1
        for (int first = 0; first < num; first += kGates, ++row_group) {
            const int in = row_group % kGroups;
            barrier_wait(row_full(in), row_group / kGroups & 1);
#pragma unroll 1
            for (int i = 0; i < kGates && first + i < num; i += kGroup) {
                float parts[kQuadUnits];
#pragma unroll
                for (int j = 0; j < kQuadUnits; ++j) {
                    Unit<kWeightBytes> unit;
                    load_unit<kWeightBytes>(unit, memory + place_of(in, i) +
                                                      j * kUnitRows * kNeuronBytes +
                                                      place_in_unit<kWeightBytes>(kNeuronBytes));
                    parts[j] = part_of_sum<kWeightBytes>(unit, x);
                }
                store_sums<kWeightBytes>(parts, kQuadUnits, sums() + (first + i) * kWarps);
            }
            if (first + kGroups * kGates < num) {
                sync_consumers();  // all have read what lay there
                if (thread() < 32)
                    bring_gates(layer, candidates, first + kGroups * kGates, num,
                                row_group + kGroups);
            }
        }
        sync_consumers();
    }

    __device__ __forceinline__ float gate_of(const Layer& layer, int i, int neuron) const {
        float sum = sum_of_warps(sums() + i * kWarps);
        if (layer.gate_bias) sum += bf16_value(layer.gate_bias[neuron]);
        return rounded(sum);
    }
};

}  // namespace
