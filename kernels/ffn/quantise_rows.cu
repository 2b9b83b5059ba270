// quantise_rows: each row of x in e4m3, and for each a power of two that brings its h into f16's
// range; for the kernels of many tokens over e4m3 weights.
//
//   values [M, K] e4m3 = x / scale, rounded to nearest
//   token_scales float2 [M] = scale, power
//
// scale = max |row| / 448 in float32, at least the smallest normal number, as in twell_fp8.py; of a
// row with NaN or infinity it is one of them, and so is each of the row's products. Each
// h = gate * up of the row, divided by power, lies below 2^16. No product is computed for that; it
// follows from an upper bound,
//
//     |gate| <= scale s_gate |values| |w| + |b_gate|,   |w| <= 448 sqrt(K)       and so for up
//
// with the largest scales and biases of all neurons. Of real weights and inputs the bound lies up
// to 2^20 above the largest h. f16 then still has all its 11 bits for h down to 2^-9 of the largest
// one, and errs by less than 2^-20 of that one below.
//
// Launch: blocks of 512 threads, any grid; a warp has a row at a time, 2048 columns of it in
// registers. K and N multiples of 8. Each block looks through the scales and biases of all neurons
// first.
//
// quantise_inputs: the same for the walks, whose h is bf16, and for torch's dense products: no
// bound, each power is 1. For torch the scales also stand alone, scales float32 [M]; and
// heavy_count becomes 0. Launch: a block a row, of a multiple of 32 threads up to 512. What follows
// may start early (ptx/pdl.cuh).
//
// quantise_hidden: the same of h = relu(gate) * up, rounded to bf16, for torch's product of h and
// W_down. gate and up are bf16 [M, N] with `pitch` numbers from row to row, values e4m3 [M, N],
// scales float32 [M]; N and pitch multiples of 8. Launch: a block a row, as there. h of up to 2048
// columns for each 64 threads stays in registers; what is behind those is formed twice.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/halves.cuh"
#include "ptx/pdl.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"
#include "tile/powers.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kWarps = spec::QUANTISE_BLOCK / 32;
constexpr float kLargest = 448.f;                // of e4m3
constexpr float kSmallestScale = 1.17549435e-38f;  // and the smallest normal number
constexpr float kLargestFinite = 3.40282347e38f;
constexpr float kRounded = 1.125f;               // values lie so much above x / scale at most
constexpr int kHalfBits = 15;                    // f16 holds 2^15, and rounding adds less than that
constexpr int kLeastPower = -112, kMostPower = 113;  // 1 / power, and any h / power, are finite

// What bounds gate and up: the largest scale and bias of all neurons.
struct Largest {
    float scale, bias;
};

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

__device__ __forceinline__ Largest largest_of(const float* scales, const unsigned short* biases,
                                              int num) {
    Largest own{0, 0};
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
        own.scale = max(own.scale, __ldg(scales + i));
        if (biases) own.bias = max(own.bias, bf16_value(__ldg(biases + i) & 0x7fff));
    }
    return {greatest_of_block(own.scale), greatest_of_block(own.bias)};
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

// A row of x, from some column on.
struct InputRow {
    const unsigned short* x;

    __device__ __forceinline__ InputRow from(int at) const { return {x + at}; }

    // The eight columns from `at` on, or zeros.
    __device__ __forceinline__ uint4 eight_if(bool wanted, int at) const {
        return wanted ? load_streamed(x + at) : uint4{};
    }

    __device__ __forceinline__ uint4 eight(int at) const { return load_constant(x + at); }
};

// The same of h = relu(gate) * up.
struct HiddenRow {
    const unsigned short *gate, *up;

    __device__ __forceinline__ HiddenRow from(int at) const { return {gate + at, up + at}; }

    // Without a branch, so that all loads of a thread are under way together.
    __device__ __forceinline__ uint4 eight_if(bool wanted, int at) const {
        uint4 gates = {}, ups = {};
        load_streamed_if(wanted, gate + at, gates);
        load_streamed_if(wanted, up + at, ups);
        return hidden(gates, ups);
    }

    __device__ __forceinline__ uint4 eight(int at) const {
        return hidden(load_constant(gate + at), load_constant(up + at));
    }

  private:
    __device__ __forceinline__ static uint4 hidden(const uint4& gates, const uint4& ups) {
        return make_uint4(hidden_pair(gates.x, ups.x), hidden_pair(gates.y, ups.y),
                          hidden_pair(gates.z, ups.z), hidden_pair(gates.w, ups.w));
    }

    // torch rounds to float32 first. The bits are the same: no product of two bf16 numbers has a
    // float32 that lies half-way between two bf16 numbers when it does not itself.
    __device__ __forceinline__ static unsigned hidden_pair(unsigned gates, unsigned ups) {
        return multiply_pairs(gates & fires_pair(gates), ups);
    }
};

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

// An exponent that no gate (or up) of the row reaches.
__device__ __forceinline__ int exponent_of(const Largest& largest, float scale, float norm, int K) {
    const float bound =
        scale * norm * (kRounded * kLargest) * sqrtf(static_cast<float>(K)) * largest.scale +
        largest.bias;
    return exponent_above(bound < kLargestFinite ? bound : kLargestFinite);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK, 2)
    quantise_rows(const unsigned short* x, int M, int N, int K, const float* s_gate,
                  const float* s_up, const unsigned short* b_gate, const unsigned short* b_up,
                  unsigned char* values, float2* token_scales) {
    const Largest gate = largest_of(s_gate, b_gate, N), up = largest_of(s_up, b_up, N);
    const int lane = threadIdx.x % 32;
    for (int m = blockIdx.x * kWarps + threadIdx.x / 32; m < M; m += gridDim.x * kWarps) {
        const long long first = static_cast<long long>(m) * K;
        const Share<8, InputRow> own({x + first}, K, lane, 32);
        const float scale = scale_of(bf16_value(__reduce_max_sync(~0u, own.largest_bits())));
        const float norm = sqrtf(sum_over_lanes(own.round(scale, values + first)));
        const int exponents = exponent_of(gate, scale, norm, K) + exponent_of(up, scale, norm, K);
        const int power = max(kLeastPower, min(exponents - kHalfBits, kMostPower));
        if (lane == 0) token_scales[m] = make_float2(scale, power_of_two_of(power));
    }
}

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK)
    quantise_inputs(const unsigned short* x, int K, unsigned char* values, float2* token_scales,
                   float* scales, int* heavy_count) {
    let_next_start();
    const long long first = static_cast<long long>(blockIdx.x) * K;
    const Share<1, InputRow> own({x + first}, K, threadIdx.x, blockDim.x);
    const float scale = scale_of(greatest_of_block(bf16_value(own.largest_bits())));
    own.round(scale, values + first);
    if (threadIdx.x > 0) return;
    token_scales[blockIdx.x] = make_float2(scale, 1.f);
    scales[blockIdx.x] = scale;
    if (blockIdx.x == 0) *heavy_count = 0;
}

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK, 2)
    quantise_hidden(const unsigned short* gate, const unsigned short* up, int N, int pitch,
                    unsigned char* values, float* scales) {
    const long long row = blockIdx.x, first = row * pitch;
    const Share<4, HiddenRow> own({gate + first, up + first}, N, threadIdx.x, blockDim.x);
    const float scale = scale_of(greatest_of_block(bf16_value(own.largest_bits())));
    own.round(scale, values + row * N);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
