// The FFN of `step_rows` (step_rows.cuh), behind the gates' sums: what fired for any token, up of
// the block's own neurons, down of others', and the sum of all parts of y.
//
// Which neurons fired goes round as a bit each. Rows of up are the block's own; of down a block
// has kDownColumns columns of all neurons that fired in one block of kParts. So 16 parts of y are
// to be added up, not one a block, and each block has as many rows of down as any other.
#pragma once

#include "decode/step_rows_attend.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"

namespace {

struct Neurons : Attention {
    using Attention::Attention;

    // ---- the warp that brings

    // Which of the block's neurons fired: of four octets, and of two.
    __device__ __forceinline__ uint2 fired() const {
        const auto* masks = at<unsigned>(kMasks);
        return make_uint2(masks[0] | masks[1] << 8 | masks[2] << 16 | masks[3] << 24,
                          masks[4] | masks[5] << 8);
    }

    // Lists them, within the block; how many.
    __device__ __forceinline__ int make_list() const {
        int* list = at<int>(kList);
        const int lane = threadIdx.x % 32;
        const uint2 both = fired();
        if (both.x >> lane & 1) list[num_set_below(both.x, lane)] = lane;
        if (both.y >> lane & 1) list[__popc(both.x) + num_set_below(both.y, lane)] = lane + 32;
        __syncwarp();
        return __popc(both.x) + __popc(both.y);
    }

    __device__ __forceinline__ void bring_ups(Ring& ring, const unsigned short* up, int first,
                                              unsigned long long policy) const {
        const int lane = threadIdx.x % 32, num = make_list();
        const int* list = at<int>(kList);
#pragma unroll 1
        for (int i = 0; i < (num + 7) / 8 * 8; i += kUnitRows) {
            const int here = max(0, min(kUnitRows, num - i));
            const long long neuron = lane < here ? first + list[i + lane] : 0;
            bring(ring, up + neuron * K, lane * kPitch, lane < here ? 2 * K : 0, here * 2 * K,
                  kUnits * kUnitBytes / 1024, policy);
        }
    }

    // ---- the warp that brings rows of down

    // Of the neurons of a part, as soon as they are known: a lane looks after those of two octets.
    __device__ __forceinline__ void bring_downs(const unsigned short* down, unsigned tick,
                                                unsigned& refill,
                                                unsigned long long policy) const {
        const int lane = threadIdx.x % 32;
        const int part = block() % kParts, group = block() / kParts;
        unsigned masks[2];
        int firsts[2], places[2], total = 0;
        const unsigned* from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int which = lane + 32 * i, octet = which % kOctets;
            const int source = part + which / kOctets * kParts;
            const bool is_there =
                which < kSources * kOctets && source < static_cast<int>(gridDim.x);
            masks[i] = is_there ? ~0u : 0;
            from[i] = words(tick) + mask_words(source) + octet;
            firsts[i] = source * kNeurons + 8 * octet;
        }
        unsigned tries = 0;
#pragma unroll 1
        while (max(masks[0], masks[1]) == ~0u) {
#pragma unroll
            for (int i = 0; i < 2; ++i) load_relaxed_word_if(masks[i] == ~0u, from[i], masks[i]);
            lose_patience(tries);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int num = __popc(masks[i]);
            int before = num;  // this lane's too
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const int others = __shfl_sync(~0u, before, lane - apart);
                if (lane >= apart) before += others;
            }
            places[i] = total + before - num;
            total += __shfl_sync(~0u, before, 31);
        }
        auto* map = at<unsigned short>(kMap);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int at = places[i];
#pragma unroll 1
            for (unsigned left = masks[i]; left; left &= left - 1)
                map[at++] = firsts[i] + __popc((left & -left) - 1);
        }
        if (lane == 0) *at<int>(kTotal) = total;
        __syncwarp();
        if (lane == 0) barrier_arrive(mapped());
