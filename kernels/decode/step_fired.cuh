// What fired, in `step` (step.cuh), by the gates' sums of the block's neurons; what each neuron is
// worth in the dense form; and of y the sum of all blocks' parts.
//
// A part of y is a word a column: fp32 of which the lowest 8 bits are the tag. Scales of columns,
// if the kind of weights has any, multiply the sum of the parts.
#pragma once

#include "decode/step_attend.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/silu.cuh"
#include "tile/warp.cuh"

namespace {

struct Fired : Attention {
    using Attention::Attention;
    float column_scale;  // see fetch_column_scale
    int layer_at;        // whose FFN it is

    // Asks for the scale of the thread's column of y, long before it is wanted.
    __device__ __forceinline__ void fetch_column_scale(const Layer& layer, const Share& own) {
        unsigned bits = 0;
        load_streamed_word_if(thread() < kQuad * own.num,
                              layer.scales_of(kDown) + kQuad * own.first + thread(), bits);
        column_scale = __uint_as_float(bits);
    }

    // What a neuron's gate or up is, by its sums and a bias, if there is one.
    __device__ __forceinline__ static float value_of(const float* sums, const unsigned short* bias,
                                                     int neuron) {
        float sum = sum_of_warps(sums);
        if (bias) sum += bf16_value(bias[neuron]);
        return rounded(sum);
    }

    // Those of the block's neurons that fired, and their gates; how many. Each warp makes the lists
    // for itself, and all make the same ones.
    __device__ __forceinline__ int list_fired(const Layer& layer, const Share& share, int* list,
                                              float* gates) const {
        const int lane = thread() % 32, first = kQuad * share.first, rows = kQuad * share.num;
        float of_rows[kMostRows / 32];
#pragma unroll
        for (int i = 0; i < kMostRows / 32; ++i) {
            const int row = 32 * i + lane;
            of_rows[i] = 0.f;
            if (row < rows)
                of_rows[i] = value_of(sums() + row * kWarps, layer.gate_bias, first + row);
        }
        int num = 0;
#pragma unroll
        for (int i = 0; i < kMostRows / 32; ++i) {
            const bool fired = fires(of_rows[i]);
            const unsigned all = __ballot_sync(~0u, fired);
            const int place = num + num_set_below(all, lane);
            if (fired) list[place] = first + 32 * i + lane, gates[place] = of_rows[i];
            num += __popc(all);
        }
        __syncwarp();
        return num;
    }

    // In the dense form, what the thread's neuron of the block is worth, by up's sums, and by the
    // gates' in the other half of the room. A gate that is 0 or below counts for nothing, or SiLU
    // makes of it what transformers does in bf16.
    __device__ __forceinline__ float hidden_of_all(const Layer& layer, const Share& share,
                                                   int* count) {
        const int row = thread(), neuron = kQuad * share.first + row;
        float hidden = 0.f;
        if (row < kQuad * share.num) {
            const float up = value_of(sums() + row * kWarps, layer.up_bias, neuron);
            const float* gates = at<float>(kSums) + (sums_at ^ 1) * (kMostSums * kWarps);
            float gate = value_of(gates + row * kWarps, layer.gate_bias, neuron);
            if (args.is_silu) {
                hidden = rounded(silu_of(gate) * up);
            } else if (fires(gate)) {
                atomicAdd(count, 1);
                hidden = rounded(gate * up);
            }
        }
        return hidden;
    }

    // Of a part of y: rounded, by half of what is cut off.
    __device__ __forceinline__ static unsigned part_word(float value, unsigned tag) {
        return (__float_as_uint(value * (1.f + 0x1p-17f)) & ~0xffu) | (tag & 0xff);
    }

    // All blocks' parts of this block's columns of y, in the order of blocks: onto x, to all.
    __device__ __forceinline__ void add_parts(const Layer& layer, const Share& own, unsigned tag) {
        constexpr int kSources = kConsumers / kOwnQuads, kLoadsAtOnce = 3;
        const int quad = thread() % kOwnQuads, first = thread() / kOwnQuads;
        const int num_blocks = gridDim.x;
        float sums[4] = {};
        if (quad < own.num) {
            const unsigned* from = y_parts() + first * K + kQuad * (own.first + quad);
#pragma unroll 1
            for (int i = first; i < num_blocks;
                 i += kLoadsAtOnce * kSources, from += kLoadsAtOnce * kSources * K) {
                uint4 v[kLoadsAtOnce];
                await_parts(v, from, kSources * K, (num_blocks - i + kSources - 1) / kSources, tag);
#pragma unroll
                for (int j = 0; j < kLoadsAtOnce; ++j) {
                    if (i + j * kSources >= num_blocks) break;
                    sums[0] += __uint_as_float(v[j].x & ~0xffu);
                    sums[1] += __uint_as_float(v[j].y & ~0xffu);
                    sums[2] += __uint_as_float(v[j].z & ~0xffu);
                    sums[3] += __uint_as_float(v[j].w & ~0xffu);
                }
            }
        }
        __syncwarp();
        stamp(layer_at, Stage::kParts);
#pragma unroll
        for (int apart = kOwnQuads; apart < 32; apart *= 2)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], apart);
        float* all = at<float>(kColumns);
        if (thread() % 32 < kOwnQuads)
            *reinterpret_cast<float4*>(all + thread() / 32 * 32 + kQuad * quad) =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
        sync_consumers();
        if (thread() < kQuad * own.num) {
            const int c = thread(), column = kQuad * own.first + c;
            float sum = 0.f;
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) sum += all[warp * 32 + c];
            if constexpr (Weight::kRowScales) sum *= column_scale;
            if (layer.down_bias) sum += bf16_value(layer.down_bias[column]);
            float& x = at<float>(kOwn)[c];
            x = rounded(rounded(sum) + x);
            store_relaxed_word(row_words(0) + word_of(column), tagged(bf16_bits(x), tag));
        }
        stamp(layer_at, Stage::kGiven);
    }

    // The first `num` of those words, all asked for at once.
    template <int NUM>
    __device__ __forceinline__ static void await_parts(uint4 (&v)[NUM], const unsigned* from,
                                                       int apart, int num, unsigned tag) {
        unsigned tries = 0;
#pragma unroll 1
        while (true) {
            unsigned wrong = 0;
#pragma unroll
            for (int j = 0; j < NUM; ++j) {
                v[j] = make_uint4(tag, tag, tag, tag);
                if (j < num) v[j] = load_relaxed(from + j * apart);
            }
#pragma unroll
            for (int j = 0; j < NUM; ++j)
                wrong |= (v[j].x ^ tag) | (v[j].y ^ tag) | (v[j].z ^ tag) | (v[j].w ^ tag);
            if (!(wrong & 0xff)) return;
            lose_patience(tries);
        }
    }
};

}  // namespace
