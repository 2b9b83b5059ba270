// Screened gates in `step` (step.cuh): of W_gate a copy in 4 bits is read whole, and by rows what it
// lets through.
//
//     a neuron is a candidate     where x . copy > limits[n], or NaN
//
// The first num_own neurons have gates of their own, and a limit each, which all those of a row block
// of 16 have that begins below num_own. All neurons behind these row blocks share the gate of the
// first of them. The copy goes by row blocks, and these by slabs of 64 columns, of 576 bytes:
//
//     [lane 4 g + t][half, pair, 4]  bytes: rows g, in the low half, and g + 8 of column 32 half +
//                                    16 pair + 4 t + 0 .. 3; 8 more than they are worth
//     [g][half][2]                   bf16: the scales of rows g and g + 8 for these 32 columns
//
// x beside it has 8 bits, by a scale for each 32 columns. What is not finite in x or in a scale makes
// sums that are NaN.
//
// A unit of the ring is a part of a row block, and one warp's: so what may fire is known without any
// other warp. Eight row blocks' first parts follow each other, then their second ones.
#pragma once

#include "decode/step_rows.cuh"
#include "ptx/barriers.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"
#include "tile/quarters.cuh"
#include "tile/warp.cuh"

namespace {

struct Screened : Rows {
    using Rows::Rows;

    // x in 8 bits: bytes [slab][t][half, pair, 4], by the columns of the copy. And of each 32 columns
    // {kWhole and 8 times their sum, scale}.
    __device__ __forceinline__ void round_x(const uint4 (&eights)[kEights]) const {
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            float values[8], most = 0.f, rest = 0.f;
            unpack(eights[i], values);
#pragma unroll
            for (int c = 0; c < 8; ++c) most = fmaxf(most, fabsf(values[c])), rest += 0.f * values[c];
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            rest = sum_over_lanes<4>(rest);  // NaN, if any of them is not finite
            const float up = most > 0.f ? 127.f / most : 0.f;
            int sum = 0;
            unsigned words[2] = {};
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int byte = __float2int_rn(values[c] * up);
                sum += byte, words[c / 4] |= (byte & 0xff) << 8 * (c % 4);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (!has_eight(i)) continue;
            const int eight = eight_of(i), half = eight / 4 % 2, pair = eight / 2 % 2;
            unsigned* to = at<unsigned>(kBytesOfX) + eight / 8 * 16 + 2 * half + pair;
#pragma unroll
            for (int j = 0; j < 2; ++j) to[(eight % 2 * 2 + j) * 4] = words[j];
            if (eight % 4 == 0)
                at<float2>(kGroupsOfX)[eight / 4] =
                    make_float2(kWhole + 8.f * static_cast<float>(sum), most * (1.f / 127) + rest);
        }
    }

    // Which neurons of the block's `num_blocks` row blocks, from `first`, are candidates: of each row
    // block two words, of its first and last eight rows, bits 4 g.
    __device__ __forceinline__ void screen(const Layer& layer, int first, int num_blocks) {
        const int lane = thread() % 32, warp = thread() / 32;
        float sums[kWarpBlocks][2] = {}, limits[kWarpBlocks][2] = {};
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
            const int block = b * kWarps + warp;
            const float* from = layer.limits + (first + block) * kScreenRows + lane / 4;
            if (block < num_blocks) limits[b][0] = __ldg(from), limits[b][1] = __ldg(from + 8);
        }
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
            const int num_here = min(kWarps, num_blocks - b * kWarps);
            if (warp >= num_here) break;
#pragma unroll 1
            for (int part = 0; part < kScreenParts; ++part) {
                int in = slot + b * kWarps * kScreenParts + part * num_here + warp;
                unsigned phase = parity;
#pragma unroll 1
                for (; in >= kUnits; in -= kUnits) phase ^= 1;
                barrier_wait(full(in), phase);
                add_slabs(sums[b], memory + kRing + in * kUnitBytes, part * kPartSlabs);
                __syncwarp();
                if (lane < kWarps) barrier_arrive(empty(in));  // for the other warps, too
            }
        }
#pragma unroll 1
        for (slot += kScreenParts * num_blocks; slot >= kUnits; slot -= kUnits) parity ^= 1;
        unsigned* masks = at<unsigned>(kMasks);
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
            const int block = b * kWarps + warp;
