// What all of `step` (step.cuh) stands on: what is known of a layer, patience, and arithmetic on
// eights.
#pragma once

#include "decode/attend_softmax.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "ptx/compiler.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"
#include "tile/weights.cuh"

namespace {

constexpr unsigned kPatience = 1u << 26;  // times that a word is looked at: half a minute

// Its weights, by rows, are of one kind; all else is bf16.
template <class Kind>
struct LayerOf {
    using Memory = typename Kind::Memory;
    const unsigned short* input_norm;
    const Memory* qkv;
    const unsigned short* qkv_bias;
    const Memory* out;
    const unsigned short *out_bias, *ffn_norm;
    const Memory *gate, *up, *down;
    const unsigned short *gate_bias, *up_bias, *down_bias;
    unsigned short *keys, *values;
    const unsigned short *q_norm, *k_norm;
    // of the screened form: a copy of the gate, and limits (step_screen.cuh)
    const unsigned char* copy;
    const float* limits;
    // how many neurons have gates of their own: all behind these share one. Ignored when dense
    int window, num_own;
};
// In which order weights are read; up and down as a whole in the dense form.
constexpr int kQkv = 0, kOut = 1, kGate = 2, kUp = 3, kDown = 4;
// With the scales by that order, if there are any: of rows, but of columns of down. Where groups
// share scales, those of down alone: bf16 [group of neurons][K].
template <class Kind, bool HAS_SCALES = Kind::kRowScales, bool HAS_GROUPS = Kind::kGroupScales>
struct alignas(16) ScaledLayer : LayerOf<Kind> {
    __device__ __forceinline__ const float* scales_of(int) const { return nullptr; }
};
template <class Kind>
struct alignas(16) ScaledLayer<Kind, true, false> : LayerOf<Kind> {
    const float* scales[5];

    __device__ __forceinline__ const float* scales_of(int weight) const { return scales[weight]; }
};
template <class Kind>
struct alignas(16) ScaledLayer<Kind, false, true> : LayerOf<Kind> {
    const unsigned short* down_scales;

