// hidden: h = gate * up of each pair, of the parts of its dot product that `up` left, into the
// rounds of `down`; and the masks of those (tile/round_masks.cuh).
//
// Rounds are read and written in order, a record a lane; of each slot the link says where the parts
// are. Where `up` has few tiles of tokens, the parts are gathered one by one. Where it has many, a
// block takes a tile: it adds up the parts of as many pairs as shared memory holds, in their order,
// as bf16, then goes through all rounds of the tile, and so on until no pair is left.
//
// Launch: blocks of 512 threads. Without dynamic shared memory: grid (any, any), (group, panel)s, a
// warp each, and among the second dimension their rounds, 8 at a time. With dynamic shared memory,
// 2 bytes for each pair that is to fit at once, 16 bytes or more: grid (tiles). partial_stride and
// tile_tokens * cap are multiples of 4 then.
//
// `hidden_kept` always gathers, sums of which there is one a pair, without a bias, and keeps what
// the backward pass needs: of each pair, by its place in `pairs`, gate | up << 16.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/lists.cuh"
#include "tile/round_masks.cuh"

namespace {

constexpr int kThreads = spec::HIDDEN_BLOCK, kWarps = kThreads / 32;
constexpr int kStep = BATCH * ROUND_RECORDS;  // records that a warp has at a time, one a lane

struct Sums {
    const float* partial;  // [ranges, stride]
    long long stride;
    int ranges;
    const unsigned short* b_up;  // or null
};

// The rounds of (group, panel)s.
struct Rounds {
    const int* num_rounds;
    uint4* records;
    const uint4* links;
    unsigned* masks;
    int group_rounds;

