// h = relu(gate) * up, rounded to bf16, in e4m3 with a scale a row (quantise.cuh), for torch's
// product of h and W_down.
//
// quantise_hidden: gate and up are products, bf16 [M, N], with `pitch` numbers from row to row;
// values e4m3 [M, N], scales float32 [M]; N and pitch multiples of 8. How many neurons fire is added
// to counts int32 [M], if that is not null.
//
// quantise_bare_hidden: the same of sums that lack their scales, of e4m3 values alone. A gate is
// sum * s_gate [N] * s_x [M] + b_gate [N], rounded to bf16, and so is up; biases bf16, or null.
//
// scale_sums: y [M, N] = sums [M, N] * s_w [N] * s_x [M] + bias [N], rounded to bf16, and onto that
// residual [M, N]; bias and residual may be null. N a multiple of 8.
//
// Launch: a block a row, of a multiple of 32 threads up to 512. h of up to 2048 columns for each 64
// threads stays in registers; what is behind those is formed twice.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ffn/quantise.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"

namespace {

constexpr int kKept = 4;  // eights of h that a thread has in registers

// torch rounds the product to float32 first. The bits are the same: no product of two bf16 numbers
// has a float32 that lies half-way between two bf16 numbers when it does not itself.
__device__ __forceinline__ unsigned hidden_pair(unsigned gates, unsigned ups) {
    return multiply_pairs(gates & fires_pair(gates), ups);
}

__device__ __forceinline__ uint4 hidden_eight(const uint4& gates, const uint4& ups) {
    return make_uint4(hidden_pair(gates.x, ups.x), hidden_pair(gates.y, ups.y),
                      hidden_pair(gates.z, ups.z), hidden_pair(gates.w, ups.w));
}

// A row of h, from some column on.
struct HiddenRow {
    const unsigned short *gate, *up;

    __device__ __forceinline__ HiddenRow from(int at) const { return {gate + at, up + at}; }

    // The eight columns from `at` on, or zeros: without a branch, so that all loads of a thread are
    // under way together.
    __device__ __forceinline__ uint4 eight_if(bool wanted, int at) const {
        uint4 gates = {}, ups = {};
        load_streamed_if(wanted, gate + at, gates);
        load_streamed_if(wanted, up + at, ups);
        return hidden_eight(gates, ups);
    }

    __device__ __forceinline__ uint4 eight(int at) const {
        return hidden_eight(gates(at), load_constant(up + at));
    }

    __device__ __forceinline__ uint4 gates(int at) const { return load_constant(gate + at); }
};

// Sums of one product, and what they lack: of its columns, from some column on.
struct BareSums {
    const unsigned short* sums;
    const float* scales;
    const unsigned short* bias;  // or null

    __device__ __forceinline__ BareSums from(int at) const {
        return {sums + at, scales + at, bias ? bias + at : bias};
    }

    __device__ __forceinline__ uint4 eight(int at, float scale) const {
        float x[8], of_columns[8];
        unpack(load_constant(sums + at), x);
        load_eight(scales + at, of_columns);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = x[i] * of_columns[i] * scale;
        if (bias) add(load_constant(bias + at), x);  // -0 + 0 would be 0
        return pack(x);
    }

    __device__ __forceinline__ static void add(const uint4& eight, float (&x)[8]) {
        float added[8];
        unpack(eight, added);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += added[i];
    }

  private:
    __device__ __forceinline__ static void load_eight(const float* from, float (&numbers)[8]) {
        const uint4 halves[2] = {load_constant(from), load_constant(from + 4)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            numbers[4 * i] = __uint_as_float(halves[i].x);
            numbers[4 * i + 1] = __uint_as_float(halves[i].y);
            numbers[4 * i + 2] = __uint_as_float(halves[i].z);
            numbers[4 * i + 3] = __uint_as_float(halves[i].w);
        }
    }
};

// As HiddenRow.
struct BareHiddenRow {
    BareSums gate, up;
    float scale;  // of the row of x

    __device__ __forceinline__ BareHiddenRow from(int at) const {
        return {gate.from(at), up.from(at), scale};
    }

    __device__ __forceinline__ uint4 eight_if(bool wanted, int at) const {
        return wanted ? eight(at) : uint4{};
    }

    __device__ __forceinline__ uint4 eight(int at) const {
        return hidden_eight(gates(at), up.eight(at, scale));
    }

    __device__ __forceinline__ uint4 gates(int at) const { return gate.eight(at, scale); }
};

template <class Row>
__device__ __forceinline__ void count_fired(const Row& row, int N, int* count) {
    int fired = 0;
    for (int at = 8 * threadIdx.x; at < N; at += 8 * blockDim.x) {
        const uint4 gates = row.gates(at);
        const unsigned words[4] = {gates.x, gates.y, gates.z, gates.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) fired += __popc(fires_pair(words[i]) & 0x10001);
    }
    fired = __reduce_add_sync(~0u, fired);
    if (threadIdx.x % 32 == 0 && fired) atomicAdd(count, fired);
}

template <class Row>
__device__ __forceinline__ void quantise(const Row& row, int N, int* counts, unsigned char* values,
                                         float* scales) {
    const Share<kKept, Row> own(row, N, threadIdx.x, blockDim.x);
    const float scale = scale_of(greatest_of_block(bf16_value(own.largest_bits())));
    own.round(scale, values + static_cast<long long>(blockIdx.x) * N);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    if (counts) count_fired(row, N, counts + blockIdx.x);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK, 2)
    quantise_hidden(const unsigned short* gate, const unsigned short* up, int N, int pitch,
                    int* counts, unsigned char* values, float* scales) {
    const long long first = static_cast<long long>(blockIdx.x) * pitch;
    quantise(HiddenRow{gate + first, up + first}, N, counts, values, scales);
}

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK, 2)
    quantise_bare_hidden(const unsigned short* gate, const unsigned short* up, int N, int pitch,
                         const float* s_x, const float* s_gate, const float* s_up,
                         const unsigned short* b_gate, const unsigned short* b_up, int* counts,
                         unsigned char* values, float* scales) {
    const long long first = static_cast<long long>(blockIdx.x) * pitch;
    const BareHiddenRow row{
        {gate + first, s_gate, b_gate}, {up + first, s_up, b_up}, __ldg(s_x + blockIdx.x)};
    quantise(row, N, counts, values, scales);
}

extern "C" __global__ void __launch_bounds__(spec::QUANTISE_BLOCK)
    scale_sums(const unsigned short* sums, int N, const float* s_x, const float* s_w,
               const unsigned short* bias, const unsigned short* residual, unsigned short* y) {
    const long long first = static_cast<long long>(blockIdx.x) * N;
    const float scale = __ldg(s_x + blockIdx.x);
    const BareSums row{sums + first, s_w, bias};
    for (int at = 8 * threadIdx.x; at < N; at += 8 * blockDim.x) {
        uint4 eight = row.eight(at, scale);
        if (residual) {
            float x[8];
            unpack(eight, x);
            BareSums::add(load_constant(residual + first + at), x);
            eight = pack(x);
        }
        *reinterpret_cast<uint4*>(y + first + at) = eight;
    }
}
