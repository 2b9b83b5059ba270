// heavy_walk and heavy_walk_gate: up, h and down of the heavy rows where they are few, sparsely, as
// few_walk has them.
//
// Densely, one heavy row among thousands costs as much as a hundred, for all weights are read. Most
// are heavy because more fired than one block walks through in time. So a cluster takes a row. Its
// blocks share what fired: of a packed gate, `heavy_walk`, every SIZEth tile, and tiles that
// overflowed or are not finite are multiplied anew; of a dense one, `heavy_walk_gate`, a range.
//
// With more heavy rows than `few` nothing is done here; with no more the kernels of heavy.cuh do
// nothing. Weights are finite, as in few_walk.cuh.
//
// Launch: SIZE blocks for each of `few` rows, 32 warps ways threads; sizes as of few_walk, but for a
// packed gate cap is 256 for each tile that a block may have, of at most 32. It may start before the
// previous kernel has ended (ptx/pdl.cuh).
#pragma once

#include "ffn/few_walk.cuh"
#include "tile/e4m3.cuh"
#include "tile/eights.cuh"

namespace few_heavy {

using few_walk::kColumns;
using few_walk::Place;
using few_walk::Sizes;
using spec::TILE;

constexpr int kAtOnce = 4;  // neurons of a warp, whose gates are multiplied anew

// More scales; over bf16 there are none.
struct Scales {
    const float2* tokens;  // scale, and what is not wanted here (quantise_rows.cu)
    const float* gate_neurons;
};

// A row of x is as the weights are; `Number` of both.
struct Bf16 : few_walk::Bf16, Scales {
    __device__ __forceinline__ void scale(Input&, int) const {}
    __device__ __forceinline__ float scaled_gate(float sum, int, int) const { return sum; }
};

struct E4m3 : few_walk::E4m3, Scales {
    __device__ __forceinline__ static Input load(const unsigned char* from) {
        const uint4 x = load_written(from);
        return {e4m3_as_bf16(x.x, x.y), e4m3_as_bf16(x.z, x.w), 0.f};
    }
    __device__ __forceinline__ void scale(Input& x, int token) const {
        x.back *= tokens[token].x;
    }
    __device__ __forceinline__ float scaled_gate(float sum, int neuron, int token) const {
        return sum * gate_neurons[neuron] * tokens[token].x;
    }
};

// Of the gates of neurons `first` on, in places `to` on of the walk's gates, those that fired come
// to the front, and their neurons into its list; returns how many. -Inf comes as 0: h is 0, or NaN
// where up is not finite, as in the dense equation. All threads of the block.
template <class Walk>
__device__ __forceinline__ int move_fired(const Walk& walk, int first, int num, int to) {
    const int lane = threadIdx.x % 32;
    const unsigned gates = walk.gates + 4 * to, list = walk.list + 4 * to;
    __syncthreads();
    if (threadIdx.x < 32) {
        int found = 0;
#pragma unroll 1
        for (int i = lane; i - lane < num; i += 32) {
            const unsigned gate = i < num ? load_shared_word(gates + 4 * i) : 0;
            const bool has_fired = fires_pair(gate) >> 31;
            const unsigned moved = __ballot_sync(~0u, has_fired || gate == 0xff800000u);
            const int place = 4 * (found + num_set_below(moved, lane));
            __syncwarp();
            if (moved >> lane & 1) {
                store_shared_word(gates + place, has_fired ? gate : 0);
                store_shared_word(list + place, first + i);
            }
            found += __popc(moved);
        }
        if (lane == 0) store_shared_word(walk.head, found);
    }
    __syncthreads();
    return load_shared_word(walk.head);
}

// Gates of all tokens. `fill` makes the list of what fired in the block's part of a token's.
struct DenseGate {
    const unsigned short* gate;

    template <int SIZE, class Walk>
    __device__ __forceinline__ void fill(Walk& walk, const Sizes& sizes, int token,
                                         int rank) const {
        const int eights = sizes.N / 8, begin = eights * rank / SIZE;
        const int num = eights * (rank + 1) / SIZE - begin;
        const unsigned short* from = gate + static_cast<long long>(token) * sizes.N + 8 * begin;
        for (int i = threadIdx.x; i < num; i += blockDim.x) {
            float values[8];
            unpack(load_written(from + 8 * i), values);
            const unsigned to = walk.gates + 32 * i;
            store_shared_floats(to, make_float4(values[0], values[1], values[2], values[3]));
            store_shared_floats(to + 16, make_float4(values[4], values[5], values[6], values[7]));
        }
        walk.num = move_fired(walk, 8 * begin, 8 * num, 0);
    }
};

template <class Numbers>
struct PackedGate {
    using Number = typename Numbers::Number;

    const int *counts, *entries;
    int num_tiles, num_slots;
    const Number *x, *w_gate;
    const unsigned short* b_gate;

