// What goes onto y in `step` (step.cuh) over codes of 4 bits: rows of down, which step_codes.cuh
// says how they lie, times what their neurons are worth.
//
// What neurons are worth, h, are bytes as x is there, by one power for all of a thread block. A
// tile is 16 neurons, four of which a lane has. Their bytes are turned, and 16 columns of two
// blocks are the a of an mma. The columns of b are, for each of the two blocks, two for each of two
// groups of neurons. So sums over a group are whole numbers, whatever the number of neurons; at its
// end they are multiplied by the group's scales.
#pragma once

#include "decode/step_codes.cuh"
#include "ptx/barriers.cuh"
#include "ptx/copies.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/nibbles.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kSlots = 4;  // groups of a block's neurons, but those of a map
constexpr int kPairs = (kBlocks + 1) / 2;
static_assert(8 * (kMostRows + 32) <= K, "the planes of a block's neurons and of its map's");
static_assert(Block::kMostGroups <= kSlots + 1, "groups of a block's neurons, two of them a map's");

// Whole sums onto y: of columns 8 g + 2 m and 8 g + 2 m + 1, each by the upper and the lower byte
// of h; of block t / 2 of a pair, and of group t % 2 of two.
using Sums = int[kPairs][4][4];
using Y = float[kPairs][4];

struct CodesDown : Codes {
    using Codes::Codes;

    // The scales of down of the groups of the block's neurons, and behind them of those that share
    // a gate, to shared memory; wait_for_copies waits.
    template <int FORM>
    __device__ __forceinline__ void fetch_scales(const Layer& layer, const Share& share) const {
        fetch_group_scales(layer, share, 0);
        if (FORM != kDenseForm && mapped().num > 0)
            fetch_group_scales(layer, of_map(), num_groups(share));
        commit_copies();
    }

    // Those of neurons that share a gate.
    __device__ __forceinline__ Share of_map() const {
        const Share share = mapped();
        return {first_shared() / kQuad + share.first, share.num};
    }

    __device__ __forceinline__ static int group_of_neuron(unsigned neuron) {
        return neuron / kGroup;
    }
    __device__ __forceinline__ static int num_groups(const Share& share) {
        if (share.num == 0) return 0;
        return group_of_neuron(kQuad * (share.first + share.num) - 1) -
               group_of_neuron(kQuad * share.first) + 1;
    }

    // What threads have of h, as bytes, behind two barriers: of place i of the tiles of 16 neurons
    // the columns of b of its group, `slot` of kSlots. What takes the sums back.
    __device__ __forceinline__ float give_planes(float hidden, int place, int slot) {
        const int lane = this->lane();
        unsigned most = __float_as_uint(hidden) >> 16 & 0x7fff;
        most = __reduce_max_sync(~0u, most);
        float* all = at<float>(kNorms) + norms_at * kWarps;
        norms_at ^= 1;
        if (lane == 0) all[warp()] = __uint_as_float(most);
        sync_consumers();
        most = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) most = max(most, __float_as_uint(all[i]));
        const Whole whole(most);
        if (place >= 0) {
            const int lower = whole(hidden), upper = lower + 128 >> 8;
            auto* to = at<signed char>(kPlanes) + place / 4 * 32 + place % 4;
#pragma unroll
            for (int i = 0; i < kSlots; ++i) {
                to[8 * i] = static_cast<signed char>(i == slot ? upper : 0);
                to[8 * i + 4] = static_cast<signed char>(i == slot ? lower : 0);
            }
        }
        sync_consumers();
        return whole.back * kPerCode;
    }

    // A tile of those, of two of the groups: the lane's two registers of b.
    __device__ __forceinline__ uint2 planes_of(int tile, int two) const {
        const int lane = this->lane(), quad = lane / 4;
        const unsigned planes = load_shared_word(memory + kPlanes + tile * 128 + lane % 4 * 32 +
                                                 two * 16 + quad % 4 * 4);
        return quad < 4 ? make_uint2(planes, 0) : make_uint2(0, planes);
    }

    // A tile onto the sums; rows_of(b, rows) gives four rows' words of the lane's eight columns.
    template <class RowsOf>
    __device__ __forceinline__ static void add_tile(Sums& sums, const uint2& planes,
                                                    const RowsOf& rows_of) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            unsigned low[4], high[4] = {};
            rows_of(2 * pair, low);
            transpose_bytes(low);
            if (2 * pair + 1 < kBlocks) {
                rows_of(2 * pair + 1, high);
                transpose_bytes(high);
            }
