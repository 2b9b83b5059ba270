// Attention in `step_rows` (step_rows.cuh): a block has up to kJobs heads of tokens. Their keys and
// values come through the ring as weights do, before those of o: so they keep coming while q is
// waited for. All warps share each place of the ring, eight positions a warp of every 64, so that
// texts of any length are dealt alike.
//
// Of DIM = 64 a place holds two pages of 64 positions, each unit keys and values of one; of 128 it
// holds one, a unit the keys and a unit the values.
#pragma once

#include "decode/step_rows_products.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"

namespace {

constexpr int kHere = 4;  // positions of a lane, of a place

template <int DIM>
struct Cached {
    static constexpr int kPages = 128 / DIM, kSpan = kPages * kPage;  // of a place
    static constexpr int kTasks = kMostTasks * 64 / DIM;              // of a block, at most
    static constexpr int kBytes = 2 * DIM;                            // of a head of a position
    static_assert(Block::kNew + kTasks * 3 * kBytes <= Block::kNewEnd, "");
    static_assert(Block::kHeads + kTasks * kWarps * (DIM + 2) * 4 <= Block::kHeadsEnd, "");
};

struct Attention : Products {
    using Products::Products;

    __device__ __forceinline__ void plan_task(int j) const {
        const int which = block() + j * gridDim.x;
        Task task;
        task.is_there = which < args.num_tokens * args.H;
        task.token = task.is_there ? which / args.H : 0, task.head = which % args.H;
        task.kv = task.head / (args.H / args.Hkv);
        task.position = args.positions[task.token];
        const int window = args.layers->window;
        task.start = window > 0 ? max(0, task.position - window + 1) : 0;
        at<Task>(kTasks)[j] = task;
    }

    // ---- the warp that brings

    template <int DIM>
    __device__ __forceinline__ void bring_cached(Ring& ring, const Layer* layer,
                                                 unsigned long long policy) const {
        using C = Cached<DIM>;
        const int lane = threadIdx.x % 32;
        const unsigned short* cache = lane % 2 ? layer->values : layer->keys;
#pragma unroll 1
        for (int j = 0; j < C::kTasks; ++j) {
            const Task own = task(j);
            if (!own.is_there) break;
            const int* table = args.tables + static_cast<long long>(own.token) * args.table_stride;
#pragma unroll 1
            for (int span = own.start / C::kSpan; span <= own.position / C::kSpan; ++span) {
                const int which = C::kPages * span + (C::kPages == 2 ? lane / 2 % 2 : 0);
                const long long page = __ldg(table + min(which, own.position / kPage));
                const unsigned short* from = cache + (page * args.Hkv + own.kv) * (kPage * DIM);
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const int first = span * C::kSpan + (C::kPages == 2 ? u * kPage : 0);
                    const unsigned num_bytes =
                        max(0, min(kPage, own.position - first)) * C::kBytes;
                    const bool is_mine = (C::kPages == 2 ? lane / 2 : lane) == u;
                    bring(ring, from, C::kPages == 2 ? lane % 2 * (kPage * C::kBytes) : 0,
                          is_mine ? num_bytes : 0, num_bytes * C::kPages, kMostFlying, policy);
                }
            }
        }
    }

    // ---- the warps that compute

    // The new token's head of q, of k and of v of a job, by a quarter of the warps together.
    template <int DIM>
    __device__ __forceinline__ void make_new(const Layer& layer, unsigned tick) const {
        using C = Cached<DIM>;
        constexpr int kWarpsEach = 4 / Shape<DIM>::GROUPS;
        const int j = warp() / kWarpsEach;
        if (j >= C::kTasks || !task(j).is_there) return;
        const Task& own = task(j);
        const Lane<DIM> lane(thread() % 32);
        // 0: q, 1: k, 2: v
        const int number = warp() % kWarpsEach * Shape<DIM>::GROUPS + lane.group;
        const bool turns = number < 2;
        const unsigned short* weight = number == 0 ? layer.q_norm : layer.k_norm;  // both or none
        uint4 eight = four_times(0), norm = eight, cos = eight, sin = eight;
        load_streamed_if(turns && weight != nullptr, weight + lane.eight * 8, norm);
        const long long turn = static_cast<long long>(own.position) * DIM + lane.eight * 8;
        load_streamed_if(turns, args.cos + turn, cos);
        load_streamed_if(turns, args.sin + turn, sin);
        const long long page =
            __ldg(args.tables + static_cast<long long>(own.token) * args.table_stride +
                  own.position / kPage);
        const int head = number == 0 ? own.head : args.H + (number - 1) * args.Hkv + own.kv;
        if (number < 3)
            eight = await_words(words(tick) + qkv_words() +
                                (own.token * num_columns() + head * DIM) / 2 + lane.eight * 4);
        __syncwarp();
        uint4 made = eight;
        if (weight != nullptr) made = normalised_head<DIM>(eight, norm, args.eps);
        made = turned_eight<DIM>(made, cos, sin, lane);
        if (number > 2) return;
        uint4* to = at<uint4>(kNew + (j * 3 + number) * C::kBytes) + lane.eight;
        if (number == 0) {
            *to = make_uint4(made.x, made.z, made.y, made.w);
            return;
        }
        if (number == 2) made = eight;
        *to = made;
        const long long place = (page * args.Hkv + own.kv) * kPage + own.position % kPage;
        unsigned short* cache = number == 1 ? layer.keys : layer.values;
        if (own.head % (args.H / args.Hkv) == 0)
            *reinterpret_cast<uint4*>(cache + place * DIM + lane.eight * 8) = made;
    }

