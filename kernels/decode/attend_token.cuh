// A new token of `attend` and `store_keys`: its heads of q, k and v out of qkv, normalised and
// rotated as transformers does in bf16, into shared memory, and k and v into the cache. See
// attend.cuh.
#pragma once
#include "decode/attend_job.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

// What of the new token a group of lanes does: a head of q, the head of k or that of v.
enum Task { kQuery, kKey, kValue, kNothing };

// A task, and what it needs that the previous kernel does not write.
struct NewHead {
    Task task;
    int head;  // of qkv
    uint4 cos, sin, norm;
    long long place;  // in the cache, of the lane's eight
};

template <int DIM, int HEADS>
__device__ __forceinline__ NewHead begin_new_head(const Job& job, const Heads& heads,
                                                  const Range& range, const Lane<DIM>& lane,
                                                  int number, bool owns_new) {
    NewHead made;
    made.task = number < HEADS ? kQuery : kNothing;
    made.head = heads.first + min(number, heads.num - 1);
    if (number >= HEADS && number < HEADS + 2 && owns_new) {
        made.task = number == HEADS ? kKey : kValue;
        made.head = job.num_kv_heads * (job.sharing + (made.task == kValue)) + heads.kv;
    }
    const bool turns = lane.used && (made.task == kQuery || made.task == kKey);
    const long long at = static_cast<long long>(range.position) * DIM + lane.eight * 8;
    const unsigned short* norm = made.task == kQuery ? job.q_norm : job.k_norm;
    made.cos = made.sin = made.norm = make_uint4(0, 0, 0, 0);
    load_streamed_if(turns, job.cos + at, made.cos);
    load_streamed_if(turns, job.sin + at, made.sin);
    load_streamed_if(turns && norm != nullptr, norm + lane.eight * 8, made.norm);
    made.place = 0;
    if (made.task == kKey || made.task == kValue) {
        const int page = __ldg(job.tables + static_cast<long long>(blockIdx.y) * job.table_stride +
                               range.position / kPage);
        made.place = place_in_cache<DIM>(job, page, heads.kv, range.position) + lane.eight * 8;
    }
    return made;
}

// Columns first .. first + 8 of a head of qkv, 0 after its last one. Heads of no multiple of eight
// do not begin at 16 bytes.
__device__ __forceinline__ uint4 load_eight(const unsigned short* head, int first, int columns) {
    uint4 eight = make_uint4(0, 0, 0, 0);
    const auto word = [&](int at, unsigned& to) {
        load_written_word_if(columns % 8 != 0 && first + at < columns, head + first + at, to);
    };
    load_written_if(columns % 8 == 0 && first < columns, head + first, eight);
    word(0, eight.x), word(2, eight.y), word(4, eight.z), word(6, eight.w);
    return eight;
}

// RMSNorm over the head, if the model has one. The lanes of a head do this together.
template <int DIM>
__device__ __forceinline__ void normalise_head(float (&values)[8], const uint4& weight, float eps,
                                               int columns) {
    const float sum = sum_over_lanes<Shape<DIM>::LANES>(sum_of_squares(values));
    normalise(values, reciprocal_root(sum / columns + eps), weight);
}

// x cos + rotate_half(x) sin, of the first 2 `half` columns of a head; others have cos 1 and sin 0.
// The lanes of a head do this together, by shared memory of its own, `own`.
__device__ __forceinline__ void rotate(float (&values)[8], const uint4& cos, const uint4& sin,
                                       int half, bool is_there, int eight, float* own) {
    if (is_there)
#pragma unroll
        for (int i = 0; i < 8; ++i) own[8 * eight + i] = values[i];
    __syncwarp();
    if (!is_there) return;
    float cosines[8], sines[8];
    unpack(cos, cosines);
    unpack(sin, sines);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int column = 8 * eight + i;
        const bool is_low = column < half;
        const float other = own[is_low ? column + half : max(column - half, 0)];
        const float turned = rounded((is_low ? -other : other) * sines[i]);
        values[i] = rounded(rounded(values[i] * cosines[i]) + turned);
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void finish_new_head(const Job& job, const Heads& heads,
                                                const NewHead& head, const Lane<DIM>& lane,
                                                int number, const Shared<DIM, HEADS>& shared) {
    const int num_heads = job.num_kv_heads * (job.sharing + 2);
    const long long row = static_cast<long long>(blockIdx.y) * num_heads;
    const bool has_part = head.task != kNothing && lane.used;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (has_part)
        eight = load_eight(job.qkv + (row + head.head) * job.columns, lane.eight * 8, job.columns);
    float values[8];
    unpack(eight, values);
    if (job.q_norm != nullptr) normalise_head<DIM>(values, head.norm, job.eps, job.columns);
    // where the sums of values will be
    rotate(values, head.cos, head.sin, job.half, has_part, lane.eight, shared.sums + number * DIM);
    if (!has_part) return;
    if (head.task == kQuery) {
        float* to = shared.q + number * DIM + lane.eight * 8;
        const float scale = job.scale * kLog2E;
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = values[i] * scale;
        return;
    }
    if (head.task == kKey) eight = pack(values);
    (head.task == kKey ? shared.key : shared.value)[lane.eight] = eight;
    unsigned short* cache = head.task == kKey ? job.keys : job.values;
    if (heads.is_first && !job.new_is_cached) *reinterpret_cast<uint4*>(cache + head.place) = eight;
}

}  // namespace
