// The head of `step` (step.cuh) over int4 layers: rows of 8 bits, whose logits are rough, and how
// far from them those of the bf16 head can be, by which refine.cu computes those that matter.
//
//   head         int8 [V, K]: codes of -127 to 127. Block b, 64 columns, of row r lies in place
//                b ^ r % 2, so that the rows that a warp reads at once are in different banks. Of
//                eight columns the even ones come first
//   head_scales  fp32 [V, 2]: a row's scale, and its error: times the norm of x, by how much its
//                two logits differ at most (rough_head.py says what that holds)
//   logits       the rough ones
//   most         fp32 [V]: what the logit of the bf16 head is at most, or NaN
//   least        fp32 [blocks][warp]: of some rows, the largest of what it is at least
//
// A row's sum goes as in step_codes.cuh, with x as it is there; a unit of the ring is a quad.
#pragma once

#include "decode/step_codes_ffn.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

static_assert(Units<Head>::kRows == kQuad, "a unit is a quad");
static_assert(kMostSums <= kConsumers, "a thread a row");

template <>
struct Columns<Int8, false> {
    Columns<Int4> whole;
    float norm;
};

// Of rows g, g + 8 ..
template <>
struct Taken<Int8, false> {
    uint4 codes[kAtOnce][kBlocks];

    __device__ __forceinline__ uint4 operands(int j, int b) const { return codes[j][b]; }
    __device__ __forceinline__ float scale(int, int) const { return 1.f; }
};

struct CodesHead : CodesFfn {
    using CodesFfn::CodesFfn;
    using CodesFfn::deal;
    using CodesFfn::take;

    __device__ __forceinline__ void deal(const uint4 (&eights)[kEights], Columns<Int8>& x) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            if (!has_eight(i)) continue;
            float values[8];
            unpack(eights[i], values);
            sum += sum_of_squares(values);
        }
        // 2^-112: more than what is lost of squares that are too small for fp32
        sum = sum_of_block(sum_over_lanes(sum)) + 0x1p-112f;
        x.norm = sum * reciprocal_root(sum);
        deal(eights, x.whole);
    }

    // Of the block's share of rows.
    __device__ __forceinline__ void multiply_head(const Columns<Int8>& x) {
        const Share share(division(3), block());
        const int num_rows = kQuad * share.num;
        float least = __int_as_float(0xff800000);
#pragma unroll 1
        for (int first = 0; first < num_rows; first += kMostSums) {
            const int num = min(kMostSums, num_rows - first);
            const int row = kQuad * share.first + first + thread();
            uint2 of_row = make_uint2(0, 0);
            if (thread() < num) of_row = load_streamed_pair(args.head_scales + 2 * row);
#pragma unroll 1
            for (int i = 0; i < num; i += kTakenRows) {
                Taken<Int8> taken;
                float parts[kAtOnce];
                take(taken, min(kTakenRows, num - i) / kQuad);
                multiply_by(parts, taken, x.whole.back, [&](int b) { return x.whole.of[b]; });
                store_parts(parts, kAtOnce, sums() + i * kWarps);
            }
            sync_consumers();
            if (thread() < num) give_logit(row, of_row, x.norm, least);
            flip_sums();
        }
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2)
            least = fmaxf(least, __shfl_xor_sync(~0u, least, apart));
        if (lane() == 0) args.least[block() * kWarps + warp()] = least;
    }

  private:
    // The next `num` units, out of the ring; if they are few, the last several times.
    __device__ __forceinline__ void take(Taken<Int8>& taken, int num) {
        const int lane = this->lane(), row = lane / 4 % kQuad;
        const int in_unit = row * Int8::bytes(K) + (warp() ^ row % 2) * 64 + lane % 4 * 16;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int low = await_unit(min(2 * j, num - 1));
            const int high = await_unit(min(2 * j + 1, num - 1));
            const unsigned from = memory + kRing + (lane < 16 ? low : high) * kUnitBytes + in_unit;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) taken.codes[j][b] = load_shared(from + 512 * b);
        }
        leave_units(num);
    }

    // What becomes of the thread's row, whose scale and error are `of_row`. A logit that is not
    // finite says nothing of the other one.
    __device__ __forceinline__ void give_logit(int row, const uint2& of_row, float norm,
                                               float& least) const {
        const float infinity = __int_as_float(0x7f800000);
        const float logit =
            sum_of_warps(sums() + thread() * kWarps) * (__uint_as_float(of_row.x) / kPerCode);
        const float error = fabsf(logit) < infinity ? __uint_as_float(of_row.y) * norm : infinity;
        args.logits[row] = logit;
        args.most[row] = logit + error;
        least = fmaxf(least, logit - error);
    }
};

}  // namespace