    // Of a span the lane's positions: the first, and how much further on the others are.
    template <int DIM>
    __device__ __forceinline__ int first_position(int span) const {
        using C = Cached<DIM>;
        return span * C::kSpan + 8 * warp() + lane() / Shape<DIM>::LANES;
    }
    template <int DIM>
    __device__ __forceinline__ static int further(int i) {
        using C = Cached<DIM>;
        return C::kPages == 2 ? i % 2 * 4 + i / 2 * kPage : 2 * i;
    }

    // The next span, out of the ring; 0 where nothing is cached.
    template <int DIM>
    __device__ __forceinline__ void take_cached(uint4 (&keys)[kHere], uint4 (&values)[kHere],
                                                const Task& own, int span) {
        using C = Cached<DIM>;
        const int first = first_position<DIM>(span);
        const unsigned from = memory + kRing + 2 * place * kUnitBytes +
                              (first - span * C::kSpan) * C::kBytes +
                              lane() % Shape<DIM>::LANES * 16;
        await_place();
#pragma unroll
        for (int i = 0; i < kHere; ++i) {
            const int position = first + further<DIM>(i);
            const bool is_cached = position >= own.start && position < own.position;
            const unsigned at = from + (C::kPages == 2 ? i / 2 * kUnitBytes + i % 2 * 4 * C::kBytes
                                                    : 2 * i * C::kBytes);
            keys[i] = values[i] = four_times(0);
            load_shared_if(is_cached, at, keys[i]);
            load_shared_if(is_cached, at + (C::kPages == 2 ? kPage * C::kBytes : kUnitBytes),
                           values[i]);
        }
        leave_place();
    }

    // The block's jobs, if it has any; `meanwhile` stores what nobody waits for.
    template <int DIM, class Meanwhile>
    __device__ __forceinline__ void attend_heads(const Layer& layer, unsigned tick,
                                                 const Meanwhile& meanwhile) {
        using C = Cached<DIM>;
        if (!task(0).is_there) return meanwhile();
        uint4 keys[kHere], values[kHere];
        int span = task(0).start / C::kSpan;
        take_cached<DIM>(keys, values, task(0), span);
        make_new<DIM>(layer, tick);
        sync_consumers();
        meanwhile();
        const Lane<DIM> lane(thread() % 32);
        const float scale = args.scale * kLog2E;
        int j = 0;
        bool more = true;
#pragma unroll 1
        for (; more; ++j) {
            const int start = task(j).start, position = task(j).position;
            const int in = kNew + j * (3 * C::kBytes);
            const uint2 q = columns_of_q<DIM>(memory + in, thread() % 32);
            HeadSums head = {-1e30f, 0.f, {}};  // a warp may have no position that counts
#pragma unroll 1
            while (true) {
                const int first = first_position<DIM>(span);
                if (span == position / C::kSpan)
#pragma unroll
                    for (int i = 0; i < kHere; ++i)
                        if (first + further<DIM>(i) == position) {
                            keys[i] = at<uint4>(in + C::kBytes)[lane.eight];
                            values[i] = at<uint4>(in + 2 * C::kBytes)[lane.eight];
                        }
                float scores[kHere];
                score_keys<DIM>(scores, keys, q, thread() % 32);
#pragma unroll
                for (int i = 0; i < kHere; ++i) {
                    const int its = first + further<DIM>(i);
                    scores[i] = its >= start && its <= position ? scores[i] * scale
                                                                : __int_as_float(0xff800000);
                }
                add_positions<DIM>(head, scores, values);
                if (++span > position / C::kSpan) break;
                take_cached<DIM>(keys, values, task(j), span);
            }
            more = j + 1 < C::kTasks && task(j + 1).is_there;
            if (more) {
                span = task(j + 1).start / C::kSpan;
                take_cached<DIM>(keys, values, task(j + 1), span);
            }
            const int own = j * kWarps + warp();
            store_head<DIM>(head, lane, thread(), sums_of_head<DIM>(own), total_of_head<DIM>(own).x,
                            total_of_head<DIM>(own).y);
        }
        sync_consumers();
        const int columns = DIM / 2;  // two at a time
        if (thread() < j * columns) give_head<DIM>(thread() / columns, thread() % columns, tick);
    }

    template <int DIM>
    __device__ __forceinline__ float* sums_of_head(int part) const {
        return at<float>(kHeads) + part * DIM;
    }
    template <int DIM>
    __device__ __forceinline__ float2& total_of_head(int part) const {
        using C = Cached<DIM>;
        return at<float2>(kHeads + C::kTasks * kWarps * DIM * 4)[part];
    }

    // Two columns of a job, of all warps' parts: to all blocks.
    template <int DIM>
    __device__ __forceinline__ void give_head(int j, int columns, unsigned tick) const {
        const Pair pair = put_together(
            kWarps, [&](int w) { return total_of_head<DIM>(j * kWarps + w); },
            [&](int w) {
                return reinterpret_cast<const float2*>(sums_of_head<DIM>(j * kWarps + w))[columns];
            });
        const Task& own = task(j);
        give(tick, row_words(1) + place_in_row(own.token, own.head * DIM + 2 * columns),
             output(pair));
    }
};

}  // namespace
