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
// bound, each power is 1. For torch the scales also stand alone, scales float32 [M], and a number,
// `one`, becomes 1; heavy_count becomes 0. Launch: a block a row, of a multiple of 32 threads up to
// 512. What follows may start early (ptx/pdl.cuh).
#include "spec.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "ffn/quantise.cuh"
#include "tile/bf16.cuh"
#include "tile/powers.cuh"
#include "tile/warp.cuh"

namespace {

constexpr float kLargestFinite = 3.40282347e38f;
constexpr float kRounded = 1.125f;               // values lie so much above x / scale at most
constexpr int kHalfBits = 15;                    // f16 holds 2^15, and rounding adds less than that
constexpr int kLeastPower = -112, kMostPower = 113;  // 1 / power, and any h / power, are finite

// What bounds gate and up: the largest scale and bias of all neurons.
struct Largest {
    float scale, bias;
};

__device__ __forceinline__ Largest largest_of(const float* scales, const unsigned short* biases,
                                              int num) {
    Largest own{0, 0};
    for (int i = threadIdx.x; i < num; i += blockDim.x) {
        own.scale = max(own.scale, __ldg(scales + i));
        if (biases) own.bias = max(own.bias, bf16_value(__ldg(biases + i) & 0x7fff));
    }
    return {greatest_of_block(own.scale), greatest_of_block(own.bias)};
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
                    float* scales, float* one, int* heavy_count) {
    let_next_start();
    const long long first = static_cast<long long>(blockIdx.x) * K;
    const Share<1, InputRow> own({x + first}, K, threadIdx.x, blockDim.x);
    const float scale = scale_of(greatest_of_block(bf16_value(own.largest_bits())));
    own.round(scale, values + first);
    if (threadIdx.x > 0) return;
    token_scales[blockIdx.x] = make_float2(scale, 1.f);
    scales[blockIdx.x] = scale;
    if (blockIdx.x == 0) *one = 1.f, *heavy_count = 0;
}
