// Rows in e4m3, a scale each, as round_rows of twell_fp8.py has them: what quantise_rows.cu and
// quantise_hidden.cu share.
#pragma once

#include "spec.cuh"
#include "ptx/global.cuh"
#include "ptx/halves.cuh"
#include "tile/eights.cuh"

namespace {

constexpr int kWarps = spec::QUANTISE_BLOCK / 32;
constexpr float kLargest = 448.f;                // of e4m3
constexpr float kSmallestScale = 1.17549435e-38f;  // and the smallest normal number

// The greatest of the block's numbers, none of which is negative, in all threads.
__device__ __forceinline__ float greatest_of_block(float value) {
    __shared__ int of_warps[kWarps];
    const int lane = threadIdx.x % 32;
    const int of_warp = __reduce_max_sync(~0u, __float_as_int(value));
    if (lane == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    const int num_warps = blockDim.x / 32;
    const int all = __reduce_max_sync(~0u, lane < num_warps ? of_warps[lane] : 0);
    __syncthreads();
    return __int_as_float(all);
}

__device__ __forceinline__ float scale_of(float largest) {
    const float scale = largest * (1 / kLargest);
    return scale < kSmallestScale ? kSmallestScale : scale;  // NaN stays
}

// x / scale as IEEE division has it, by the nearest 1 / scale: a step of Newton's. -0 stays. In
// rows below 4e-32 what is left may be too small a number, and a tie, one of a million, round
// otherwise.
__device__ __forceinline__ float divided(float x, float scale, float one_over) {
    const float quotient = x * one_over;
    return fmaf(fmaf(quotient, scale, -x), -one_over, quotient);
}

// What one of `threads` that share a row has of it: every `threads`th eight of its columns. KEPT
// of them stay in registers between the two passes, those behind are read again.
template <int KEPT, class Row>
class Share {
  public:
    __device__ __forceinline__ Share(const Row& row, int K, int thread, int threads)
        : row_(row.from(8 * thread)), first_(8 * thread), left_(K - first_), step_(8 * threads) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            kept_[i] = row_.eight_if(step_ * i < left_, step_ * i);
    }

    // The largest number, by its bits: as integers, bf16 numbers without signs have their order,
    // NaN above all.
    __device__ __forceinline__ int largest_bits() const {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) most = max(most, most_of(kept_[i]));
        for (int at = step_ * KEPT; at < left_; at += step_)
            most = max(most, most_of(row_.eight(at)));
        return static_cast<int>(most);
    }

    // Writes the row's values; returns the sum of their squares, about.
    __device__ __forceinline__ float round(float scale, unsigned char* values) const {
        const float one_over = 1 / scale;
        values += first_;
        float squares = 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (step_ * i < left_)
                squares += round_eight(kept_[i], scale, one_over, values + step_ * i);
        for (int at = step_ * KEPT; at < left_; at += step_)
            squares += round_eight(row_.eight(at), scale, one_over, values + at);
        return squares;
    }

  private:
    Row row_;
    int first_, left_, step_;  // the first column; columns from there on; from eight to eight
    uint4 kept_[KEPT];

    __device__ __forceinline__ static unsigned most_of(const uint4& eight) {
        const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            most = max(most, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
        return most;
    }

    // Returns the sum of the squares.
    __device__ __forceinline__ static float round_eight(const uint4& eight, float scale,
                                                        float one_over, unsigned char* values) {
        float x[8], squares = 0;
        unpack(eight, x);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            x[i] = divided(x[i], scale, one_over), squares += x[i] * x[i];
        unsigned words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            words[i] = e4m3_two(x[4 * i], x[4 * i + 1]) |
                       e4m3_two(x[4 * i + 2], x[4 * i + 3]) << 16;
        store_pair(values, words[0], words[1]);
        return squares;
    }
};

}  // namespace
