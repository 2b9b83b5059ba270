// Screened gates in `step` (step.cuh): of W_gate a copy in 4 bits is read whole, and by rows what
// it lets through.
//
//     a neuron is a candidate     where x . copy > limits[n], or NaN
//
// The first num_own neurons have gates of their own, and a limit each, which all those of a row
// block of 16 have that begins below num_own. All neurons behind these row blocks share the gate of
// the first of them. The copy goes by row blocks, and these by panels of 512 columns, of 4608
// bytes. Lane 16 half + g has of rows 8 half + 0 .. 7 the 32 columns of group g:
//
//     [row][lane][4][4]  bytes: in the low half columns 8 i + 0 .. 3, in the high half 8 i + 4
//                        .. 7; 8 more than they are worth
//     [lane][row]        bf16: the scales
//
// x beside it has 8 bits, by a scale for each 32 columns. What is not finite in x or in a scale
// makes sums that are NaN.
//
// A unit of the ring is a part of a row block, and one warp's: so what may fire is known without
// any other warp. Eight row blocks' first parts follow each other, then their second ones.
#pragma once

#include "decode/step_rows.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bytes.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"

namespace {

// Whole numbers below 2^22 and these bits are, as a float, kWhole and the number.
constexpr float kWhole = 12582912.f;  // 1.5 x 2^23
constexpr int kWholeBits = 0x4b400000;

struct Screened : Rows {
    using Rows::Rows;

    // x in 8 bits: bytes [panel][half of a group][group][16]. And of each 32 columns {kWhole and
    // 128 times their sum, scale / 16}.
    __device__ __forceinline__ void round_x(const uint4 (&eights)[kEights]) const {
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            float values[8], most = 0.f, rest = 0.f;
            unpack(eights[i], values);
#pragma unroll
            for (int c = 0; c < 8; ++c)
                most = fmaxf(most, fabsf(values[c])), rest += 0.f * values[c];
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
            const int eight = eight_of(i), group = eight / 4, half = eight / 2 % 2;
            at<uint2>(kBytesOfX)[group / 16 * 64 + half * 32 + group % 16 * 2 + eight % 2] =
                make_uint2(words[0], words[1]);
            if (eight % 4 == 0)
                at<float2>(kGroupsOfX)[group] = make_float2(
                    kWhole + 128.f * static_cast<float>(sum), most * (1.f / (16 * 127)) + rest);
        }
    }

    // Which neurons of the block's `num_blocks` row blocks, from `first`, are candidates: of each
    // row block a word, bit 2 r for its row r.
    __device__ __forceinline__ void screen(const Layer& layer, int first, int num_blocks) {
        const int lane = thread() % 32, warp = thread() / 32;
        float limits[kWarpBlocks] = {};
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
            const int block = b * kWarps + warp;
            if (block < num_blocks)
                limits[b] = __ldg(layer.limits + (first + block) * kScreenRows + lane / 2);
        }
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
            const int num_here = min(kWarps, num_blocks - b * kWarps);
            if (warp >= num_here) break;
            float sums[8] = {};
#pragma unroll 1
            for (int part = 0; part < kScreenParts; ++part) {
                int in = slot + b * kWarps * kScreenParts + part * num_here + warp;
                unsigned phase = parity;
#pragma unroll 1
                for (; in >= kUnits; in -= kUnits) phase ^= 1;
                barrier_wait(full(in), phase);
#pragma unroll 1
                for (int i = 0; i < kPartPanels; ++i)
                    add_panel(sums, memory + kRing + in * kUnitBytes + i * kPanelBytes,
                              part * kPartPanels + i);
                __syncwarp();
                if (lane < kWarps) barrier_arrive(empty(in));  // for the other warps, too
            }
            const float sum = sum_of_row(sums, lane);
            const unsigned all = __ballot_sync(~0u, lane % 2 == 0 && !(sum <= limits[b]));
            if (lane == 0) at<unsigned>(kMasks)[b * kWarps + warp] = all;
        }
#pragma unroll 1
        for (slot += kScreenParts * num_blocks; slot >= kUnits; slot -= kUnits) parity ^= 1;
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
            const unsigned mask = row < num_blocks * kScreenRows ? masks[row / kScreenRows] : 0;
            const bool may_fire = mask >> 2 * (row % kScreenRows) & 1;
            const unsigned all = __ballot_sync(~0u, may_fire);
            if (may_fire) candidates[own + num_set_below(all, lane)] = first * kScreenRows + row;
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
    // A panel of a row block, the `panel`th of its rows: onto the sums of the lane's eight rows.
    __device__ __forceinline__ void add_panel(float (&sums)[8], unsigned from, int panel) const {
        const int lane = thread() % 32, group = 16 * panel + lane % 16;
        const unsigned bytes = memory + kBytesOfX + 512 * panel + lane % 16 * 16;
        const uint4 x[2] = {load_shared(bytes), load_shared(bytes + 256)};
        const uint2 of_x = read_shared_pair(memory + kGroupsOfX + 8 * group);
        const float whole = __uint_as_float(of_x.x), scale = __uint_as_float(of_x.y);
        float scales[8];
        unpack(load_shared(from + 4096 + 16 * lane), scales);
#pragma unroll
        for (int row = 0; row < 8; ++row) {
            const uint4 words = load_shared(from + 512 * row + 16 * lane);
            int low = 0, high = kWholeBits;  // of what is in high halves 16 times the sum
            add_quarters(low, high, words.x, x[0].x, x[0].y);
            add_quarters(low, high, words.y, x[0].z, x[0].w);
            add_quarters(low, high, words.z, x[1].x, x[1].y);
            add_quarters(low, high, words.w, x[1].z, x[1].w);
            sums[row] += (__int_as_float(16 * low + high) - whole) * (scale * scales[row]);
        }
    }

    __device__ __forceinline__ static void add_quarters(int& low, int& high, unsigned word,
                                                        unsigned x_low, unsigned x_high) {
        low = add_products_of_bytes(low, word & 0x0f0f0f0f, x_low);
        high = add_products_of_bytes(high, word & 0xf0f0f0f0, x_high);
    }

    // Over the lanes that share rows. Lanes 2 r and 2 r + 1 have row r's.
    __device__ __forceinline__ static float sum_of_row(float (&sums)[8], int lane) {
        exchange_halves(sums, 4, lane & 8, 8);
        exchange_halves(sums, 2, lane & 4, 4);
        exchange_halves(sums, 1, lane & 2, 2);
        return sums[0] + __shfl_xor_sync(~0u, sums[0], 1);
    }
};

}  // namespace
