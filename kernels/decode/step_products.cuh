// The products of `step`: weights through the ring, and what a warp makes of them. See step.cuh.
//
// Row by row K is cut among the eight warps, a slice each. A unit is four consecutive rows, or two,
// as they lie in memory. Of a unit a lane has two to four chunks of 16 bytes. Each in bf16 is its a
// of one mma: the first and third word are of row g of that mma, the other two of row g + 8, and
// what they are multiplied by stands in columns 2 c and 2 c + 1 of b, c being the group of four
// chunks that the lane's quad reads. So c0 + c3 of the lane 4 g + c is a part of the sum of one
// row, and nothing is moved between the ring and the mma. Which quad reads which row and group is
// such that eight lanes read from all banks.
//
// One mma takes four groups of a row, or two if its other quads read as many of another row. Slices
// of 1536 columns of bf16 have 6 groups, those of 3584 have 14: see `moved` for their last two.
//
// A chunk of weights of 8 bits is made two such a. Where they are f16, so is x (tile/halves.cuh).
// If rows have scales, those of a unit come with it.
#pragma once

#include "decode/step_block.cuh"
#include "ptx/barriers.cuh"
#include "ptx/compiler.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/halves.cuh"
#include "tile/weights.cuh"

namespace {

struct Products : Block {
    using Block::Block;

    // ---- the warp that asks for weights

    // Of all layers, one matrix after the other; one thread. Behind the gate comes the row that
    // neurons share, and of those neurons up and down.
    template <int FORM>
    __device__ __forceinline__ void produce() const {
        const unsigned long long policy = passing_by();
        Asked asked = {0, 0, 0, 1, 0};
        const bool has_map = FORM != kDenseForm && mapped().num > 0;
        int l = 0, kind = 0, turned = block();
        bool of_map = false;
        Places places = places_of(0), next = places_of(1);
#pragma unroll 1
        while (l <= args.num_layers) {
            const bool is_head = l == args.num_layers;
            ask_for<FORM>(asked, matrix_of<FORM>(places, l, kind, of_map, turned), l, policy);
            if (has_map && kind == kGate && !of_map) {
                of_map = true;  // the gate a second time, for the row of it that is shared
            } else if (++kind > (FORM == kDenseForm || of_map ? kDown : kGate) || is_head) {
                kind = 0, of_map = false, ++l, turned = turn(turned);
                places = next, next = places_of(l + 1);
            }
        }
    }

    // Where a layer's weights begin; asked for a layer ahead, for the answer takes its time.
    struct Places {
        const void *qkv, *out, *gate, *copy, *up, *down;
    };
    __device__ __forceinline__ Places places_of(int l) const {
        const Layer& layer = args.layers[min(l, args.num_layers - 1)];
        return {layer.qkv, layer.out, layer.gate, layer.copy, layer.up, layer.down};
    }

    // The block's share of a matrix, in quads of rows, or in row blocks of the gate's copy.
    struct Matrix {
        const void* weight;
        Share share;
        int quad_bytes, unit_bytes;
        const float* scales;  // of the share's first row, or null
        int num_units;
        bool screens;
        bool waits;  // but for the first units, for the rows that fired in the layer before

        __device__ __forceinline__ const char* unit(int quad) const {
            return static_cast<const char*>(weight) + static_cast<long long>(quad) * quad_bytes;
        }

        // Bytes of unit `i`: of the last one perhaps half of them.
        __device__ __forceinline__ unsigned bytes_of(int i) const {
            if (!Weight::kGroupScales) return unit_bytes;
            return min(unit_bytes, share.num * quad_bytes - i * unit_bytes);
        }
    };

    template <int FORM>
    __device__ __forceinline__ Matrix matrix_of(const Places& places, int l, int kind, bool of_map,
                                                int turned) const {
        const bool is_head = l == args.num_layers;
        [[maybe_unused]] const Layer* layer = args.layers + (is_head ? 0 : l);
        const bool screens = FORM == kScreenedForm && kind == kGate && !of_map && !is_head;
        const void* weight = is_head         ? args.head
                             : kind == kQkv  ? places.qkv
                             : kind == kOut  ? places.out
                             : screens       ? places.copy
                             : kind == kGate ? places.gate
                             : kind == kUp   ? places.up
                                             : places.down;
        Share share(division(is_head  ? 3
                             : of_map ? 4
                                      : min(kind, kGate)),
                    is_head || of_map || kind == kOut ? block() : turned);
        if (of_map) {
            if (kind == kGate) share = {0, min(share.num, 1)};
            share.first += first_shared() / kQuad;
        }
        // a codes' row of down has its scales elsewhere
        const int of_weight = kind == kDown ? kQuad * Weight::bytes(K) : kQuadBytes;
        const int quad_bytes = screens   ? kScreenParts * kScreenBytes
                               : is_head ? kQuad * Head::bytes(K)
                                         : of_weight;
        const int unit_bytes = screens   ? kScreenBytes
                               : is_head ? Units<Head>::kRows * Head::bytes(K)
                                         : of_weight * kUnitRows / kQuad;
        const int num_units = screens   ? share.num * kScreenParts
                              : is_head ? share.num * Units<Head>::kQuadUnits
                                        : units_of(share.num);
        const float* scales = nullptr;
        if constexpr (Weight::kRowScales)
            if (!is_head && kind < kDown) scales = layer->scales_of(kind) + kQuad * share.first;
        // what nobody waits for yet would stand before those rows
        const bool waits = FORM != kDenseForm && l > 0 && (kind == kQkv || is_head);
        return {weight, share, quad_bytes, unit_bytes, scales, num_units, screens, waits};
    }