    template <int SIZE, class Walk>
    __device__ __forceinline__ void fill(Walk& walk, const Sizes& sizes, int token,
                                         int rank) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
        const long long cell = static_cast<long long>(token) * num_tiles + rank;
        const int num_own = (num_tiles - rank + SIZE - 1) / SIZE;
        const int count = lane < num_own ? counts[cell + SIZE * lane] : 0;
        const bool is_whole = count <= num_slots;  // and finite (NOT_FINITE)
        unsigned anew = __ballot_sync(~0u, !is_whole);
        const int kept = is_whole ? count : 0, upto = scan_warp(kept, lane);
#pragma unroll 1
        for (int i = warp; i < num_own; i += num_warps) {
            const int num = __shfl_sync(~0u, kept, i), to = __shfl_sync(~0u, upto, i) - num;
            const int* from = entries + (cell + SIZE * i) * num_slots;
            for (int slot = lane; slot < num; slot += 32) {
                const unsigned entry = from[slot];
                store_shared_word(walk.list + 4 * (to + slot), entry & 0xffff);
                store_shared_word(walk.gates + 4 * (to + slot), entry & 0xffff0000u);
            }
        }
        int num = __shfl_sync(~0u, upto, 31);
#pragma unroll 1
        for (; anew; anew &= anew - 1)
            num += multiply_tile(walk, sizes, token, rank + SIZE * (__ffs(anew) - 1), num);
        __syncthreads();
        walk.num = num;
    }

  private:
    // What fires in a tile goes to places `to` on; returns how many there are.
    template <class Walk>
    __device__ __forceinline__ int multiply_tile(const Walk& walk, const Sizes& sizes, int token,
                                                 int tile, int to) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
        const int first = tile * TILE, num = min(TILE, sizes.N - first);
        const long long row = static_cast<long long>(token) * sizes.K;
        const unsigned gates = walk.gates + 4 * to;
#pragma unroll 1
        for (int i = kAtOnce * warp; i < num; i += kAtOnce * num_warps) {
            float sums[kAtOnce] = {};
#pragma unroll 1
            for (int column = kColumns<Numbers> * lane; column < sizes.K;
                 column += 32 * kColumns<Numbers>) {
                float own[kColumns<Numbers>], weights[kColumns<Numbers>];
                unpack(*reinterpret_cast<const uint4*>(x + row + column), own);
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const long long neuron = min(first + i + j, sizes.N - 1);
                    unpack(load_constant(w_gate + neuron * sizes.K + column), weights);
#pragma unroll
                    for (int k = 0; k < kColumns<Numbers>; ++k)
                        sums[j] = fmaf(own[k], weights[k], sums[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int neuron = first + i + j;
                float gate = sum_over_lanes(sums[j]);
                if (lane != 0 || i + j >= num) continue;
                gate = walk.numbers.scaled_gate(gate, neuron, token);
                if (b_gate) gate += bf16_value(b_gate[neuron]);
                store_shared_word(gates + 4 * (i + j), bf16_bits(gate) << 16);
            }
        }
        return move_fired(walk, first, num, to);
    }
};

// What is the same for both gates.
template <class Numbers>
struct HeavyRows : Numbers {
    using Number = typename Numbers::Number;

    const Number *x, *w_up, *w_down;
    const unsigned short *b_up, *b_down;
    const int *heavy_rows, *heavy_count;
    int few;
    Sizes sizes;
    unsigned short* y;

    template <int SIZE, class Gate>
    __device__ __forceinline__ void walk(const Gate& gate, const uint4* memory) const {
        wait_for_previous();
        let_next_start();
        const int num_heavy = *heavy_count;
        if (num_heavy > few || static_cast<int>(blockIdx.x) >= SIZE * num_heavy) return;
        if (dynamic_smem_bytes() < sizes.bytes(SIZE)) __trap();
        const int token = find_token<SIZE>();
        const Place at = Place::find<Numbers>(sizes, memory);
        at.begin<SIZE>(sizes);

        const Numbers& numbers = *this;
        const bool is_there = kColumns<Numbers> * at.thread < sizes.K;
        const int column = is_there ? kColumns<Numbers> * at.thread : 0;
        using Walk = few_walk::Walk<Numbers, false, SIZE>;
        Walk walk = few_walk::walk_at<Walk>(at, numbers, sizes, w_up, w_down, b_up, column);
        typename Numbers::Input own_x = Numbers::load(x + row_of(token) + column);
        if (!is_there) own_x = {};
        cluster_wait();  // all blocks are there, and their barriers
        gate.template fill<SIZE>(walk, sizes, token, at.rank);
        Numbers::settle(own_x);
        numbers.scale(own_x, token);
        typename Numbers::Sums sums;
        if (walk.num > few_walk::kBatch * at.way)
            walk.run(own_x, at.way, sizes, at.parts + at.way * sizes.parts(), sums);
        // found again or kept, whatever spills nothing
        const long long row = row_of(Numbers::kScaled ? token : find_token<SIZE>());
        few_walk::finish_row<SIZE>(at, numbers, sums, sizes, b_down, nullptr, row, y);
    }

  private:
    template <int SIZE>
    __device__ __forceinline__ int find_token() const {
        return load_written_word(heavy_rows + blockIdx.x / SIZE);
    }
    __device__ __forceinline__ long long row_of(int token) const {
        return static_cast<long long>(token) * sizes.K;
    }
};

}  // namespace few_heavy
