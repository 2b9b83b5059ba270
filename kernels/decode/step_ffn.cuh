// The FFN of `step` (step.cuh), behind the gates' sums: up and down of the block's neurons that
// fired, or of all in the dense form; its part of y, and the sum of all blocks' parts.
//
// A part of y is a word a column: fp32 of which the lowest 8 bits are the tag. Scales of columns,
// if the kind of weights has any, multiply the sum of the parts.
#pragma once

#include "decode/step_screen.cuh"
#include "ptx/barriers.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"

namespace {

struct Neurons : Screened {
    using Screened::Screened;
    float column_scale;  // see fetch_column_scale
    // Asks for the scale of the thread's column of y, long before it is wanted.
    __device__ __forceinline__ void fetch_column_scale(const Layer& layer, const Share& own) {
        unsigned bits = 0;
        load_streamed_word_if(thread() < kQuad * own.num,
                              layer.scales_of(kDown) + kQuad * own.first + thread(), bits);
        column_scale = __uint_as_float(bits);
    }

    // The scales of up of the block's own neurons, to shared memory; wait_for_copies waits.
    __device__ __forceinline__ void fetch_up_scales(const Layer& layer, const Share& share) const {
        copy_async_if(thread() < share.num, memory + kUpScales + 16 * thread(),
                      layer.scales_of(kUp) + kQuad * (share.first + thread()));
        commit_copies();
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
        const int lane = thread() % 32;
        int num = 0;
#pragma unroll 1
        for (int first = 0; first < kQuad * share.num; first += 32) {
            const int row = first + lane, neuron = kQuad * share.first + row;
            float gate = 0.f;
            bool fired = false;
            if (row < kQuad * share.num)
                fired = fires(gate = value_of(sums() + row * kWarps, layer.gate_bias, neuron));
            const unsigned all = __ballot_sync(~0u, fired);
            const int place = num + num_set_below(all, lane);
            if (fired) list[place] = neuron, gates[place] = gate;
            num += __popc(all);
        }
        __syncwarp();
        return num;
    }

    // Onto y, out of the ring: the block's neurons that share a gate, if it fires; how many. They
    // are at most 32. The first of `sums` is the gate's, those behind its quad are up's.
    __device__ __forceinline__ int add_mapped(float (&y)[kEights][8], const Layer& layer,
                                              const float* sums) {
        const Share share = mapped();
        if (share.num == 0) return 0;
        const int lane = thread() % 32, num = kQuad * share.num;
        const float gate = value_of(sums, layer.gate_bias, first_shared());
        float hidden = 0.f;
        if (lane < num && fires(gate))
            hidden = rounded(gate * value_of(sums + (kQuad + lane) * kWarps, layer.up_bias,
                                             first_shared() + kQuad * share.first + lane));
        add_units(y, share.num * kQuadUnits,
                  [&](int row) { return __shfl_sync(~0u, hidden, row); });
        return fires(gate) ? num : 0;
    }

    // What those of the list are worth: their gates and ups.
    __device__ __forceinline__ void make_hidden(const Layer& layer, const Share& share, int num,
                                                const int* list, const float* gates,
                                                float* hidden) const {
        sum_rows(
            num, [&](int i) { return row_at(layer.up, list[i]); },
            [&](int i, float up) {
                const int neuron = list[i];
                if constexpr (Weight::kRowScales)
                    up *= at<float>(kUpScales)[neuron - kQuad * share.first];
                if (layer.up_bias) up += bf16_value(layer.up_bias[neuron]);
                hidden[i] = rounded(gates[i] * rounded(up));
            });
    }

    // `share` goes by quads of neurons, or by row blocks where gates are screened.
    template <int FORM>
    __device__ __forceinline__ void ffn(const Layer& layer, const Share& share, unsigned tag,
                                        int* count) {
        int* list = at<int>(kList);
        float *gates = at<float>(kGates), *hidden = at<float>(kHidden);
        const float* of_map = sums();
        int num;
        if constexpr (FORM == kScreenedForm) {
            num = list_screened(layer, share.first, share.num, list, gates);
        } else {
            of_map += kQuad * share.num * kWarps;
            num = list_fired(layer, share, list, gates);
        }
        flip_sums();
        make_hidden(layer, share, num, list, gates, hidden);
        float y[kEights][8] = {};
        add_rows(y, layer, list, hidden, num, [&] {
            const int fired = num + add_mapped(y, layer, of_map);
            if (thread() == 32 && fired) atomicAdd(count, fired);
        });
        give_part(y, tag);
    }

