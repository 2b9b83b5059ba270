// The softmax of `attend`, batch by batch in a warp, and how parts are put together. See
// attend.cuh.
#pragma once
#include "decode/attend_job.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

// ---- softmax over the batches of a warp

// The largest of 32 values; NaN if one is. Its bits, turned so that integers are in that order.
__device__ __forceinline__ float largest_of_warp(float value) {
    const int bits = __float_as_int(value);
    const int order = __reduce_max_sync(~0u, bits ^ ((bits >> 31) & 0x7fffffff));
    return __int_as_float(order ^ ((order >> 31) & 0x7fffffff));
}

// Sums over the lanes of a position of 8 values a lane: value lane % 8 to each lane.
template <int LANES>
__device__ __forceinline__ float share_sums(float (&values)[kLoads], int lane) {
#pragma unroll
    for (int num = kLoads / 2; num > 0; num /= 2) exchange_halves(values, num, lane & num, num);
#pragma unroll
    for (int distance = kLoads; distance < LANES; distance *= 2)
        values[0] += __shfl_xor_sync(~0u, values[0], distance);
    return values[0];
}

// What a warp has seen so far, of each head.
template <int HEADS>
struct Softmax {
    float largest[HEADS];  // score
    float total[HEADS];    // of the lane's exponentials, relative to it
    float sums[HEADS][8];  // of the lane's columns of values times exponentials
};

// Scores of a batch, by lanes: of head h the one of position (lane % 8, group).
template <int DIM, int HEADS>
__device__ __forceinline__ void score_batch(float (&scores)[HEADS], const uint4 (&keys)[kLoads],
                                            const float (&q)[HEADS][8], int lane) {
    float products[HEADS][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        float key[8];
        unpack(keys[i], key);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            products[h][i] = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) products[h][i] += q[h][j] * key[j];
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) scores[h] = share_sums<Shape<DIM>::LANES>(products[h], lane);
}

// cap tanh(score / cap), of scores and a cap in powers of two.
template <int HEADS>
__device__ __forceinline__ void cap_scores(float (&scores)[HEADS], float cap) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) scores[h] = cap * tanhf(scores[h] / cap);
}

// Scores to exponentials, relative to the largest score so far.
template <int HEADS>
__device__ __forceinline__ void take_exponentials(Softmax<HEADS>& softmax, float (&scores)[HEADS],
                                                  bool counts) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const float score = counts ? scores[h] : __int_as_float(0xff800000);
        const float batch = largest_of_warp(score);
        const float largest = batch <= softmax.largest[h] ? softmax.largest[h] : batch;
        const float shrink = power_of_two(softmax.largest[h] - largest);
        scores[h] = power_of_two(score - largest);
        softmax.largest[h] = largest;
        softmax.total[h] = softmax.total[h] * shrink + scores[h];
#pragma unroll
        for (int j = 0; j < 8; ++j) softmax.sums[h][j] *= shrink;
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void add_values(Softmax<HEADS>& softmax, const float (&weights)[HEADS],
                                           const uint4 (&values)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        float value[8];
        unpack(values[i], value);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float weight = __shfl_sync(~0u, weights[h], i, Shape<DIM>::LANES);
#pragma unroll
            for (int j = 0; j < 8; ++j) softmax.sums[h][j] += weight * value[j];
        }
    }
}

// ---- putting parts together

// A lane's 8 columns, added up over the groups of a warp, into shared memory.
template <int DIM, int HEADS>
__device__ __forceinline__ void store_warp(Softmax<HEADS>& softmax,
                                           const Shared<DIM, HEADS>& shared, const Lane<DIM>& lane,
                                           int warp) {
    using S = Shape<DIM>;
    constexpr int KEPT = 8 / S::GROUPS;  // columns
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        float total = softmax.total[h];  // the same in lanes that differ in what is no bit of 8
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < kLoads || distance >= S::LANES)
                total += __shfl_xor_sync(~0u, total, distance);
        float (&sums)[8] = softmax.sums[h];
        int column = 0;
#pragma unroll
        for (int num = 4, distance = 16; num >= KEPT; num /= 2, distance /= 2) {
            const bool is_high = threadIdx.x & distance;
            column += is_high ? num : 0;
            exchange_halves(sums, num, is_high, distance);
        }
        const int at = warp * HEADS + h;
        if (lane.used) {
            float* to = shared.sums + at * DIM + lane.eight * 8 + column;
#pragma unroll
            for (int j = 0; j < KEPT; ++j) to[j] = sums[j];
        }
        if (threadIdx.x % 32 == 0) {
            shared.largest[at] = softmax.largest[h];
            shared.total[at] = total;
        }
    }
}

// Two columns of a head, of one part or of several put together.
struct Pair {
    float largest, total, low, high;
};

// Parts 0 .. num, in that order; part(i) gives {largest, total}, columns(i) the two columns' sums.
// Eight parts are read at once.
template <class Part, class Columns>
__device__ __forceinline__ Pair put_together(int num, Part part, Columns columns) {
    constexpr int EIGHT = 8;
    const float least = __int_as_float(0xff800000);
    Pair sum = {least, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = 0; first < num; first += EIGHT) {
        float2 parts[EIGHT], pairs[EIGHT];
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
            const bool is_there = first + i < num;
            parts[i] = is_there ? part(first + i) : make_float2(least, 0.f);
            pairs[i] = is_there ? columns(first + i) : make_float2(0.f, 0.f);
        }
        float largest = sum.largest;
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) largest = fmaxf(largest, parts[i].x);
        const float shrink = power_of_two(sum.largest - largest);
        sum = {largest, sum.total * shrink, sum.low * shrink, sum.high * shrink};
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
            const float weight = power_of_two(parts[i].x - largest);
            sum.total += parts[i].y * weight;
            sum.low += pairs[i].x * weight;
            sum.high += pairs[i].y * weight;
        }
    }
    return sum;
}

__device__ __forceinline__ unsigned output(const Pair& pair) {
    const float share = reciprocal(pair.total);
    return bf16_pair(pair.low * share, pair.high * share);
}

}  // namespace
