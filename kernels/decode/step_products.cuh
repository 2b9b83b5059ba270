// The products of `step`: weights through the ring, and what a warp makes of them. See step.cuh.
//
// Row by row K is cut among the eight warps, a slice each. A unit is four consecutive rows, or two if
// K is above 2048, as they lie in memory. Of a unit a lane has three or four chunks of 16 bytes, each
// of which is its a of one mma: the first and third word are of row g of that mma, the other two of
// row g + 8, and what they are multiplied by stands in columns 2 c and 2 c + 1 of b, c being the
// group of four chunks that the lane's quad reads. So c0 + c3 of the lane 4 g + c is a part of the
// sum of one row, and nothing is moved between the ring and the mma. Which quad reads which row and
// group is such that eight lanes read from all banks.
//
// One mma takes four groups of a row, or two if its other quads read as many of another row. Slices
// of 1536 columns have 6 groups, those of 3584 have 14: see `moved` for their last two.
#pragma once

#include "decode/step_block.cuh"
#include "ptx/barriers.cuh"
#include "ptx/compiler.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace {

struct Products : Block {
    using Block::Block;

    // ---- the warp that asks for weights

    // Of all layers, one matrix after the other; one thread.
    template <bool SPARSE>
    __device__ __forceinline__ void produce() const {
        constexpr int kKinds = SPARSE ? 3 : 5;
        const unsigned long long policy = passing_by();
        int num = 0, to = 0, watched = 0, turned = block();
        unsigned refill = 1, landed = 0;  // parities
        int l = 0, kind = 0;
#pragma unroll 1
        while (l <= args.num_layers) {
            const bool is_head = l == args.num_layers;
            const Layer* layer = args.layers + (is_head ? 0 : l);
            const unsigned short* weight = is_head     ? args.head
                                           : kind == 0 ? layer->qkv
                                           : kind == 1 ? layer->out
                                           : kind == 2 ? layer->gate
                                           : kind == 3 ? layer->up
                                                       : layer->down;
            const Share share(division(is_head ? 3 : min(kind, 2)),
                              is_head || kind == 1 ? block() : turned);
            const char* from = reinterpret_cast<const char*>(weight) +
                               static_cast<long long>(share.first) * (kQuadUnits * kUnitBytes);
#pragma unroll 1
            for (int i = 0; i < share.num * kQuadUnits; ++i, ++num, from += kUnitBytes) {
                barrier_wait(empty(to), refill);
                if (num >= kAhead) {
                    barrier_wait(full(watched), landed);
                    if (++watched == kUnits) watched = 0, landed ^= 1;
                }
                barrier_expect_bytes(full(to), kUnitBytes);
                copy_bulk(memory + kRing + to * kUnitBytes, from, kUnitBytes, full(to), policy);
                if (++to == kUnits) to = 0, refill ^= 1;
            }
            if (is_head || ++kind == kKinds) kind = 0, ++l, turned = turn(turned);
        }
    }

    // ---- the warps that compute

    // A lane's row and group of chunks of the first of its four loads.
    __device__ __forceinline__ static int row_of(int quad) { return quad & (kUnitRows - 1); }
    __device__ __forceinline__ static int group_of(int quad) {
        return kIsNarrow ? 2 * (quad >> 2) + (quad & 1)
                         : 2 * (quad >> 2) + ((quad ^ quad >> 1) & 1);
    }

    // Where it lies for load `i`: two groups are exchanged, or the next four come. If there are but
    // two more, the high half of the warp, which would have the third and fourth, has those two: of
    // four rows the other one of them, which this row's low quad has not; of two rows the same, for
    // nothing (see is_read_twice).
    __device__ __forceinline__ static unsigned moved(unsigned from, int i) {
        const int next = kIsNarrow ? i / 2 : i;
        bool exchanged = kIsNarrow && i % 2;
        if (4 * next + 2 == kSliceGroups && is_high()) exchanged = kIsNarrow, from -= 128;
        return (from ^ exchanged * 64) + next * 256;
    }

    // By the other half of the warp, which adds it up.
    __device__ __forceinline__ static bool is_read_twice(int i) {
        return !kIsNarrow && 4 * i + 2 == kSliceGroups && is_high();
    }