    // What was asked for: units that are on their way (those before them are not looked at), the
    // place in the ring of the next one, that of the next to be there, and their parities.
    struct Asked {
        int num, to, watched;
        unsigned refill, landed;
    };

    // Unit after unit of a share.
    template <int FORM>
    __device__ __forceinline__ void ask_for(Asked& asked, const Matrix& matrix, int l,
                                            unsigned long long policy) const {
        const Share& share = matrix.share;
        const char* from = matrix.unit(share.first);
        const float* scales = matrix.scales;  // of the next unit's rows
        const int num_units = matrix.num_units, unit_bytes = matrix.unit_bytes;
        const int eager = min(kEager, num_units);
        int row_block = 0, part = 0, screened = 0;  // of a warp each, and those before
#pragma unroll 1
        for (int i = 0; i < num_units; ++i, ++asked.num, from += unit_bytes) {
            if (matrix.waits && i == eager) barrier_wait(has_rows(), (l - 1) & 1);
            if (FORM == kScreenedForm && matrix.screens) {
                from = matrix.unit(share.first + screened + row_block) + part * kScreenBytes;
                if (++row_block == min(kWarps, share.num - screened)) {
                    row_block = 0;
                    if (++part == kScreenParts) part = 0, screened += kWarps;
                }
            }
            barrier_wait(empty(asked.to), asked.refill);
            await_landed<FORM>(asked, matrix.screens);
            const unsigned num_bytes = matrix.bytes_of(i);
            barrier_expect_bytes(full(asked.to), num_bytes + (scales ? kScaleBytes : 0));
            copy_bulk(memory + kRing + asked.to * kUnitBytes, from, num_bytes, full(asked.to),
                      policy);
            if constexpr (Weight::kRowScales)
                if (scales) {
                    copy_bulk(scales_at(asked.to), scales, kScaleBytes, full(asked.to), policy);
                    scales += kQuad;
                }
            if (++asked.to == kUnits) asked.to = 0, asked.refill ^= 1;
        }
        if (matrix.waits && eager == num_units) barrier_wait(has_rows(), (l - 1) & 1);
    }

    // Until fewer units are on their way than may be.
    template <int FORM>
    __device__ __forceinline__ void await_landed(Asked& asked, bool screens) const {
        const auto await_next = [&] {
            barrier_wait(full(asked.watched), asked.landed);
            if (++asked.watched == kUnits) asked.watched = 0, asked.landed ^= 1;
        };
        if constexpr (FORM == kScreenedForm) {
            for (const int most = screens ? kScreenAhead : kAhead; asked.num >= most; --asked.num)
                await_next();
        } else if (asked.num >= kAhead) {
            await_next();
        }
    }

    // Of the rows of a unit of the ring.
    __device__ __forceinline__ unsigned scales_at(int slot) const {
        return memory + kScales + slot * kScaleBytes;
    }

    // ---- the warps that compute

    // A lane's row and group of chunks of the first of its four loads.
    template <class Kind>
    __device__ __forceinline__ static int row_of(int quad) {
        return quad & (Units<Kind>::kRows - 1);
    }
    template <class Kind>
    __device__ __forceinline__ static int group_of(int quad) {
        return Units<Kind>::kRows == 4 ? 2 * (quad >> 2) + (quad & 1)
                                       : 2 * (quad >> 2) + ((quad ^ quad >> 1) & 1);
    }

