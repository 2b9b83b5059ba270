// Attention in `step` (step.cuh), as attend.cuh has it: a block has a head of q, or a part of its
// positions, its warps have batches of those. Parts of a head, where its row is long, go to the
// head's first block as words.
//
// The scores are made on tensor cores, as sums of weights are (step_products.cuh): a lane's 16
// bytes of a position's key are its a of an mma. The new token's q, k and v are waited for here,
// and are turned, k and v cached.
#pragma once

#include "decode/step_products.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/shared.cuh"

namespace {

constexpr int kPartBatches = 4;     // of a part of a head, while there are blocks for more parts
constexpr int kFetchedBatches = 4;  // a warp's, that are in L2 before they are read

struct Attention : Products {
    using Products::Products;

    template <int DIM>
    __device__ __forceinline__ long long place(int page, int kv, int position) const {
        const long long head = static_cast<long long>(page) * args.Hkv + kv;
        return (head * kPage + position % kPage) * DIM;
    }

    template <int DIM>
    __device__ __forceinline__ int page_of(int last, int batch) const {
        return __ldg(args.tables + min(batch, last) * Shape<DIM>::BATCH / kPage);
    }

    __device__ __forceinline__ Attend& own_attend() const {
        return at<Attend>(kAttends)[thread() / 32];
    }

    // Whether the block attends to any position, in any layer: they have the same window.
    template <int DIM>
    __device__ __forceinline__ bool plan_attend(int position, int window) const {
        constexpr int BATCH = Shape<DIM>::BATCH;
        const int most = min(kMostParts, static_cast<int>(gridDim.x) / args.H);
        const int head = block() / most;
        if (head >= args.H) return false;
        const int start = window > 0 ? max(0, position - window + 1) : 0;
        const int sharing = args.H / args.Hkv;
        Attend a;
        a.head = head, a.kv = head / sharing, a.part = block() % most;
        a.range = {start, position, start / BATCH, position / BATCH};
        const int batches = a.range.last - a.range.first;
        a.num_parts = min(most, batches / kPartBatches + 1);
        if (a.part >= a.num_parts) return false;
        a.step = a.num_parts * kWarps;
        a.first = a.range.first + thread() / 32 * a.num_parts + a.part;
        a.has_new = batches % a.num_parts == a.part;
        a.stores_new = head % sharing == 0;
        a.first_place = place<DIM>(page_of<DIM>(a.range.last, a.first), a.kv, a.first * BATCH);
        a.new_place = place<DIM>(page_of<DIM>(a.range.last, a.range.last), a.kv, position);
        if (thread() % 32 == 0) own_attend() = a;
        __syncwarp();
        return true;
    }

    // Keys and values of the warp's first batches, into L2.
    template <int DIM>
    __device__ __forceinline__ void fetch_cached(const Layer& layer) const {
        const Attend& a = own_attend();
        const int lane = thread() % 32, last = a.range.last;
        if (lane * 64 >= Shape<DIM>::BATCH * DIM) return;
#pragma unroll 1
        for (int i = 0, batch = a.first; i < kFetchedBatches && batch <= last;
             ++i, batch += a.step) {
            const long long from =
                i == 0 ? a.first_place
                       : place<DIM>(page_of<DIM>(last, batch), a.kv, batch * Shape<DIM>::BATCH);
            prefetch_into_l2(layer.keys + from + lane * 64);
            prefetch_into_l2(layer.values + from + lane * 64);
        }
    }

    // The new token's head of q, and of k and v if they are this block's: into shared memory, q in
    // the order of the columns of b; k and v into the cache.
    template <int DIM>
    __device__ __forceinline__ void make_new(const Layer& layer, const Attend& a,
                                             const Lane<DIM>& lane, const Shared<DIM, 1>& shared,
                                             unsigned tag) const {
        using S = Shape<DIM>;
        const int number = thread() / 32 * S::GROUPS + lane.group;  // 0: q, 1: k, 2: v
        if (thread() / 32 * S::GROUPS >= 3) return;
        const bool wanted = lane.used && number < (a.has_new ? 3 : 1);
        const unsigned short* weight = number == 0 ? layer.q_norm : layer.k_norm;  // both or none
        uint4 eight = make_uint4(0, 0, 0, 0), norm = eight;
        load_streamed_if(wanted && weight != nullptr && number < 2, weight + lane.eight * 8, norm);
        const unsigned from = memory + kTurn + (lane.used ? lane.eight : 0) * 16;
        const uint4 cos = load_shared(from), sin = load_shared(from + 2 * kMostDim);
        const int head = number == 0 ? a.head : args.H + (number - 1) * args.Hkv + a.kv;
        if (wanted) eight = await_eight(qkv_words(), head * DIM + lane.eight * 8, tag);
        __syncwarp();
        uint4 made = eight;
        if (weight != nullptr) made = normalised_head<DIM>(eight, norm, args.eps);
        made = turned_eight<DIM>(made, cos, sin, lane);
        if (!wanted) return;
        if (number == 0) {
            reinterpret_cast<uint4*>(shared.q)[lane.eight] =
                make_uint4(made.x, made.z, made.y, made.w);
            return;
        }
        if (number == 2) made = eight;
        (number == 1 ? shared.key : shared.value)[lane.eight] = made;
        unsigned short* cache = number == 1 ? layer.keys : layer.values;
        if (a.stores_new) *reinterpret_cast<uint4*>(cache + a.new_place + lane.eight * 8) = made;
    }