    // Whether the lane has the third or fourth of four groups.
    __device__ __forceinline__ static bool is_high() { return opaque(threadIdx.x) % 32 >= 16; }

    // Where a lane's first chunk lies in rows that are so many bytes apart.
    __device__ __forceinline__ unsigned place_in_unit(int row_bytes) const {
        const int quad = thread() % 32 / 4, t = thread() % 4;
        return row_of(quad) * row_bytes + thread() / 32 * (K / 4) + group_of(quad) * 64 + t * 16;
    }

    __device__ __forceinline__ static void load_unit(Unit& unit, unsigned from) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) unit[i] = load_shared(moved(from, i));
    }

    // x by the eights that the warp's lanes hold, to the columns of b.
    __device__ __forceinline__ void deal(const uint4 (&eights)[kEights], Columns& x) const {
        const int lane = thread() % 32, column = lane / 4, t = lane % 4;
        const int slice = kDealt + thread() / 32 * (K / 4);
#pragma unroll
        for (int i = 0; i < kEights; ++i)
            if (all_have(kEights - 1) || has_eight(i))  // the first is known before unrolling
                at<uint4>(slice)[32 * i + lane] =
                    make_uint4(eights[i].x, eights[i].z, eights[i].y, eights[i].w);
        __syncwarp();
        const unsigned from = memory + slice + column / 2 * 64 + t * 16 + column % 2 * 8;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const uint2 b = load_shared_pair(moved(from, i));
            x[i] = {b.x, b.y};
            if (is_read_twice(i)) x[i] = {0, 0};
        }
        __syncwarp();
    }

    // The next `num` units, out of the ring; if that is less than kTake the last one several times.
    __device__ __forceinline__ void take(Unit (&taken)[kTake], int num) {
        const int lane = thread() % 32;
        const unsigned from = memory + kRing + place_in_unit(2 * K);
        int slots[kTake];
        unsigned parities[kTake];
        bool are_there = true;
#pragma unroll
        for (int j = 0; j < kTake; ++j) {
            slots[j] = slot + min(j, num - 1);
            const bool is_over = slots[j] >= kUnits;
            slots[j] -= is_over ? kUnits : 0;
            parities[j] = parity ^ is_over;
        }
#pragma unroll
        for (int j = 0; j < kTake; ++j)
            are_there = barrier_is_over(full(slots[j]), parities[j]) && are_there;
        if (!are_there)
#pragma unroll
            for (int j = 0; j < kTake; ++j) barrier_wait(full(slots[j]), parities[j]);
#pragma unroll
        for (int j = 0; j < kTake; ++j) load_unit(taken[j], from + slots[j] * kUnitBytes);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kTake; ++j)
            if (lane == j && j < num) barrier_arrive(empty(slots[j]));
        slot += num;
        if (slot >= kUnits) slot -= kUnits, parity ^= 1;
    }

    // Of a unit: in the lane 4 g + group_of(g) a part of the warp's part of row row_of(g).
    __device__ __forceinline__ static float part_of_sum(const Unit& unit, const Columns& x) {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            multiply_add(sums[i % 2], unit[i].x, unit[i].y, unit[i].z, unit[i].w, x[i].b0, x[i].b1);
        return opaque((sums[0][0] + sums[0][3]) + (sums[1][0] + sums[1][3]));
    }

    // The warp's parts of `num` units' rows, to [row][warp].
    template <int NUM>
    __device__ __forceinline__ void store_sums(float (&parts)[NUM], int num, float* to) const {
        const int lane = thread() % 32, row = lane / 4;
        to += row * kWarps + thread() / 32;
        const bool has_row = row < kUnitRows && lane % 4 == group_of(row);
#pragma unroll
        for (int j = 0; j < NUM; ++j) {
            if (!kIsNarrow) parts[j] += __shfl_xor_sync(~0u, parts[j], 9);
            parts[j] += __shfl_xor_sync(~0u, parts[j], 18);
        }
#pragma unroll
        for (int j = 0; j < NUM; ++j)
            if (has_row && j < num) to[j * kUnitRows * kWarps] = parts[j];
    }
};

}  // namespace