    // Where it lies for load `i`: two groups are exchanged, or the next four come. If there are but
    // two more, the high half of the warp, which would have the third and fourth, has those two: of
    // four rows the other one of them, which this row's low quad has not; of two rows the same, for
    // nothing (see is_read_twice). GROUP: bytes of a group, of weights or of x.
    template <class Kind, int GROUP = 64>
    __device__ __forceinline__ static unsigned moved(unsigned from, int i) {
        constexpr bool kFour = Units<Kind>::kRows == 4;
        const int next = kFour ? i / 2 : i;
        bool exchanged = kFour && i % 2;
        if (4 * next + 2 == Units<Kind>::kGroups && is_high()) exchanged = kFour, from -= 2 * GROUP;
        return (from ^ exchanged * GROUP) + next * (4 * GROUP);
    }

    // By the other half of the warp, which adds it up.
    template <class Kind>
    __device__ __forceinline__ static bool is_read_twice(int i) {
        return Units<Kind>::kRows == 2 && 4 * i + 2 == Units<Kind>::kGroups && is_high();
    }

    // Whether the lane has the third or fourth of four groups.
    __device__ __forceinline__ static bool is_high() { return opaque(threadIdx.x) % 32 >= 16; }

    // Where the warp's slice of a row begins, or the group in front of it.
    template <class Kind>
    __device__ __forceinline__ int slice_at() const {
        const int at = thread() / 32 * Units<Kind>::kSliceBytes;
        return Units<Kind>::kIsOdd ? at & ~127 : at;
    }

    // Where a lane's first chunk lies in rows that are so many bytes apart.
    template <class Kind>
    __device__ __forceinline__ unsigned place_in_unit(int row_bytes) const {
        const int quad = thread() % 32 / 4, t = thread() % 4;
        return row_of<Kind>(quad) * row_bytes + slice_at<Kind>() + group_of<Kind>(quad) * 64 +
               t * 16;
    }

    template <class Kind>
    __device__ __forceinline__ static void load_unit(Unit<Kind>& unit, unsigned from) {
#pragma unroll
        for (int i = 0; i < Units<Kind>::kChunks; ++i) unit[i] = load_shared(moved<Kind>(from, i));
    }

    // Where a warp has x. What lies beside weights that are not of its slice stays 0.
    __device__ __forceinline__ int dealt() const {
        return kDealt + thread() / 32 * Layers::kXBytes;
    }

    __device__ __forceinline__ void clear_dealt() const {
        if constexpr (Layers::kIsOdd) {
            for (int i = thread() % 32; i < Layers::kXBytes / 16; i += 32)
                at<uint4>(dealt())[i] = make_uint4(0, 0, 0, 0);
            __syncwarp();
        }
    }

    // x by the eights that the warp's lanes hold, to the columns of b.
    template <class Kind>
    __device__ __forceinline__ void deal(const uint4 (&eights)[kEights], Columns<Kind>& x) const {
        const int lane = thread() % 32, column = lane / 4, t = lane % 4;
        const int to = dealt();
        // what begins behind the neighbour's group
        const bool is_behind = Units<Kind>::kIsOdd && thread() / 32 % 2;
        unsigned powers = 0;
        if constexpr (Kind::kInF16) {
            const unsigned power = power_of(eights);
            powers = power << 7 | power << 23;
            x.back = power_back(power);
            if (lane == 0) at<float>(kBacks)[thread() / 32] = x.back;
        }
#pragma unroll
        for (int i = 0; i < kEights; ++i)
            if (all_have(kEights - 1) || has_eight(i)) {  // the first is known before unrolling
                uint4 v = eights[i];
                if constexpr (Kind::kInF16)
                    v = make_uint4(scaled_f16(v.x, powers), scaled_f16(v.y, powers),
                                   scaled_f16(v.z, powers), scaled_f16(v.w, powers));
                at<uint4>(to + is_behind * 128)[32 * i + lane] = make_uint4(v.x, v.z, v.y, v.w);
            }
        __syncwarp();
        // so many chunks of x belong to one of the weights
        constexpr int kParts = Kind::kEights, kGroupBytes = 64 * kParts;
        const unsigned from =
            memory + to + column / 2 * kGroupBytes + t * (16 * kParts) + column % 2 * 8;
#pragma unroll
        for (int i = 0; i < Units<Kind>::kChunks; ++i)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                Column& own = x.of[kParts * i + part];
                const uint2 b = load_shared_pair(moved<Kind, kGroupBytes>(from, i) + 16 * part);
                own = {b.x, b.y};
                if (is_read_twice<Kind>(i)) own = {0, 0};
            }
        __syncwarp();
    }

