// The products of `step` (step.cuh) over codes of 4 bits (tile/nibbles.cuh), whose groups along a
// row share a scale.
//
// Weights as they lie in memory, K / 2 bytes of codes a row, in quads of rows:
//
//     qkv, out, gate, up   quad q: four rows of codes, then scales, bf16 [row][K / kGroup]
//     down                 quad q: four neurons' rows of codes. Its scales lie elsewhere: bf16
//                          [neuron / kGroup][K]
//
// A row of codes goes by blocks of 64 columns, 32 bytes. Block b of row r lies in place b ^ s, s
// being r % 4, of down r / 4 % 4: so the four rows, or quads, that a warp reads at once are in
// different banks. Blocks w, w + 8, w + 16 .. are those of warp w.
//
// A row's sum: x becomes bytes, an upper and a lower one, by blocks (Whole); 16 rows are the a of
// an mma, a block in two of them, and four blocks have two columns of b each, with 0 in the others.
// So lane 4 g + t has the whole sums of rows g and g + 8 over the t-th of four blocks, multiplies
// them by the scales of weights and x, and adds up in fp32.
//
// Onto y, of neurons whose worths h are bytes in the same way, by one power for all of a thread
// block: a tile is 16 neurons, four of which a lane has. Their bytes are turned, and 16 columns of
// two blocks are the a of an mma. The columns of b are, for each of the two blocks, two for each of
// two groups of neurons. So sums over a group are whole numbers, whatever the number of neurons; at
// its end they are multiplied by the group's scales.
#pragma once

#include "decode/step_fired.cuh"
#include "ptx/barriers.cuh"
#include "ptx/copies.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/nibbles.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kBlocks = K / 64 / kWarps, kSets = (kBlocks + 3) / 4;  // of a warp; fours of them
constexpr int kRowBytes = Int4::bytes(K), kGroups = K / kGroup;
constexpr float kPerCode = 1.f / 16;  // see even_codes
constexpr int kSlots = 4;             // groups of a block's neurons, but those of a map
constexpr int kPairs = (kBlocks + 1) / 2;
constexpr int kAtOnce = Units<Int4>::kAtOnce;  // units of eight rows, even
static_assert(kSets == kEights, "a lane's eight of x is of each four blocks");
static_assert(8 * (kMostRows + 32) <= K, "the planes of a block's neurons and of its map's");
static_assert(Block::kMostGroups <= kSlots + 1, "groups of a block's neurons, two of them a map's");

template <>
struct Columns<Int4, false> {
    uint4 of[kBlocks];
    float back[kSets];
};

// Of rows g, g + 8 .., and their scales.
template <>
struct Taken<Int4, false> {
    uint2 codes[kAtOnce][kBlocks];
    unsigned scales[kAtOnce][kSets];

    // A row's part of block b as operands of two mma.
    __device__ __forceinline__ uint4 operands(int unit, int b) const {
        const uint2& words = codes[unit][b];
        return make_uint4(even_codes(words.x), odd_codes(words.x), even_codes(words.y),
                          odd_codes(words.y));
    }
    __device__ __forceinline__ float scale(int unit, int set) const {
        return bf16_value(scales[unit][set]);
    }
};

// Whole sums onto y: of columns 8 g + 2 m and 8 g + 2 m + 1, each by the upper and the lower byte
// of h; of block t / 2 of a pair, and of group t % 2 of two.
using Sums = int[kPairs][4][4];
using Y = float[kPairs][4];

struct Codes : Fired {
    using Fired::Fired;
    using X = Columns<Int4>;
    using Fired::deal;
    using Fired::multiply_taken;
    using Fired::take;

    // Without a sign, which would take instructions.
    __device__ __forceinline__ int lane() const { return static_cast<unsigned>(thread()) % 32; }
    __device__ __forceinline__ int warp() const { return static_cast<unsigned>(thread()) / 32; }