#pragma unroll
            for (int high = 0; high < 2; ++high) {  // all columns are the same
                const bool may_fire = lane % 4 == 0 && !(sums[b][high] <= limits[b][high]);
                const unsigned all = __ballot_sync(~0u, may_fire);
                if (lane == 0 && block < num_blocks) masks[2 * block + high] = all;
            }
        }
    }

    // Those of the candidates that fire, and their gates; how many. Each warp makes the lists for
    // itself.
    __device__ __forceinline__ int list_screened(const Layer& layer, int first, int num_blocks,
                                                 int* list, float* gates) const {
        const int lane = thread() % 32;
        int* candidates = at<int>(kCandidates);
        float* sums = at<float>(kCandidateGates);
        const unsigned* masks = at<unsigned>(kMasks);
        int own = 0;
#pragma unroll 1
        for (int row = lane; row - lane < num_blocks * kScreenRows; row += 32) {
            const unsigned mask = row < num_blocks * kScreenRows ? masks[row / 8] : 0;
            const bool may_fire = mask >> 4 * (row % 8) & 1;
            const unsigned all = __ballot_sync(~0u, may_fire);
            if (may_fire)
                candidates[own + num_set_below(all, lane)] = first * kScreenRows + row;
            own += __popc(all);
        }
        __syncwarp();
        sum_rows(
            own, [&](int i) { return row_at(layer.gate, candidates[i]); },
            [&](int i, float sum) {
                if (layer.gate_bias) sum += bf16_value(layer.gate_bias[candidates[i]]);
                sums[i] = rounded(sum);
            });
        sync_consumers();
        int num = 0;
#pragma unroll 1
        for (int i = lane; i - lane < own; i += 32) {
            const float gate = i < own ? sums[i] : 0.f;
            const bool fired = i < own && fires(gate);
            const unsigned all = __ballot_sync(~0u, fired);
            const int place = num + num_set_below(all, lane);
            if (fired) list[place] = candidates[i], gates[place] = gate;
            num += __popc(all);
        }
        __syncwarp();
        return num;
    }

  private:
    // A lane's part of a slab, and x beside it.
    struct Slab {
        uint4 words, x, groups;
        uint2 scales;
    };

    __device__ __forceinline__ static void load_slab(Slab& slab, unsigned from, unsigned x,
                                                     unsigned groups) {
        slab.words = load_shared(from);
        slab.x = load_shared(x);
        slab.groups = load_shared(groups);
    }

    // Slabs of a row block, the first of which is slab `first` of a row: onto its rows' sums. The next
    // one is on its way to registers.
    __device__ __forceinline__ void add_slabs(float (&sums)[2], unsigned from, int first) const {
        const int lane = thread() % 32;
        const unsigned scales = from + 512 + lane / 4 * 8;
        const unsigned x = memory + kBytesOfX + 64 * first + lane % 4 * 16;
        const unsigned groups = memory + kGroupsOfX + 16 * first;
        from += 16 * lane;
        Slab now, next;
        const auto load = [&](Slab& slab, int i) {
            load_slab(slab, from + i * kSlabBytes, x + i * 64, groups + i * 16);
            slab.scales = read_shared_pair(scales + i * kSlabBytes);
        };
        load(now, 0);
#pragma unroll 4
        for (int i = 0; i < kPartSlabs; ++i) {
            if (i + 1 < kPartSlabs) load(next, i + 1);
            int own[2][4];
            multiply_quarters(own[0], now.words.x, now.words.y, now.x.x, now.x.y);
            multiply_quarters(own[1], now.words.z, now.words.w, now.x.z, now.x.w);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float whole = __uint_as_float(half ? now.groups.z : now.groups.x);
                const float scale = __uint_as_float(half ? now.groups.w : now.groups.y);
                const unsigned both = half ? now.scales.y : now.scales.x;
                sums[0] += (__int_as_float(own[half][0]) - whole) *
                           (scale * __uint_as_float(both << 16));
                sums[1] += (__int_as_float(own[half][2]) - whole) *
                           (scale * __uint_as_float(both & 0xffff0000u));
            }
            now = next;
        }
    }
};

}  // namespace