    // The block's part of a head, or the head.
    template <int DIM>
    __device__ __forceinline__ void attend_head(const Layer& layer, unsigned tag) {
        using S = Shape<DIM>;
        const Attend& a = own_attend();
        const Lane<DIM> lane(thread() % 32);
        const Shared<DIM, 1> shared(at<float>(kAttend), Block::kAttendSums);
        const Range range = a.range;
        const int step = a.step;
        int batch = a.first;
        long long from = a.first_place;

        uint4 keys[kLoads], values[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) keys[i] = values[i] = make_uint4(0, 0, 0, 0);
        load_batch<DIM>(keys, layer.keys + from, range, batch, lane);
        load_batch<DIM>(values, layer.values + from, range, batch, lane);
        make_new<DIM>(layer, a, lane, shared, tag);
        sync_consumers();

        const unsigned q = memory + kAttend + place_of_q<DIM>(thread() % 32);
        const float scale = args.scale * kLog2E;
        HeadSums head = {__int_as_float(0xff800000), 0.f, {}};
#pragma unroll 1
        for (; batch <= range.last; batch += step) {
            if (batch == range.last) {
                put_new<DIM>(keys, shared.key, range, lane);
                put_new<DIM>(values, shared.value, range, lane);
            }
            const bool more = batch + step <= range.last;
            const int next_page = page_of<DIM>(range.last, batch + step);
            float scores[kLoads];
            score_keys<DIM>(scores, keys, q, thread() % 32);
            if (more) {
                from = place<DIM>(next_page, a.kv, (batch + step) * S::BATCH);
                load_batch<DIM>(keys, layer.keys + from, range, batch + step, lane);
            }
            const int first = batch * S::BATCH + lane.group - range.start;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const bool counts = static_cast<unsigned>(first + i * S::GROUPS) <=
                                    static_cast<unsigned>(range.position - range.start);
                scores[i] = counts ? scores[i] * scale : __int_as_float(0xff800000);
            }
            add_positions<DIM>(head, scores, values);
            if (more) load_batch<DIM>(values, layer.values + from, range, batch + step, lane);
        }
        const int warp = thread() / 32;
        store_head<DIM>(head, lane, thread(), shared.sums + warp * DIM, shared.largest[warp],
                        shared.total[warp]);
        if (a.part == 0) await_parts<DIM>(shared, a, tag);
        sync_consumers();
        if (thread() < DIM / 2) give_head<DIM>(shared, a, tag);
    }

    // What the other blocks of the head have, behind what the own warps have: a part a warp.
    template <int DIM>
    __device__ __forceinline__ void await_parts(const Shared<DIM, 1>& shared, const Attend& a,
                                                unsigned tag) const {
        constexpr int HALF = DIM / 2, NUM = HALF / 32, kAtOnce = NUM == 2 ? 2 : 1;
        const int lane = thread() % 32, part = 1 + thread() / 32, to = kWarps + thread() / 32;
        if (part >= a.num_parts) return;
        const uint4* from = head_parts() + (block() + part) * DIM;
        uint2* sums = reinterpret_cast<uint2*>(shared.sums) + to * HALF + lane;
#pragma unroll 1
        for (int first = 0; first < NUM; first += kAtOnce) {
            uint4 whole, columns[kAtOnce];
            unsigned tries = 0;
            bool are_there = false;
#pragma unroll 1
            while (!are_there) {
                whole = load_floats(from);
                are_there = whole.y == tag && whole.w == tag;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    columns[i] = load_floats(from + HALF + 32 * (first + i) + lane);
                    are_there = are_there && columns[i].y == tag && columns[i].w == tag;
                }
                lose_patience(tries);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                sums[32 * (first + i)] = make_uint2(columns[i].x, columns[i].z);
            if (lane == 0) {
                shared.largest[to] = __uint_as_float(whole.x);
                shared.total[to] = __uint_as_float(whole.z);
            }
        }
        __syncwarp();
    }

    // Two columns a thread, of all warps and all parts of the head: to all blocks.
    template <int DIM>
    __device__ __forceinline__ void give_head(const Shared<DIM, 1>& shared, const Attend& a,
                                              unsigned tag) const {
        constexpr int HALF = DIM / 2;
        const int t = thread();
        const Pair pair = put_together(
            a.part == 0 ? kWarps + a.num_parts - 1 : kWarps,
            [&](int w) { return make_float2(shared.largest[w], shared.total[w]); },
            [&](int w) { return reinterpret_cast<const float2*>(shared.sums)[w * HALF + t]; });
        if (a.part > 0) {
            uint4* parts = head_parts() + block() * DIM + t;
            store_floats(parts, pair.largest, pair.total, tag);
            store_floats(parts + HALF, pair.low, pair.high, tag);
            return;
        }
        const unsigned both = output(pair);
        store_relaxed_pair(row_words(1) + word_of(a.head * DIM + 2 * t), tagged(both & 0xffff, tag),
                           tagged(both >> 16, tag));
    }
};

}  // namespace