    // Where a warp's blocks begin in rows that lie so.
    __device__ __forceinline__ int first_block(unsigned swizzle) const {
        return (warp() ^ swizzle) * 32;
    }

    // ---- sums with x

    __device__ __forceinline__ void deal(const uint4 (&eights)[kEights], X& x) const {
        const int lane = this->lane(), quad = lane / 4, t = lane % 4;
        const int to = dealt() + lane / 8 * 128 + lane % 8 * 8;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            unsigned most = most_of(eights[i], 0);
            most = max(most & 0xffff, most >> 16);
#pragma unroll
            for (int apart = 1; apart < 8; apart *= 2)
                most = max(most, __shfl_xor_sync(~0u, most, apart));
            const Whole whole(most);
            x.back[i] = __shfl_sync(~0u, whole.back, 8 * t) * kPerCode;
            if (!has_eight(i)) continue;
            float values[8];
            unpack(eights[i], values);
            int lower[8], upper[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) lower[c] = whole(values[c]), upper[c] = lower[c] + 128;
            at<uint2>(to + 512 * i)[0] =
                make_uint2(second_bytes(upper[0], upper[2], upper[4], upper[6]),
                           second_bytes(upper[1], upper[3], upper[5], upper[7]));
            at<uint2>(to + 512 * i)[8] =
                make_uint2(lowest_bytes(lower[0], lower[2], lower[4], lower[6]),
                           lowest_bytes(lower[1], lower[3], lower[5], lower[7]));
        }
        __syncwarp();
        const unsigned from = memory + dealt() + quad % 2 * 64 + t * 16;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            x.of[b] = make_uint4(0, 0, 0, 0);
            load_shared_if(quad / 2 == b % 4, from + 128 * b, x.of[b]);
        }
        __syncwarp();
    }

    // The next `num` units, out of the ring; if they are fewer than kAtOnce the last several times.
    __device__ __forceinline__ void take(Taken<Int4>& taken, int num) {
        const int lane = this->lane(), row = lane / 4 % 4;
        const int half = lane / 16 * kQuadBytes, in_row = first_block(row) + lane % 4 * 8;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const unsigned quad = memory + kRing + await_unit(min(j, num - 1)) * kUnitBytes + half;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                taken.codes[j][b] = read_shared_pair(quad + row * kRowBytes + in_row + 256 * b);
#pragma unroll
            for (int set = 0; set < kSets; ++set)
                taken.scales[j][set] = load_shared_half(quad + kQuad * kRowBytes +
                                                        2 * (row * kGroups + group_of(set)));
        }
        leave_units(num);
    }

    // The same of the neurons of a list, from `first` on.
    __device__ __forceinline__ void take_listed(Taken<Int4>& taken, const void* weight,
                                                const int* list, int first, int num,
                                                unsigned long long policy) const {
        const int lane = this->lane();
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const unsigned neuron = list[min(first + 8 * j + lane / 4, num - 1)];
            const unsigned row = neuron % kQuad;
            const char* quad = static_cast<const char*>(weight) +
                               static_cast<long long>(neuron / kQuad) * kQuadBytes;
            const char* from = quad + row * kRowBytes + first_block(row) + lane % 4 * 8;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                taken.codes[j][b] = make_uint2(0, 0);
                load_passing_if(true, from + 256 * b, taken.codes[j][b], policy);
            }
            const auto* scales =
                reinterpret_cast<const unsigned short*>(quad + kQuad * kRowBytes) + row * kGroups;