#pragma unroll
            for (int m = 0; m < 4; ++m)
                multiply_add_bytes(sums[pair][m], even_codes(low[m]), odd_codes(low[m]),
                                   even_codes(high[m]), odd_codes(high[m]), planes.x, planes.y);
        }
    }

    // Onto y: `num_tiles` tiles of neurons that ascend. last_of(i) is the last neuron of a tile,
    // whose h stand from tile `first_tile` on. begin(i), rows_of(b, rows) and end(i) read its rows.
    // `first`: the group of the first neuron, whose scales are the `at`th.
    template <class LastOf, class Begin, class RowsOf, class End>
    __device__ __forceinline__ void add_tiles(Y& y, int num_tiles, int first_tile, int first,
                                              int at, float back, const LastOf& last_of,
                                              const Begin& begin, const RowsOf& rows_of,
                                              const End& end) {
        Sums sums = {};
        int two = 0;
#pragma unroll 1
        for (int i = 0; i < num_tiles; ++i) {
            begin(i);
#pragma unroll 1
            while (true) {
                add_tile(sums, planes_of(first_tile + i, two), rows_of);
                const int last = group_of_neuron(last_of(i)) - first;
                const bool is_through = two == last / 2;
                if (is_through) end(i);
                if (is_through && i + 1 < num_tiles) break;
                put_together(y, sums, at + 2 * two, min(2, last + 1 - 2 * two), back);
                if (is_through) break;
                ++two;
            }
        }
    }

    // The next units of the ring, rows of down of `share`.
    __device__ __forceinline__ void add_units(Y& y, const Share& share, int first_tile, int at,
                                              float back) {
        const int lane = this->lane(), t = lane % 4;
        const int in_row = first_block((share.first + t) % 4) + lane / 4 * 4;
        const int half = t % 2 * (kQuad * kRowBytes);
        const auto units_from = [&](int i) { return min(2, units_of(share.num) - 2 * i); };
        unsigned from = 0;
        add_tiles(
            y, (share.num + 3) / 4, first_tile, group_of_neuron(kQuad * share.first), at, back,
            [&](int i) { return kQuad * (share.first + min(4 * i + 4, share.num)) - 1; },
            [&](int i) {
                const int first = await_unit(0), last = await_unit(units_from(i) - 1);
                from = memory + kRing + (t < 2 ? first : last) * kUnitBytes + half + in_row;
            },
            [&](int b, unsigned (&rows)[4]) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    rows[j] = load_shared_word(from + j * kRowBytes + 256 * b);
            },
            [&](int i) { leave_units(units_from(i)); });
    }

    static constexpr int kTiles = kAtOnce / 2;  // of 16 neurons, that are under way at once

    // The lane's words of rows of down of a list, four neurons from place `first` + 4 t on.
    struct Listed {
        unsigned rows[kBlocks][4];
    };
    __device__ __forceinline__ static void take_no_columns(Listed& listed) {
#pragma unroll
        for (auto& rows : listed.rows) rows[0] = rows[1] = rows[2] = rows[3] = 0;
    }
    __device__ __forceinline__ void take_columns(Listed& listed, const void* weight,
                                                 const int* list, int first, int num,
                                                 unsigned long long policy) const {
        const int lane = this->lane();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = first + lane % 4 * 4 + j;
            const unsigned neuron = i < num ? list[i] : 0;
            const char* from = static_cast<const char*>(weight) +
                               static_cast<long long>(neuron) * kRowBytes +
                               first_block(neuron / kQuad % 4) + lane / 4 * 4;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                load_passing_if(i < num, from + 256 * b, listed.rows[b][j], policy);
            }
        }
    }

    // Sums of one or two groups, which begin anew, times their scales and `back`: onto columns
    // 8 g + 4 (t % 2) .. of block t / 2 of each pair.
    __device__ __forceinline__ void put_together(Y& y, Sums& sums, int group, int groups,
                                                 float back) const {
        const int lane = this->lane(), t = lane % 4;
        const unsigned from = memory + kDownScales + (group + t % 2) * kDownScaleBytes +
                              2 * (t / 2 * 512 + warp() * 64 + lane / 4 * 8);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            uint4 eight = make_uint4(0, 0, 0, 0);
            load_shared_if(t % 2 < groups && 2 * pair + t / 2 < kBlocks, from + 2048 * pair, eight);
            float scales[8], values[8];
            unpack(eight, scales);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                int& upper = sums[pair][c / 2][c % 2 * 2];
                int& lower = sums[pair][c / 2][c % 2 * 2 + 1];
                values[c] = static_cast<float>(256 * upper + lower) * scales[c];
                upper = lower = 0;
            }
            exchange_halves(values, 4, t & 1, 1);
#pragma unroll
            for (int c = 0; c < 4; ++c) y[pair][c] += values[c] * back;
        }
    }

    __device__ __forceinline__ void give_part(const Y& y, unsigned tag) const {
        const int lane = this->lane(), t = lane % 4;
        unsigned* to =
            y_parts() + block() * K + t / 2 * 512 + warp() * 64 + lane / 4 * 8 + t % 2 * 4;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
            if (2 * pair + t / 2 < kBlocks)
                store_relaxed(to + 1024 * pair,
                              make_uint4(part_word(y[pair][0], tag), part_word(y[pair][1], tag),
                                         part_word(y[pair][2], tag), part_word(y[pair][3], tag)));
    }

  private:
    __device__ __forceinline__ void fetch_group_scales(const Layer& layer, const Share& share,
                                                       int first) const {
        const int groups = num_groups(share), group = group_of_neuron(kQuad * share.first);
#pragma unroll 1
        for (int i = thread(); i < groups * (K / 8); i += kConsumers)
            copy_async(
                memory + kDownScales + (first + i / (K / 8)) * kDownScaleBytes + i % (K / 8) * 16,
                layer.down_scales + static_cast<long long>(group) * K + 8 * i);
    }
};

}  // namespace
