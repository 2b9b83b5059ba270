// The FFN of `step` over codes of 4 bits (step_codes.cuh), behind the gates' sums: up and down of
// the block's neurons that fired, or of all in the dense form; its part of y.
//
// The gate is read whole, so what fires is known by it, and nothing is screened. Up and down of
// what fired, 16 neurons of the list at a time, go from memory into registers; those of neurons
// that share a gate, and all in the dense form, come through the ring.
#pragma once

#include "decode/step_codes_down.cuh"
#include "ptx/copies.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"

namespace {

struct CodesFfn : CodesDown {
    using CodesDown::CodesDown;

    // The form that screens gates is never made of this.
    __device__ __forceinline__ void round_x(const uint4 (&)[kEights]) const {}
    __device__ __forceinline__ void screen(const Layer&, int, int) {}

    template <int FORM>
    __device__ __forceinline__ void ffn(const Layer& layer, const Share& share, const X& x,
                                        unsigned tag, int* count) {
        static_assert(FORM == kSparseForm, "the gate is its own screen");
        const unsigned long long policy = passing_by();
        int* list = at<int>(kList);
        float* gates = at<float>(kGates);
        const float* map_sums = sums() + units_of(share.num) * kUnitRows * kWarps;
        const int num = list_fired(layer, share, list, gates);
        flip_sums();
        stamp(layer_at, Stage::kListed);
        Listed listed[kTiles];
        sum_listed(layer, x, list, num, listed, policy);
        sync_consumers();
        stamp(layer_at, Stage::kUp);

        int place = -1, slot_of = 0;
        float hidden = 0.f;
        const int num_padded = (num + 15) / 16 * 16;
        if (thread() < num_padded) {
            place = thread();
            if (place < num) {
                const int neuron = list[place];
                slot_of = group_of_neuron(neuron) - group_of_neuron(kQuad * share.first);
                hidden = rounded(gates[place] *
                                 value_of(sums() + place * kWarps, layer.up_bias, neuron));
            }
        }
        const int of_map_fired = hidden_of_map(layer, map_sums, num_padded, hidden, place, slot_of);
        if (thread() == 32 && num + of_map_fired) atomicAdd(count, num + of_map_fired);
        const float back = give_planes(hidden, place, slot_of);

        Y y = {};
        add_listed(y, layer, share, list, num, listed, back, policy);
        if (mapped().num > 0) add_units(y, of_map(), num_padded / 16, num_groups(share), back);
        give_part(y, tag);
        stamp(layer_at, Stage::kDown);
    }

    // Of up's product, which is made here; the gates' sums lie in the other half of the room.
    __device__ __forceinline__ void ffn_dense(const Layer& layer, const Share& share, const X& x,
                                              unsigned tag, int* count) {
        flip_sums();
        const int num_units = units_of(share.num);
#pragma unroll 1
        for (int i = 0; i < num_units; i += kAtOnce) {
            const int num = min(kAtOnce, num_units - i);
            Taken<Int4> taken;
            float parts[kAtOnce];
            take(taken, num);
            multiply_taken(parts, taken, x);
            store_parts(parts, num, sums() + i * kUnitRows * kWarps);
        }
        sync_consumers();
        stamp(layer_at, Stage::kUp);
        const float hidden = hidden_of_all(layer, share, count);
        flip_sums();
        const int neuron = kQuad * share.first + thread();
        const float back =
            give_planes(hidden, thread() < (num_units + 1) / 2 * 16 ? thread() : -1,
                        group_of_neuron(neuron) - group_of_neuron(kQuad * share.first));
        Y y = {};
        add_units(y, share, 0, 0, back);
        give_part(y, tag);
        stamp(layer_at, Stage::kDown);
    }