    // By which the warp's part of x fits f16.
    __device__ __forceinline__ static unsigned power_of(const uint4 (&eights)[kEights]) {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < kEights; ++i) most = most_of(eights[i], most);
        most = max(most & 0xffff, most >> 16);
        return power_for_f16(__reduce_max_sync(~0u, static_cast<int>(most)));
    }

    // The next `num` units, out of the ring; if that is less than kTake the last one several times.
    template <class Kind>
    __device__ __forceinline__ void take(Taken<Kind>& taken, int num) {
        const int lane = thread() % 32;
        const unsigned from = memory + kRing + place_in_unit<Kind>(Kind::bytes(K));
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
        for (int j = 0; j < kTake; ++j)
            load_unit<Kind>(taken.units[j], from + slots[j] * kUnitBytes);
        if constexpr (Kind::kRowScales)
#pragma unroll
            for (int j = 0; j < kTake; ++j)
                taken.scales[j] =
                    load_shared_float(scales_at(slots[j]) + 4 * row_of<Kind>(lane / 4));
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kTake; ++j)
            if (lane == j && j < num) barrier_arrive(empty(slots[j]));
        slot += num;
        if (slot >= kUnits) slot -= kUnits, parity ^= 1;
    }

    // Of a unit: in the lane 4 g + group_of(g) a part of the warp's part of row row_of(g).
    template <class Kind>
    __device__ __forceinline__ static float part_of_sum(const Unit<Kind>& unit,
                                                        const Columns<Kind>& x) {
        float sums[2][4] = {};
#pragma unroll
        for (int i = 0; i < Units<Kind>::kChunks; ++i) {
            uint4 eights[Kind::kEights];
#pragma unroll
            for (int part = 0; part < Kind::kEights; ++part)
                eights[part] = operands_of<Kind, Kind::kInF16>(unit[i], part);
#pragma unroll
            for (int part = 0; part < Kind::kEights; ++part) {
                const int at = Kind::kEights * i + part;
                const uint4& a = eights[part];
                multiply_add_either<Kind::kInF16>(sums[at % 2], a.x, a.y, a.z, a.w, x.of[at].b0,
                                                  x.of[at].b1);
            }
        }
        float sum = (sums[0][0] + sums[0][3]) + (sums[1][0] + sums[1][3]);
        if constexpr (Kind::kInF16) sum *= x.back;
        return opaque(sum);
    }

    // The same of unit `j` of those in registers, times its row's scale.
    template <class Kind>
    __device__ __forceinline__ static float scaled_part(const Taken<Kind>& taken, int j,
                                                        const Columns<Kind>& x) {
        const float part = part_of_sum<Kind>(taken.units[j], x);
        if constexpr (Kind::kRowScales) return part * taken.scales[j];
        return part;
    }

    template <class Kind>
    __device__ __forceinline__ static void multiply_taken(float (&parts)[kTake],
                                                          const Taken<Kind>& taken,
                                                          const Columns<Kind>& x) {
#pragma unroll
        for (int j = 0; j < kTake; ++j) parts[j] = scaled_part(taken, j, x);
    }

    // The warp's parts of `num` units' rows, to [row][warp].
    template <class Kind, int NUM>
    __device__ __forceinline__ void store_sums(float (&parts)[NUM], int num, float* to) const {
        constexpr int kRows = Units<Kind>::kRows;
        const int lane = thread() % 32, row = lane / 4;
        to += row * kWarps + thread() / 32;
        const bool has_row = row < kRows && lane % 4 == group_of<Kind>(row);
#pragma unroll
        for (int j = 0; j < NUM; ++j) {
            if (kRows == 2) parts[j] += __shfl_xor_sync(~0u, parts[j], 9);
            parts[j] += __shfl_xor_sync(~0u, parts[j], 18);
        }
#pragma unroll
        for (int j = 0; j < NUM; ++j)
            if (has_row && j < num) to[j * kRows * kWarps] = parts[j];
    }

    // The head in bf16, where the layers are not.
    __device__ __forceinline__ void multiply_head(const Columns<Bf16>& x) {
        constexpr int kRows = Units<Bf16>::kRows, kRowsAtOnce = kTake * kRows;
        const Share share(division(3), block());
        const int num_units = share.num * Units<Bf16>::kQuadUnits;
#pragma unroll 1
        for (int i = 0; i < num_units; i += kTake) {
            const int row = i * kRows % kMostSums, num = min(kTake, num_units - i);
            Taken<Bf16> taken;
            float parts[kTake];
            take(taken, num);
            multiply_taken(parts, taken, x);
            store_sums<Bf16>(parts, num, sums() + row * kWarps);
            if (row + kRowsAtOnce < kMostSums && i + kTake < num_units) continue;
            sync_consumers();
            if (thread() < row + num * kRows)
                args.logits[kQuad * share.first + i * kRows - row + thread()] =
                    sum_of_warps(sums() + thread() * kWarps);
            flip_sums();
        }
    }
};

}  // namespace
