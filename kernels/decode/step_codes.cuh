// Sums of rows with x, in `step` (step.cuh), over codes of 4 bits (tile/nibbles.cuh), whose
// groups along a row share a scale. What goes onto y is in step_codes_down.cuh.
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
#pragma once

#include "decode/step_fired.cuh"
#include "ptx/barriers.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/nibbles.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kBlocks = K / 64 / kWarps, kSets = (kBlocks + 3) / 4;  // of a warp; fours of them
constexpr int kRowBytes = Int4::bytes(K), kGroups = K / kGroup;
constexpr float kPerCode = 1.f / 16;           // see even_codes
constexpr int kAtOnce = Units<Int4>::kAtOnce;  // units of eight rows, even
static_assert(kSets == kEights, "a lane's eight of x is of each four blocks");

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
};

}  // namespace
