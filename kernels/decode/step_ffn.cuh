// The FFN of `step` (step.cuh), behind the gates' sums: up and down of the block's neurons that
// fired, or of all in the dense form; its part of y.
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
    using X = Columns<Weight>;

    // The scales of up of the block's own neurons, to shared memory; wait_for_copies waits.
    template <int FORM>
    __device__ __forceinline__ void fetch_scales(const Layer& layer, const Share& share) const {
        if constexpr (Weight::kRowScales && FORM == kSparseForm) {
            copy_async_if(thread() < share.num, memory + kUpScales + 16 * thread(),
                          layer.scales_of(kUp) + kQuad * (share.first + thread()));
            commit_copies();
        }
    }

    // The warp's parts of the taken units' rows, to [row][warp].
    __device__ __forceinline__ void store_parts(float (&parts)[kTake], int num, float* to) const {
        store_sums<Weight>(parts, num, to);
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
        add_units(y, share.num * Layers::kQuadUnits,
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
    __device__ __forceinline__ void ffn(const Layer& layer, const Share& share, const X&,
                                        unsigned tag, int* count) {
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
        const int num_units = share.num * Layers::kQuadUnits;
#pragma unroll 1
        for (int i = 0; i < num_units; i += kTake) {
            const int num = min(kTake, num_units - i);
            Taken<Weight> taken;
            float parts[kTake];
            take(taken, num);
            multiply_taken(parts, taken, x);
            store_sums<Weight>(parts, num, sums() + i * kUnitRows * kWarps);
        }
        sync_consumers();
        float* hidden = at<float>(kHidden);
        const float h = hidden_of_all(layer, share, count);
        if (thread() < kQuad * share.num) hidden[thread()] = h;
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
        const auto word = [&](float value) { return part_word(value, tag); };
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
};

}  // namespace