    __device__ __forceinline__ long long first_record(int q) const {
        return static_cast<long long>(q) * group_rounds * ROUND_RECORDS;
    }
    __device__ __forceinline__ unsigned* masks_of(int q) const {
        return masks + static_cast<long long>(q) * batches_of(group_rounds) * BATCH_MASKS;
    }
};

__device__ __forceinline__ unsigned element(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ uint4 no_links() {
    return make_uint4(NO_LINK, NO_LINK, NO_LINK, NO_LINK);
}

__device__ __forceinline__ unsigned half_of(unsigned low, unsigned high, int i) {
    return (i < 2 ? low : high) >> (i % 2 * 16) & 0xffff;
}

__device__ __forceinline__ unsigned multiply(unsigned gate, unsigned up) {
    return bf16_bits(bf16_value(gate) * bf16_value(up));
}

// What `hidden_kept` keeps of a pair; without KEEP it does nothing.
template <bool KEEP>
struct Also {
    unsigned* kept;

    __device__ __forceinline__ void pair(unsigned place, unsigned gate, unsigned up) const {
        // a plain store spills a register
        if constexpr (KEEP) __stcg(kept + place, gate | up << 16);
    }
};

// ---- parts gathered one by one

template <int RANGES>
__device__ __forceinline__ void gather_parts(float (&sums)[4], const uint4& link,
                                             const float* partial, long long stride) {
    float parts[RANGES][4];
#pragma unroll
    for (int q = 0; q < RANGES; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned at = element(link, i);
            parts[q][i] = at == NO_LINK ? 0.f : __ldg(partial + q * stride + at);
        }
#pragma unroll
    for (int q = 0; q < RANGES; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += parts[q][i];
}

// h in the place of the record's gates; pads stay what they are.
template <bool KEEP>
__device__ __forceinline__ uint2 gathered_values(const Sums& from, const uint4& record,
                                                 const uint4& link, int first_column,
                                                 const Also<KEEP>& also) {
    float sums[4] = {};
    int range = 0;
    for (; range + 4 <= from.ranges; range += 4)
        gather_parts<4>(sums, link, from.partial + range * from.stride, from.stride);
    for (; range < from.ranges; ++range)
        gather_parts<1>(sums, link, from.partial + range * from.stride, from.stride);
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        h[i] = half_of(record.x, record.y, i);
        if (element(link, i) != NO_LINK) {
            const unsigned code = half_of(record.z, record.w, i);
            if (from.b_up)
                sums[i] += bf16_value(__ldg(from.b_up + first_column + (code & COLUMN_MASK)));
            const unsigned gate = h[i], up = bf16_bits(sums[i]);
            h[i] = multiply(gate, up);
            also.pair(element(link, i), gate, up);
        }
    }
    return make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

template <bool KEEP>
__device__ __forceinline__ void gather_all(const Sums& from, const Rounds& rounds, int num,
                                           int num_panels, int panel_rows, const Also<KEEP>& also) {
    const int lane = threadIdx.x % 32;
    for (int q = blockIdx.x * kWarps + threadIdx.x / 32; q < num; q += gridDim.x * kWarps) {
        const int end = __ldg(rounds.num_rounds + q) * ROUND_RECORDS;
        uint4* records = rounds.records + rounds.first_record(q) + lane;
        const uint4* links = rounds.links + rounds.first_record(q) + lane;
        unsigned* masks = rounds.masks_of(q) + lane;
        for (int i = blockIdx.y * kStep; i < end; i += gridDim.y * kStep) {
            const bool any = i + lane < end;
            const uint4 record = any ? records[i] : make_uint4(0, 0, 0, 0);
            const uint4 link = any ? __ldg(links + i) : no_links();
            masks[i] = batch_mask(make_uint2(record.z, record.w), lane);
            const uint2 values =
                gathered_values(from, record, link, q % num_panels * panel_rows, also);
            if (any) *reinterpret_cast<uint2*>(records + i) = values;
        }
    }
}

// ---- parts of a tile added up in shared memory

__device__ __forceinline__ void add(float4& sum, const float4& part) {
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

// As bf16 into `staged`, of pairs `first` to `first + num`; num is rounded up to whole fours.
__device__ __forceinline__ void stage_sums(const Sums& from, const unsigned* pairs, unsigned first,
                                           int num, uint2* staged) {
    constexpr int BLOCKS = 2, RANGES = 4;  // under way
    const float4* parts = reinterpret_cast<const float4*>(from.partial + first);
    const uint4* pairs_at = reinterpret_cast<const uint4*>(pairs + first);
    const long long stride = from.stride / 4;
    const int num_fours = (num + 3) / 4;
    for (int at = threadIdx.x; at < num_fours; at += BLOCKS * kThreads) {
        const int second = min(at + kThreads, num_fours - 1);
        float4 sums[BLOCKS] = {};
        for (int range = 0; range < from.ranges; range += RANGES) {
            float4 part[RANGES][BLOCKS];
#pragma unroll
            for (int r = 0; r < RANGES; ++r) {
                const long long skipped = min(range + r, from.ranges - 1) * stride;
                part[r][0] = __ldg(parts + skipped + at);
                part[r][1] = __ldg(parts + skipped + second);
            }
#pragma unroll
            for (int r = 0; r < RANGES; ++r)
                if (range + r < from.ranges) add(sums[0], part[r][0]), add(sums[1], part[r][1]);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int to = b == 0 ? at : second;
            if (from.b_up) {
                // pairs behind the last one are no pairs
                const uint4 pair = __ldg(pairs_at + to);
                float bias[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    bias[i] = 4 * to + i < num
                                  ? bf16_value(__ldg(from.b_up + (element(pair, i) >> 16)))
                                  : 0.f;
                add(sums[b], make_float4(bias[0], bias[1], bias[2], bias[3]));
            }
            staged[to] =
                make_uint2(bf16_pair(sums[b].x, sums[b].y), bf16_pair(sums[b].z, sums[b].w));
        }
    }
}

// The next record of each lane, of (group, panel)s one after the other.
struct RecordCursor {
    int q, at, num_records, num_behind;

    __device__ __forceinline__ RecordCursor(const Rounds& rounds, int first, int end)
        : q(first - kWarps), at(0), num_records(0), num_behind(look_up(rounds, first, end)) {
        advance(rounds, end);
    }

    __device__ __forceinline__ static int look_up(const Rounds& rounds, int q, int end) {
        return q < end ? __ldg(rounds.num_rounds + q) * ROUND_RECORDS : 0;
    }

    __device__ __forceinline__ void advance(const Rounds& rounds, int end) {
        at += kStep;
        while (at >= num_records && q < end) {
            q += kWarps, at = 0, num_records = num_behind;
            num_behind = look_up(rounds, q + kWarps, end);
        }
    }
};

struct Record {
    uint4 values, link;  // values and codes
};

__device__ __forceinline__ Record load_record(const Rounds& rounds, const RecordCursor& cursor,
                                              int end, int lane) {
    Record record = {make_uint4(0, 0, 0, 0), no_links()};
    if (cursor.q < end && cursor.at + lane < cursor.num_records) {
        const long long at = rounds.first_record(cursor.q) + cursor.at + lane;
        record = {rounds.records[at], __ldg(rounds.links + at)};
    }
    return record;
}

// Multiplies what is staged, pairs `first` to `first + num`, into the slots that they have.
__device__ __forceinline__ void fill_from_stage(const Rounds& rounds, int begin, int end,
                                                const unsigned short* staged, unsigned first,
                                                unsigned num, bool make_masks) {
    const int lane = threadIdx.x % 32;
    RecordCursor cursor(rounds, begin + threadIdx.x / 32, end);
    Record behind = load_record(rounds, cursor, end, lane);
    while (cursor.q < end) {
        const Record record = behind;
        const RecordCursor here = cursor;
        cursor.advance(rounds, end);
        behind = load_record(rounds, cursor, end, lane);
        if (make_masks)
            rounds.masks_of(here.q)[here.at + lane] =
                batch_mask(make_uint2(record.values.z, record.values.w), lane);
        unsigned h[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned at = element(record.link, i) - first;
            h[i] = half_of(record.values.x, record.values.y, i);
            if (at < num) h[i] = multiply(h[i], staged[at]);
        }
        if (here.at + lane < here.num_records)
            *reinterpret_cast<uint2*>(rounds.records + rounds.first_record(here.q) + here.at +
                                      lane) = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
    }
}

// All rounds of the block's tile, by as many pairs at a time as there is `room` for.
__device__ __forceinline__ void fill_tile(const Sums& from, const Rounds& rounds,
                                          const int* pair_start, const unsigned* pairs,
                                          int num_groups, int N, int tile_tokens, int cap,
                                          int num_panels, unsigned room, uint4* staged) {
    const int tile = blockIdx.x, num_neuron_groups = (N + NEURONS - 1) / NEURONS;
    const unsigned num_pairs =
        pair_start[static_cast<long long>(tile) * (num_neuron_groups + 1) + num_neuron_groups];
    const unsigned first_pair = static_cast<unsigned>(tile) * tile_tokens * cap;
    const int begin = tile * (tile_tokens / GROUP);
    const int end = min(begin + tile_tokens / GROUP, num_groups);
    for (unsigned done = 0; done < num_pairs; done += room) {
        const unsigned first = first_pair + done, num = min(room, num_pairs - done);
        stage_sums(from, pairs, first, num, reinterpret_cast<uint2*>(staged));
        __syncthreads();
        fill_from_stage(rounds, begin * num_panels, end * num_panels,
                        reinterpret_cast<const unsigned short*>(staged), first, num, done == 0);
        __syncthreads();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    hidden(const float* partial, long long partial_stride, int num_ranges, const uint4* links,
           const int* pair_start, const unsigned* pairs, int M, int N, int tile_tokens, int cap,
           int panel_rows, int num_panels, int group_rounds, const unsigned short* b_up,
           const int* num_rounds, uint4* rounds, unsigned* masks) {
    extern __shared__ uint4 staged[];
    const Sums from{partial, partial_stride, num_ranges, b_up};
    const Rounds all{num_rounds, rounds, links, masks, group_rounds};
    const int num_groups = (M + GROUP - 1) / GROUP;
    const unsigned room = dynamic_smem_bytes() / 16 * 8;  // pairs
    if (room == 0)
        gather_all(from, all, num_groups * num_panels, num_panels, panel_rows, Also<false>{});
    else
        fill_tile(from, all, pair_start, pairs, num_groups, N, tile_tokens, cap, num_panels, room,
                  staged);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    hidden_kept(const float* sums, const uint4* links, int M, int panel_rows, int num_panels,
                int group_rounds, const int* num_rounds, uint4* rounds, unsigned* masks,
                unsigned* kept) {
    const Rounds all{num_rounds, rounds, links, masks, group_rounds};
    const int num_groups = (M + GROUP - 1) / GROUP;
    gather_all({sums, 0, 1, nullptr}, all, num_groups * num_panels, num_panels, panel_rows,
               Also<true>{kept});
}