    __device__ __forceinline__ const float* scales_of(int) const { return nullptr; }
};
// What a step's clocks are noted behind, in the order of STEP_STAGES (twell_spec.py). The first
// three are of each phase: of q, k and v, of o, of the gate.
struct Stage {
    enum { kAwaited, kDealt, kMultiplied, kOfPhase };
    enum { kAttended = 3 * kOfPhase, kListed, kUp, kDown, kParts, kGiven, kAll };
};
static_assert(Stage::kAll == spec::NUM_STEP_STAGES);
// How the FFN goes: over all neurons, over what fires, the same by screened gates.
constexpr int kDenseForm = 0, kSparseForm = 1, kScreenedForm = 2;
// The one before, this one, and two that follow. The last comes where nobody can be reading any
// more, without a barrier.
constexpr unsigned kLayersKept = 4;

__device__ __forceinline__ void lose_patience(unsigned& tries) {
    if (++tries > kPatience) __trap();
}

__device__ __forceinline__ float sum_of_warps(const float* each) {
    const float4* from = reinterpret_cast<const float4*>(each);
    const float4 a = from[0], b = from[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// v root, rounded, times the weight, rounded: RMSNorm as transformers does it.
__device__ __forceinline__ uint4 scaled(const float (&v)[8], float root, const uint4& weight) {
    return make_uint4(multiply_pairs(bf16_pair(v[0] * root, v[1] * root), weight.x),
                      multiply_pairs(bf16_pair(v[2] * root, v[3] * root), weight.y),
                      multiply_pairs(bf16_pair(v[4] * root, v[5] * root), weight.z),
                      multiply_pairs(bf16_pair(v[6] * root, v[7] * root), weight.w));
}

// RMSNorm of a head, by its lanes.
template <int DIM>
__device__ __forceinline__ uint4 normalised_head(const uint4& eight, const uint4& weight,
                                                 float eps) {
    float values[8];
    unpack(eight, values);
    const float sum = sum_over_lanes<Shape<DIM>::LANES>(sum_of_squares(values));
    return scaled(values, reciprocal_root(sum * (1.f / DIM) + eps), weight);
}

// x cos + rotate_half(x) sin, rounded as transformers does in bf16; by the lanes of a head.
template <int DIM>
__device__ __forceinline__ uint4 turned_eight(const uint4& eight, const uint4& cos,
                                              const uint4& sin, const Lane<DIM>& lane) {
    constexpr int HALF = Shape<DIM>::EIGHTS / 2;
    const bool is_low = lane.eight < HALF;
    const int other = is_low ? lane.eight + HALF : lane.eight - HALF;
    const unsigned sign = is_low ? 0x80008000 : 0;
    const auto turn = [&](unsigned own, unsigned c, unsigned s) {
        const unsigned across = __shfl_sync(~0u, own, other, Shape<DIM>::LANES) ^ sign;
        return add_pairs(multiply_pairs(own, c), multiply_pairs(across, s));
    };
    return make_uint4(turn(eight.x, cos.x, sin.x), turn(eight.y, cos.y, sin.y),
                      turn(eight.z, cos.z, sin.z), turn(eight.w, cos.w, sin.w));
}

// The columns of b of a lane that go with keys as a: q lies as {x, z, y, w} of its eights.
template <int DIM>
__device__ __forceinline__ unsigned place_of_q(int lane) {
    const int column = lane / 4;
    return column / 2 % (Shape<DIM>::LANES / 4) * 64 + lane % 4 * 16 + column % 2 * 8;
}

// q . keys of each of a lane's positions, in all lanes of the position.
template <int DIM, int NUM>
__device__ __forceinline__ void score_keys(float (&scores)[NUM], const uint4 (&keys)[NUM],
                                           unsigned q, int lane) {
    constexpr int LANES = Shape<DIM>::LANES;
    // the columns of an mma are for 128 of a head
#pragma unroll 1
    for (int first = 0; first < DIM; first += 128) {
        const uint2 columns = load_shared_pair(q + 2 * first);
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            float c[4] = {};
            multiply_add(c, keys[i].x, keys[i].y, keys[i].z, keys[i].w, columns.x, columns.y);
            if (first == 0 || lane >= 16) scores[i] = c[0] + c[3];
        }
    }
    // a position's parts of 32 columns stand in lanes 0, 5, 10, 15 of its own, and 16 further on
    const int first = lane / LANES * LANES;
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        scores[i] += __shfl_xor_sync(~0u, scores[i], 5);
        if (LANES >= 16) scores[i] += __shfl_xor_sync(~0u, scores[i], 10);
        if (LANES == 32) scores[i] += __shfl_xor_sync(~0u, scores[i], 16);
        scores[i] = opaque(__shfl_sync(~0u, scores[i], first));
    }
}

// What a lane has of a head so far: see Softmax, whose scores lie otherwise.
struct HeadSums {
    float largest, total, sums[8];
};

// Positions' scores, -inf where they do not count, and values, into it; by the whole warp.
template <int DIM, int NUM>
__device__ __forceinline__ void add_positions(HeadSums& head, const float (&scores)[NUM],
                                              const uint4 (&values)[NUM]) {
    float best = head.largest;
#pragma unroll
    for (int i = 0; i < NUM; ++i) best = fmaxf(best, scores[i]);
#pragma unroll
    for (int apart = Shape<DIM>::LANES; apart < 32; apart *= 2)
        best = fmaxf(best, __shfl_xor_sync(~0u, best, apart));
    const float shrink = power_of_two(head.largest - best);
    head.largest = best, head.total *= shrink;
#pragma unroll
    for (int j = 0; j < 8; ++j) head.sums[j] *= shrink;
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const float weight = power_of_two(scores[i] - best);
        head.total += weight;
        float value[8];
        unpack(values[i], value);
#pragma unroll
        for (int j = 0; j < 8; ++j) head.sums[j] += weight * value[j];
    }
}

// A warp's part of a head, added up over the positions that its lanes have side by side: to
// sums [DIM], the largest score, the sum of exponentials.
template <int DIM>
__device__ __forceinline__ void store_head(HeadSums& head, const Lane<DIM>& lane, int thread,
                                           float* to, float& largest, float& total) {
    constexpr int KEPT = 8 / Shape<DIM>::GROUPS;  // columns
    float (&sums)[8] = head.sums;
    int column = 0;
#pragma unroll
    for (int num = 4, apart = 16; num >= KEPT; num /= 2, apart /= 2) {
        head.total += __shfl_xor_sync(~0u, head.total, apart);
        const bool is_high = thread & apart;
        column += is_high ? num : 0;
        exchange_halves(sums, num, is_high, apart);
    }
    if (lane.used) {
        to += lane.eight * 8 + column;
#pragma unroll
        for (int j = 0; j < KEPT; ++j) to[j] = sums[j];
    }
    if (thread % 32 == 0) largest = head.largest, total = head.total;
}

}  // namespace