  private:
    // Up's sums of the neurons of the list, to `sums`. Their first rows of down are asked for
    // before anything is waited for.
    __device__ __forceinline__ void sum_listed(const Layer& layer, const X& x, const int* list,
                                               int num, Listed (&listed)[kTiles],
                                               unsigned long long policy) const {
        for (Listed& tile : listed) take_no_columns(tile);
#pragma unroll 1
        for (int i = 0; i < num; i += kUnitRows * kAtOnce) {
            Taken<Int4> taken;
            float parts[kAtOnce];
            take_listed(taken, layer.up, list, i, num, policy);
            if (i == 0) {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile)
                    take_columns(listed[tile], layer.down, list, 16 * tile, num, policy);
                prefetch_listed(layer, list, 16 * kTiles, num);
            }
            multiply_listed(parts, taken, x);
            store_parts(parts, kAtOnce, sums() + i * kWarps);
        }
        // those of down were asked for right behind them, so nothing stands before them any more
        __syncwarp();
        if (lane() == 0) barrier_arrive(has_rows());
    }

    // Rows of up and down of the list from place `first` on, into L2: what is read later would
    // wait for memory a second time.
    __device__ __forceinline__ void prefetch_listed(const Layer& layer, const int* list, int first,
                                                    int num) const {
        constexpr int kLines = kRowBytes / 128, kAll = 2 * kLines + 1;
#pragma unroll 1
        for (int i = thread(); i < (num - first) * kAll; i += kConsumers) {
            const unsigned neuron = list[first + i / kAll], line = i % kAll;
            const char* quad = reinterpret_cast<const char*>(layer.up) +
                               static_cast<long long>(neuron / kQuad) * kQuadBytes;
            const char* row = quad + neuron % kQuad * kRowBytes + line * 128;
            if (line == 2 * kLines)
                row = quad + kQuad * kRowBytes + neuron % kQuad * (2 * kGroups);
            else if (line >= kLines)
                row = reinterpret_cast<const char*>(layer.down) +
                      static_cast<long long>(neuron) * kRowBytes + (line - kLines) * 128;
            prefetch_into_l2(row);
        }
    }

    // Onto y: the rows of down of the list, the first of which are there.
    __device__ __forceinline__ void add_listed(Y& y, const Layer& layer, const Share& share,
                                               const int* list, int num, Listed (&listed)[kTiles],
                                               float back, unsigned long long policy) {
        add_tiles(
            y, (num + 15) / 16, 0, group_of_neuron(kQuad * share.first), 0, back,
            [&](int i) { return list[min(16 * i + 16, num) - 1]; }, [](int) {},
            [&](int b, unsigned (&rows)[4]) {
#pragma unroll
                for (int j = 0; j < 4; ++j) rows[j] = listed[0].rows[b][j];
            },
            [&](int i) {
                if (16 * (i + 1) >= num) return;
#pragma unroll
                for (int tile = 1; tile < kTiles; ++tile) listed[tile - 1] = listed[tile];
                take_columns(listed[kTiles - 1], layer.down, list, 16 * (i + kTiles), num, policy);
            });
    }

    // What the thread's neuron of those that share a gate is worth, if the thread has one, and its
    // place behind the others, in tiles of their own; how many fire. Of `sums` the first is the
    // gate's, those behind its unit are up's.
    __device__ __forceinline__ int hidden_of_map(const Layer& layer, const float* sums,
                                                 int first_place, float& hidden, int& place,
                                                 int& slot_of) const {
        const Share share = of_map();
        if (share.num == 0) return 0;
        const int num = kQuad * share.num, i = static_cast<int>(thread()) - kMostRows;
        const float gate = value_of(sums, layer.gate_bias, first_shared());
        if (i >= 0 && i < (num + 15) / 16 * 16) {
            place = first_place + i;
            if (i < num) {
                const int neuron = kQuad * share.first + i;
                slot_of = group_of_neuron(neuron) - group_of_neuron(kQuad * share.first);
                if (fires(gate))
                    hidden = rounded(
                        gate * value_of(sums + (kUnitRows + i) * kWarps, layer.up_bias, neuron));
            }
        }
        return fires(gate) ? num : 0;
    }
};

}  // namespace