#pragma unroll 1
        for (int start = 0; start < total; start += kDowns) {
            const int here = min(kDowns, total - start);
            barrier_wait(down_empty(), refill);
            refill ^= 1;
            if (lane == 0) barrier_expect_bytes(down_full(), here * 2 * kDownColumns);
            __syncwarp();
#pragma unroll 1
            for (int i = lane; i < here; i += 32) {
                const int source = map[start + i] / kNeurons;
                const long long neuron =
                    8 * share(2, source).first + map[start + i] % kNeurons;
                copy_bulk(memory + kDown + i * kDownPitch,
                          down + neuron * K + group * kDownColumns, 2 * kDownColumns,
                          down_full(), policy);
            }
        }
    }

    // ---- the warps that compute

    // The gates of the octet with the warp's number: which fire for any token, to all.
    __device__ __forceinline__ void use_gates(const Layer& layer, const Share& own,
                                              unsigned tick) const {
        if (warp() >= kOctets) return;
        const unsigned mask = warp() < own.num ? keep_gates(layer, own) : 0;
        __syncwarp();
        if (lane() > 0) return;
        at<unsigned>(kMasks)[warp()] = mask;
        barrier_arrive(listed());
        give(tick, mask_words(block()) + warp(), mask);
    }

    // Kept where they fire, else 0.
    __device__ __forceinline__ unsigned keep_gates(const Layer& layer, const Share& own) const {
        const int token = lane() / 2, first = 8 * warp() + lane() % 2 * 4;
        float4 sum = normalised_sum(token);
        add_bias(sum, layer.gate_bias, 8 * own.first + first);
        const float gates[4] = {rounded(sum.x), rounded(sum.y), rounded(sum.z), rounded(sum.w)};
        unsigned mask = 0;
        int num = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool fired = token < args.num_tokens && fires(gates[i]);
            at<float>(kGates)[(first + i) * kTokens + token] = fired ? gates[i] : 0.f;
            const unsigned all = __ballot_sync(~0u, fired);
            mask |= (all & 0x55555555 ? 1 << i : 0) | (all & 0xaaaaaaaa ? 16 << i : 0);
            num += fired;
        }
        num += __shfl_xor_sync(~0u, num, 1);
        if (lane() % 2 == 0 && num)
            atomicAdd(at<int>(kCounts) + token, num);
        return mask;
    }

    // Of the octet of the list with the warp's number, to those who have its part.
    __device__ __forceinline__ void give_hidden(const Layer& layer, const Share& own, int num,
                                                unsigned tick) const {
        const int octet = 8 * warp(), in_warp = lane();
        if (octet >= num) return;
        const int token = in_warp / 2, first = octet + in_warp % 2 * 4;
        const float4 sum = normalised_sum(token);
        const float ups[4] = {sum.x, sum.y, sum.z, sum.w};
        const int* list = at<int>(kList);
        auto* made = at<unsigned short>(kSums + warp() * kSumBytes);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float hidden = 0.f;
            if (first + i < num) {
                const int neuron = list[first + i];
                float up = ups[i];
                if (layer.up_bias) up += bf16_value(layer.up_bias[8 * own.first + neuron]);
                const float gate =
                    at<float>(kGates)[neuron * kTokens + token];
                if (gate != 0.f) hidden = rounded(gate * rounded(up));
            }
            made[(first - octet + i) * kTokens + token] = bf16_bits(hidden);
        }
        __syncwarp();
        if (in_warp < 16 && octet + in_warp / 2 < num)
            store_relaxed(hidden_of(tick, list[octet + in_warp / 2]) + in_warp % 2 * 4,
                        reinterpret_cast<const uint4*>(made)[in_warp]);
    }

    __device__ __forceinline__ unsigned* hidden_of(unsigned tick, int neuron) const {
        return words(tick) + hidden_words(block() * kNeurons + neuron);
    }

    __device__ __forceinline__ void take_back_hidden(unsigned tick) const {
        const int t = thread();
        if (t < 2 * kNeurons)
            store_relaxed(hidden_of(tick + 2, t / 2) + t % 2 * 4, four_times(~0u));
    }

    // Parts of y: of a part of the neurons, and of kDownColumns columns.
    __device__ __forceinline__ void multiply_downs(int l, unsigned tick) {
        const int t = thread(), in_warp = lane();
        barrier_wait(mapped(), l & 1);
        const int total = *at<int>(kTotal);
        const auto* map = at<unsigned short>(kMap);
        float c[4][4] = {};
#pragma unroll 1
        for (int start = 0; start < total; start += kDowns) {
            const int here = min(kDowns, total - start), i = t / 2;
            if (start) sync_consumers();
            if (i < (here + 15) / 16 * 16) {
                uint4 v = four_times(0);
                if (i < here)
                    v = await_words(words(tick) + hidden_words(map[start + i]) +
                                    t % 2 * 4);
                at<uint4>(kHidden)[t] = v;
            }
            sync_consumers();
            barrier_wait(down_full(), down_parity);
            down_parity ^= 1;
            const int matrix = in_warp / 8, row = in_warp % 8;
            const unsigned hidden =
                memory + kHidden + (matrix / 2 * 8 + row) * (2 * kTokens) + matrix % 2 * 16;
            const unsigned down = memory + kDown + (matrix % 2 * 8 + row) * kDownPitch +
                                  warp() * (2 * kDownColumns / kWarps) + matrix / 2 * 16;
#pragma unroll 2
            for (int k = 0; k < here; k += 16) {
                unsigned a[4], b[2][4];
                read_transposed(a, hidden + k * (2 * kTokens));
                read_transposed(b[0], down + k * kDownPitch);
                read_transposed(b[1], down + k * kDownPitch + 32);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply_add(c[j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2],
                                 b[j / 2][j % 2 * 2 + 1]);
            }
            __syncwarp();
            if (in_warp == 0) barrier_arrive(down_empty());
        }
        store_parts(tick, [&](int i, int j) {
            const float *a = c[2 * i] + 2 * j, *b = c[2 * i + 1] + 2 * j;
            return make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(b[0]),
                              __float_as_uint(b[1]));
        });
    }

    // Of two owners (i) and tokens g, g + 8 (j): columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
    template <class Four>
    __device__ __forceinline__ void store_parts(unsigned tick, Four four) const {
        const int owner = block() / kParts * kParts + 2 * warp();
        unsigned* to = words(tick) + part_words(owner, block() % kParts) +
                       lane() * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                store_relaxed(to + i * (kParts * kTokens * kOwn) + j * (8 * kOwn), four(i, j));
    }

    __device__ __forceinline__ void take_back_parts(unsigned tick) const {
        store_parts(tick + 2, [](int, int) { return four_times(~0u); });
    }

    // All parts of this block's columns of y, in their order: onto x, to all.
    __device__ __forceinline__ void add_parts(const Layer& layer, unsigned tick) const {
        const int t = thread(), token = t / 4 % kTokens;
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = four_times(token < args.num_tokens ? ~0u : 0);
        const unsigned* from =
            words(tick) + part_words(block(), t / 64 * 4) + t % 64 * 4;
        await_all(v, [&](int i) { return from + i * (kTokens * kOwn); });
        const auto four = [](unsigned a, unsigned b, unsigned c, unsigned d) {
            return (__uint_as_float(a) + __uint_as_float(b)) +
                   (__uint_as_float(c) + __uint_as_float(d));
        };
        auto* all = at<float4>(kSums);
        all[t] =
            make_float4(four(v[0].x, v[1].x, v[2].x, v[3].x), four(v[0].y, v[1].y, v[2].y, v[3].y),
                        four(v[0].z, v[1].z, v[2].z, v[3].z), four(v[0].w, v[1].w, v[2].w, v[3].w));
        sync_consumers();
        if (t >= 64) return;
        const float4 a = all[t], b = all[t + 64], c = all[t + 128],
                     d = all[t + 192];
        float4 sum = make_float4((a.x + b.x) + (c.x + d.x), (a.y + b.y) + (c.y + d.y),
                                 (a.z + b.z) + (c.z + d.z), (a.w + b.w) + (c.w + d.w));
        const int in = t % 4 * 2, column = block() * kOwn + in;
        if (layer.down_bias) {
            const unsigned short* bias = layer.down_bias + column;
            sum.x += bf16_value(bias[0]), sum.y += bf16_value(bias[1]);
            sum.z += bf16_value(bias[8]), sum.w += bf16_value(bias[9]);
        }
        auto* x = at<float2>(kOwnX + (token * kOwn + in) * 4);
        sum = onto(make_float4(x[0].x, x[0].y, x[4].x, x[4].y), sum);
        x[0] = make_float2(sum.x, sum.y), x[4] = make_float2(sum.z, sum.w);
        if (token >= args.num_tokens) return;
        const int to = row_words(0) + place_in_row(token, column);
        give(tick + 1, to, bf16_pair(sum.x, sum.y));
        give(tick + 1, to + 4, bf16_pair(sum.z, sum.w));
    }
};

}  // namespace