#pragma unroll
            for (int set = 0; set < kSets; ++set)
                taken.scales[j][set] = load_streamed_half(scales + group_of(set));
        }
    }

    // Parts of the sums of rows g, g + 8 ..: the lanes of a quad have some each.
    __device__ __forceinline__ static void multiply_taken(float (&parts)[kAtOnce],
                                                          const Taken<Int4>& taken, const X& x) {
        multiply_by(parts, taken, x.back, [&](int b) { return x.of[b]; });
    }

    // The same, where the columns of b, which are the dealt ones, are read again: they would take
    // registers.
    __device__ __forceinline__ void multiply_listed(float (&parts)[kAtOnce],
                                                    const Taken<Int4>& taken, const X& x) const {
        const int quad = lane() / 4;
        const unsigned from = memory + dealt() + quad / 2 * 128 + quad % 2 * 64 + lane() % 4 * 16;
        uint4 own[kSets] = {};
#pragma unroll
        for (int set = 0; set < kSets; ++set)
            load_shared_if(4 * set + quad / 2 < kBlocks, from + 512 * set, own[set]);
        multiply_by(parts, taken, x.back,
                    [&](int b) { return quad / 2 == b % 4 ? own[b / 4] : make_uint4(0, 0, 0, 0); });
    }

    // columns_of(b): what is beside block b.
    template <class Kind, class ColumnsOf>
    __device__ __forceinline__ static void multiply_by(float (&parts)[kAtOnce],
                                                       const Taken<Kind>& taken,
                                                       const float (&back)[kSets],
                                                       const ColumnsOf& columns_of) {
#pragma unroll
        for (int j = 0; j < kAtOnce; j += 2) multiply_two(parts, taken, j, back, columns_of);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) parts[j] = opaque(parts[j]);
    }

    // The same of two units, from unit `unit` on.
    template <class Kind, class ColumnsOf>
    __device__ __forceinline__ static void multiply_two(float (&parts)[kAtOnce],
                                                        const Taken<Kind>& taken, int unit,
                                                        const float (&back)[kSets],
                                                        const ColumnsOf& columns_of) {
        parts[unit] = parts[unit + 1] = 0.f;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            int sums[2][4] = {};  // products that do not wait for each other
#pragma unroll
            for (int b = 4 * set; b < min(4 * set + 4, kBlocks); ++b) {
                const uint4 low = taken.operands(unit, b), high = taken.operands(unit + 1, b);
                const uint4 columns = columns_of(b);
                multiply_add_bytes(sums[0], low.x, high.x, low.y, high.y, columns.x, columns.y);
                multiply_add_bytes(sums[1], low.z, high.z, low.w, high.w, columns.z, columns.w);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j)
                parts[unit + j] += static_cast<float>(256 * (sums[0][2 * j] + sums[1][2 * j]) +
                                                      (sums[0][2 * j + 1] + sums[1][2 * j + 1])) *
                                   (taken.scale(unit + j, set) * back[set]);
        }
    }

    // The warp's parts of `num` units' rows, to [row][warp].
    __device__ __forceinline__ void store_parts(float (&parts)[kAtOnce], int num, float* to) const {
        const int lane = this->lane(), t = lane % 4;
        if (kAtOnce == 4) exchange_halves(parts, 2, t & 2, 2);
        exchange_halves(parts, 1, t & 1, 1);
        if (kAtOnce == 2) parts[0] += __shfl_xor_sync(~0u, parts[0], 2);
        if (t < num) to[(lane / 4 + 8 * t) * kWarps + warp()] = parts[0];
    }

    // ---- onto y

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

  protected:
    // The group of the lane's block of four.
    __device__ __forceinline__ int group_of(int set) const {
        const int block = min(4 * set + lane() % 4, kBlocks - 1);
        return (8 * block + warp()) / (kGroup / 64);
    }

    // Until the `i`th of the units that come next is there; its place.
    __device__ __forceinline__ int await_unit(int i) const {
        const int place = in_ring(slot + i);
        barrier_wait(full(place), parity ^ (place < slot));
        return place;
    }

    // They are read.
    __device__ __forceinline__ void leave_units(int num) {
        __syncwarp();
        if (lane() < num) barrier_arrive(empty(in_ring(slot + lane())));
        slot += num;
        if (slot >= kUnits) slot -= kUnits, parity ^= 1;
    }

    __device__ __forceinline__ static int in_ring(int place) {
        return place >= kUnits ? place - kUnits : place;
    }

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