    // Of up's product, which is made here; the gates' sums lie in the other half of the room.
    __device__ __forceinline__ void ffn_dense(const Layer& layer, const Share& share, const X& x,
                                              unsigned tag, int* count) {
        flip_sums();
        const int num_units = share.num * kQuadUnits;
#pragma unroll 1
        for (int i = 0; i < num_units; i += kTake) {
            const int num = min(kTake, num_units - i);
            Taken<Weight> taken;
            float parts[kTake];
            take(taken, num);
#pragma unroll
            for (int j = 0; j < kTake; ++j) parts[j] = scaled_part(taken, j, x);
            store_sums<Weight>(parts, num, sums() + i * kUnitRows * kWarps);
        }
        sync_consumers();
        float* hidden = at<float>(kHidden);
        const int row = thread(), neuron = kQuad * share.first + row;
        if (row < kQuad * share.num) {
            float up = sum_of_warps(sums() + row * kWarps);
            flip_sums();
            float gate = sum_of_warps(sums() + row * kWarps);
            flip_sums();
            if (layer.gate_bias) gate += bf16_value(layer.gate_bias[neuron]);
            if (layer.up_bias) up += bf16_value(layer.up_bias[neuron]);
            gate = rounded(gate);
            if (fires(gate)) atomicAdd(count, 1);
            hidden[row] = fires(gate) ? rounded(gate * rounded(up)) : 0.f;
        }
        flip_sums();
        sync_consumers();
        float y[kEights][8] = {};
        add_units(y, num_units, [&](int row) { return hidden[row]; });
        give_part(y, tag);
    }

    // Onto y: the next units of the ring, rows of down, each times hidden(row).
    template <class Hidden>
    __device__ __forceinline__ void add_units(float (&y)[kEights][8], int num_units,
                                              const Hidden& hidden) {
#pragma unroll 1
        for (int i = 0; i < num_units; ++i) {
            barrier_wait(full(slot), parity);
            const unsigned from = memory + kRing + slot * kUnitBytes + kEightBytes * eight_of(0);
#pragma unroll
            for (int j = 0; j < kUnitRows; ++j)
                add_row(y, from + j * kRowBytes, hidden(i * kUnitRows + j));
            __syncwarp();
            if (thread() % 32 == 0) barrier_arrive(empty(slot));
            if (++slot == kUnits) slot = 0, parity ^= 1;
        }
    }

    template <class T>
    __device__ __forceinline__ static T shared_eight(unsigned from) {
        if constexpr (sizeof(T) == sizeof(uint2))
            return read_shared_pair(from);
        else
            return load_shared(from);
    }

    // y += h times a row of down, whose first eight of the thread lies at `from`.
    __device__ __forceinline__ void add_row(float (&y)[kEights][8], unsigned from, float h) const {
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            if (!has_eight(i)) continue;
            const unsigned eight = from + 32 * kEightBytes * i;
            add_eight(y[i], shared_eight<Eight>(eight), h);
        }
    }

    __device__ __forceinline__ void give_part(const float (&y)[kEights][8], unsigned tag) const {
        unsigned* to = y_parts() + block() * K;
        // rounded, by half of what is cut off
        const auto word = [&](float value) {
            return (__float_as_uint(value * (1.f + 0x1p-17f)) & ~0xffu) | (tag & 0xff);
        };
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            if (!has_eight(i)) continue;
#pragma unroll
            for (int c = 0; c < 8; c += 4)
                store_relaxed(to + 8 * eight_of(i) + c,
                              make_uint4(word(y[i][c]), word(y[i][c + 1]), word(y[i][c + 2]),
                                         word(y[i][c + 3])));
        }
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
            store_relaxed_word(row_words(0) + column, tagged(bf16_bits(x), tag));
        }
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
