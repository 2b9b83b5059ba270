// attend: attention of one new token a row over a cache in pages: rotary of q and k, the new k and
// v into the cache, softmax(q K^T scale) V.
//
//   qkv        [B, (H + 2 Hkv) DIM] bf16: the heads of q, then of k, then of v
//   positions  int32 [B]: where the new token stands; cos, sin [positions, DIM] bf16
//   tables     int32 [B, width], rows `table_stride` apart: position p lies in page tables[b, p / 64]
//   keys, values  [pages, Hkv, 64, DIM] bf16; rotated keys
//   out        [B, H DIM] bf16
//
// Rounded as transformers' apply_rotary_pos_emb in bf16 (and its RMSNorm over a head before, with
// q_norm and k_norm), from there on fp32. Nothing cached at positions >= positions[b] is used.
// With a window only the last `window` positions count, the new one included.
//
// A block has a row, a head of k and v with HEADS of the heads of q that share it, and one of the
// row's splits. Its memory goes by like this: DIM / 8 lanes hold a position, 16 bytes each, a warp
// takes a batch of 8 times as many positions as it has lanes for, and all of a batch's keys and
// values are under way at once, those of the first batch before the previous kernel has ended.
// A lane's parts of 8 dot products are added up so that each lane ends with one of the 8: it takes
// that exponential, and hands it round for the sum over values, of which a lane has 8 columns.
// Warps, and after them splits, keep (largest score, sum, sums of values), put together at the end.
//
// Batches lie at multiples of their size. Warp i of all the warps of a row's splits takes batches i,
// i + warps, .. from the first that counts. A row uses only as many splits as give each warp
// `least_batches`; other blocks leave at once. With one split there is no second step, with several
// the last block to arrive (tickets) adds up all parts, in their order: results do not depend on
// time, nor on other rows.
//
// The new token's k and v are rotated and stored by the block whose batch it falls into, and used
// there out of shared memory: so no block waits for another. If H / Hkv > HEADS, several blocks
// rotate k, and the first of them stores it.
//
// Launch: attend_DIM_HEADS, 4 to 8 warps, grid (Hkv ceil(H / Hkv / HEADS), B, splits), dynamic
// shared memory (HEADS DIM + DIM + warps HEADS (DIM + 2)) 4 bytes. If splits > 1:
//   parts    float32 [B, grid.x, splits, HEADS, DIM + 2]
//   tickets  uint32 [B, grid.x], zero before the first launch; every launch leaves zeros
#include "dependent.cuh"
#include "eights.cuh"

namespace {

constexpr int kPage = 64;
constexpr int kLoads = 8;  // of keys, and of values, that a lane has under way
constexpr float kLog2E = 1.44269504f;

struct Job {
    const unsigned short* qkv;
    const int *positions, *tables;
    int table_stride, width;
    const unsigned short *cos, *sin, *q_norm, *k_norm;
    float eps;
    unsigned short *keys, *values;
    int num_kv_heads, sharing, window, least_batches;  // sharing: heads of q to one of k and v
    float scale;
    float* parts;
    unsigned* tickets;
    unsigned* out;
};

template <int DIM>
struct Shape {
    static constexpr int EIGHTS = DIM / 8;                             // of a head
    static constexpr int LANES = EIGHTS > 8 ? 16 : EIGHTS > 4 ? 8 : 4;  // of a position
    static constexpr int GROUPS = 32 / LANES;                          // positions side by side
    static constexpr int BATCH = GROUPS * kLoads;                      // positions
    static_assert(DIM % 16 == 0 && EIGHTS <= LANES && LANES >= kLoads, "no such head");
    static_assert(kPage % BATCH == 0, "a batch lies in one page");
};

// Which lane this is: eight `eight` of the head of position `group` of those side by side.
template <int DIM>
struct Lane {
    int eight, group;
    bool used;  // if DIM is no power of two, some lanes have no eight

    __device__ __forceinline__ explicit Lane(int lane)
        : eight(lane % Shape<DIM>::LANES),
          group(lane / Shape<DIM>::LANES),
          used(eight < Shape<DIM>::EIGHTS) {}
};

// What of the heads this block has.
struct Heads {
    int kv, first, num;  // of q: first .. first + num
    bool is_first;       // of the blocks that share the head of k and v
};

__device__ __forceinline__ Heads heads_of_block(const Job& job, int heads) {
    int kv = blockIdx.x, before = 0;  // heads of q that other blocks have
    for (; kv >= job.num_kv_heads; kv -= job.num_kv_heads) before += heads;
    return {kv, kv * job.sharing + before, min(heads, job.sharing - before), before == 0};
}

// ---- batches of positions

// What of a row counts: positions start .. position, in batches first .. last.
struct Range {
    int start, position, first, last;
};

template <int DIM>
__device__ __forceinline__ Range range_of_row(const Job& job, int position) {
    constexpr int BATCH = Shape<DIM>::BATCH;
    const int start = job.window > 0 ? max(0, position - job.window + 1) : 0;
    return {start, position, start / BATCH, position / BATCH};
}

// How the row's batches are shared out.
struct Split {
    int num;       // of splits that the row uses
    int step;      // warps of all of them
    bool has_new;  // the new token's batch is this block's
};

__device__ __forceinline__ Split split_of_block(const Range& range, int of_split) {
    const int num_warps = blockDim.x / 32;
    if (gridDim.z == 1) return {1, num_warps, true};
    const int wanted = (range.last - range.first + of_split) / of_split;
    const int num = min(wanted, static_cast<int>(gridDim.z)), step = num * num_warps;
    const int owner = (range.last - range.first) % step - blockIdx.z * num_warps;
    return {num, step, owner >= 0 && owner < num_warps};
}

// Where a position's head begins, in elements.
template <int DIM>
__device__ __forceinline__ long long place_in_cache(const Job& job, int page, int kv_head,
                                                    int position) {
    const long long head = static_cast<long long>(page) * job.num_kv_heads + kv_head;
    return (head * kPage + position % kPage) * DIM;
}

// Batch `at` of what begins at `from`. Positions that do not count leave what was there before: it
// is weighted by 0, and finite, since it was cached for positions that count.
template <int DIM>
__device__ __forceinline__ void load_batch(uint4 (&to)[kLoads], const unsigned short* from,
                                           const Range& range, int at, const Lane<DIM>& lane) {
    using S = Shape<DIM>;
    from = opaque(from + lane.group * DIM + lane.eight * 8);
    const int first = at * S::BATCH + lane.group - range.start;
    const unsigned cached = lane.used ? range.position - range.start : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        load_streamed_if(static_cast<unsigned>(first + i * S::GROUPS) < cached,
                         from + i * S::GROUPS * DIM, to[i]);
}

// The new token's eight, if it is one of the lane's.
template <int DIM>
__device__ __forceinline__ void put_new(uint4 (&to)[kLoads], const uint4* eights, const Range& range,
                                        const Lane<DIM>& lane) {
    using S = Shape<DIM>;
    const int first = range.last * S::BATCH + lane.group;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (lane.used && first + i * S::GROUPS == range.position) to[i] = eights[lane.eight];
}

// ---- the new token

// Shared memory of a block.
template <int DIM, int HEADS>
struct Shared {
    float* q;               // [HEADS][DIM], times scale log2(e)
    uint4 *key, *value;     // [DIM / 8]
    float* sums;            // [warps][HEADS][DIM]
    float *largest, *total;  // [warps][HEADS]

    __device__ __forceinline__ explicit Shared(float* memory, int num_warps) {
        q = memory;
        key = reinterpret_cast<uint4*>(q + HEADS * DIM);
        value = key + DIM / 8;
        sums = reinterpret_cast<float*>(value + DIM / 8);
        largest = sums + num_warps * HEADS * DIM;
        total = largest + num_warps * HEADS;
    }
};

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

// RMSNorm over the head, if the model has one. The lanes of a head do this together.
template <int DIM>
__device__ __forceinline__ void normalise_head(float (&values)[8], const uint4& weight, float eps) {
    float sum = sum_of_squares(values);
#pragma unroll
    for (int distance = Shape<DIM>::LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    normalise(values, reciprocal_root(sum * (1.f / DIM) + eps), weight);
}

// x cos + rotate_half(x) sin.
template <int DIM>
__device__ __forceinline__ void rotate(float (&values)[8], const uint4& cos, const uint4& sin,
                                       const Lane<DIM>& lane) {
    constexpr int HALF = Shape<DIM>::EIGHTS / 2;
    const bool is_low = lane.eight < HALF;
    const int other = is_low ? lane.eight + HALF : lane.eight - HALF;
    float cosines[8], sines[8];
    unpack(cos, cosines);
    unpack(sin, sines);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float of_other = __shfl_sync(~0u, values[i], other, Shape<DIM>::LANES);
        const float turned = rounded((is_low ? -of_other : of_other) * sines[i]);
        values[i] = rounded(rounded(values[i] * cosines[i]) + turned);
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void finish_new_head(const Job& job, const Heads& heads,
                                                const NewHead& head, const Lane<DIM>& lane,
                                                int number, const Shared<DIM, HEADS>& shared) {
    const int num_heads = job.num_kv_heads * (job.sharing + 2);
    const long long row = static_cast<long long>(blockIdx.y) * num_heads;
    const unsigned short* from = job.qkv + (row + head.head) * DIM + lane.eight * 8;
    const bool has_part = head.task != kNothing && lane.used;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (has_part) eight = load_written(from);
    float values[8];
    unpack(eight, values);
    if (job.q_norm != nullptr) normalise_head<DIM>(values, head.norm, job.eps);
    rotate<DIM>(values, head.cos, head.sin, lane);
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
    if (heads.is_first) *reinterpret_cast<uint4*>(cache + head.place) = eight;
}

// ---- softmax over the batches of a warp

// The largest of 32 values; NaN if one is. Its bits, turned so that integers are in that order.
__device__ __forceinline__ float largest_of_warp(float value) {
    const int bits = __float_as_int(value);
    const int order = __reduce_max_sync(~0u, bits ^ ((bits >> 31) & 0x7fffffff));
    return __int_as_float(order ^ ((order >> 31) & 0x7fffffff));
}

// Sums over the lanes of a position of 8 values a lane: value lane % 8 to each lane.
template <int LANES>
__device__ __forceinline__ float share_sums(float (&values)[kLoads], int lane) {
#pragma unroll
    for (int num = kLoads / 2; num > 0; num /= 2) {
        const bool is_high = lane & num;
#pragma unroll
        for (int i = 0; i < num; ++i) {
            const float kept = is_high ? values[i + num] : values[i];
            const float given = is_high ? values[i] : values[i + num];
            values[i] = kept + __shfl_xor_sync(~0u, given, num);
        }
    }
#pragma unroll
    for (int distance = kLoads; distance < LANES; distance *= 2)
        values[0] += __shfl_xor_sync(~0u, values[0], distance);
    return values[0];
}

// What a warp has seen so far, of each head.
template <int HEADS>
struct Softmax {
    float largest[HEADS];  // score
    float total[HEADS];    // of the lane's exponentials, relative to it
    float sums[HEADS][8];  // of the lane's columns of values times exponentials
};

// Scores of a batch, by lanes: of head h the one of position (lane % 8, group).
template <int DIM, int HEADS>
__device__ __forceinline__ void score_batch(float (&scores)[HEADS], const uint4 (&keys)[kLoads],
                                            const float (&q)[HEADS][8], int lane) {
    float products[HEADS][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        float key[8];
        unpack(keys[i], key);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            products[h][i] = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) products[h][i] += q[h][j] * key[j];
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
        scores[h] = share_sums<Shape<DIM>::LANES>(products[h], lane);
}

// Scores to exponentials, relative to the largest score so far.
template <int HEADS>
__device__ __forceinline__ void take_exponentials(Softmax<HEADS>& softmax, float (&scores)[HEADS],
                                                  bool counts) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const float score = counts ? scores[h] : __int_as_float(0xff800000);
        const float batch = largest_of_warp(score);
        const float largest = batch <= softmax.largest[h] ? softmax.largest[h] : batch;
        const float shrink = power_of_two(softmax.largest[h] - largest);
        scores[h] = power_of_two(score - largest);
        softmax.largest[h] = largest;
        softmax.total[h] = softmax.total[h] * shrink + scores[h];
#pragma unroll
        for (int j = 0; j < 8; ++j) softmax.sums[h][j] *= shrink;
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void add_values(Softmax<HEADS>& softmax, const float (&weights)[HEADS],
                                           const uint4 (&values)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        float value[8];
        unpack(values[i], value);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float weight = __shfl_sync(~0u, weights[h], i, Shape<DIM>::LANES);
#pragma unroll
            for (int j = 0; j < 8; ++j) softmax.sums[h][j] += weight * value[j];
        }
    }
}

// ---- putting parts together

// A lane's 8 columns, added up over the groups of a warp, into shared memory.
template <int DIM, int HEADS>
__device__ __forceinline__ void store_warp(Softmax<HEADS>& softmax,
                                           const Shared<DIM, HEADS>& shared,
                                           const Lane<DIM>& lane, int warp) {
    using S = Shape<DIM>;
    constexpr int KEPT = 8 / S::GROUPS;  // columns
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        float total = softmax.total[h];  // the same in lanes that differ in what is no bit of 8
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            if (distance < kLoads || distance >= S::LANES)
                total += __shfl_xor_sync(~0u, total, distance);
        float(&sums)[8] = softmax.sums[h];
        int column = 0;
#pragma unroll
        for (int num = 4, distance = 16; num >= KEPT; num /= 2, distance /= 2) {
            const bool is_high = threadIdx.x & distance;
            column += is_high ? num : 0;
#pragma unroll
            for (int j = 0; j < num; ++j) {
                const float kept = is_high ? sums[j + num] : sums[j];
                const float given = is_high ? sums[j] : sums[j + num];
                sums[j] = kept + __shfl_xor_sync(~0u, given, distance);
            }
        }
        const int at = warp * HEADS + h;
        if (lane.used) {
            float* to = shared.sums + at * DIM + lane.eight * 8 + column;
#pragma unroll
            for (int j = 0; j < KEPT; ++j) to[j] = sums[j];
        }
        if (threadIdx.x % 32 == 0) {
            shared.largest[at] = softmax.largest[h];
            shared.total[at] = total;
        }
    }
}

// Two columns of a head, of one part or of several put together.
struct Pair {
    float largest, total, low, high;
};

// Parts 0 .. num, in that order; part(i) gives {largest, total}, columns(i) the two columns' sums.
// Eight parts are read at once.
template <class Part, class Columns>
__device__ __forceinline__ Pair put_together(int num, Part part, Columns columns) {
    constexpr int EIGHT = 8;
    const float least = __int_as_float(0xff800000);
    Pair sum = {least, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = 0; first < num; first += EIGHT) {
        float2 parts[EIGHT], pairs[EIGHT];
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
            const bool is_there = first + i < num;
            parts[i] = is_there ? part(first + i) : make_float2(least, 0.f);
            pairs[i] = is_there ? columns(first + i) : make_float2(0.f, 0.f);
        }
        float largest = sum.largest;
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) largest = fmaxf(largest, parts[i].x);
        const float shrink = power_of_two(sum.largest - largest);
        sum = {largest, sum.total * shrink, sum.low * shrink, sum.high * shrink};
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
            const float weight = power_of_two(parts[i].x - largest);
            sum.total += parts[i].y * weight;
            sum.low += pairs[i].x * weight;
            sum.high += pairs[i].y * weight;
        }
    }
    return sum;
}

__device__ __forceinline__ unsigned output(const Pair& pair) {
    const float share = reciprocal(pair.total);
    return bf16_pair(pair.low * share, pair.high * share);
}

// Takes a ticket of `count`: the last one comes after all the others' writes, and finds the tickets
// as they were before the first.
__device__ __forceinline__ unsigned take_ticket(unsigned* tickets, unsigned count) {
    unsigned ticket;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(tickets), "r"(count - 1)
                 : "memory");
    return ticket;
}

template <int DIM, int HEADS>
__device__ __forceinline__ void finish_row(const Job& job, const Heads& heads, int num_splits,
                                           const Shared<DIM, HEADS>& shared) {
    constexpr int PAIRS = DIM / 2, PART = DIM + 2;
    const int num_warps = blockDim.x / 32;
    const long long row = blockIdx.y;
    const long long block = row * gridDim.x + blockIdx.x;
    unsigned* out = job.out + (row * job.num_kv_heads * job.sharing + heads.first) * PAIRS;
    float* parts = job.parts + block * gridDim.z * HEADS * PART;

    // this block's
    for (int t = threadIdx.x; t < heads.num * PAIRS; t += blockDim.x) {
        const int h = t / PAIRS, at = t % PAIRS;
        const Pair pair = put_together(
            num_warps,
            [&](int w) {
                return make_float2(shared.largest[w * HEADS + h], shared.total[w * HEADS + h]);
            },
            [&](int w) {
                return reinterpret_cast<const float2*>(shared.sums)[(w * HEADS + h) * PAIRS + at];
            });
        if (num_splits == 1) {
            out[t] = output(pair);
            continue;
        }
        float2* part = reinterpret_cast<float2*>(parts + (blockIdx.z * HEADS + h) * PART);
        part[1 + at] = make_float2(pair.low, pair.high);
        if (at == 0) part[0] = make_float2(pair.largest, pair.total);
    }
    if (num_splits == 1) return;

    // all splits', in the last block
    unsigned* said = reinterpret_cast<unsigned*>(shared.q);
    __syncthreads();
    if (threadIdx.x == 0) *said = take_ticket(job.tickets + block, num_splits);
    __syncthreads();
    if (*said != num_splits - 1) return;
    for (int t = threadIdx.x; t < heads.num * PAIRS; t += blockDim.x) {
        const int h = t / PAIRS, at = t % PAIRS;
        const float2* first = reinterpret_cast<const float2*>(parts + h * PART);
        out[t] = output(put_together(
            num_splits, [&](int s) { return __ldcg(first + s * HEADS * PART / 2); },
            [&](int s) { return __ldcg(first + s * HEADS * PART / 2 + 1 + at); }));
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void attend(const Job& job, float* memory) {
    using S = Shape<DIM>;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const Lane<DIM> lane(threadIdx.x % 32);
    const Heads heads = heads_of_block(job, HEADS);
    const Shared<DIM, HEADS> shared(memory, num_warps);

    // where to read: the page is a guess, looked up beside the position
    const int* table = job.tables + static_cast<long long>(blockIdx.y) * job.table_stride;
    const int guess = (blockIdx.z * num_warps + warp) * S::BATCH / kPage;
    int page = load_here(table + min(guess, job.width - 1));
    const Range range = range_of_row<DIM>(job, load_here(job.positions + blockIdx.y));
    const int of_split = num_warps * job.least_batches;
    if (static_cast<int>(blockIdx.z) * of_split > range.last - range.first) return;
    int at = range.first + blockIdx.z * num_warps + warp;
    const auto page_of = [&](int batch) { return min(batch, range.last) * S::BATCH / kPage; };
    if (page_of(at) != guess) page = __ldg(table + page_of(at));

    // the first batch, and what the new token is turned by
    uint4 keys[kLoads], values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) keys[i] = values[i] = make_uint4(0, 0, 0, 0);
    const auto load = [&](uint4 (&to)[kLoads], const unsigned short* cache, int batch) {
        cache += place_in_cache<DIM>(job, page, heads.kv, batch * S::BATCH);
        load_batch<DIM>(to, cache, range, batch, lane);
    };
    load(keys, job.keys, at);
    load(values, job.values, at);
    const Split split = split_of_block(range, of_split);
    const int number = warp * S::GROUPS + lane.group;
    const bool has_new_head = warp * S::GROUPS < HEADS + 2;
    NewHead head;
    if (has_new_head)
        head = begin_new_head<DIM, HEADS>(job, heads, range, lane, number, split.has_new);
    int next_page = __ldg(table + page_of(at + split.step));
    wait_for_previous();
    let_next_start();
    if (has_new_head) finish_new_head<DIM, HEADS>(job, heads, head, lane, number, shared);
    __syncthreads();

    // batch by batch
    float q[HEADS][8];
    Softmax<HEADS> softmax;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        softmax.largest[h] = __int_as_float(0xff800000), softmax.total[h] = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            q[h][j] = lane.used ? shared.q[h * DIM + lane.eight * 8 + j] : 0.f;
            softmax.sums[h][j] = 0.f;
        }
    }
#pragma unroll 1
    for (; at <= range.last; at += split.step) {
        if (at == range.last) {
            put_new<DIM>(keys, shared.key, range, lane);
            put_new<DIM>(values, shared.value, range, lane);
        }
        page = next_page;
        next_page = __ldg(table + page_of(at + 2 * split.step));
        float scores[HEADS];
        score_batch<DIM, HEADS>(scores, keys, q, threadIdx.x % 32);
        load(keys, job.keys, at + split.step);
        const int scored = at * S::BATCH + threadIdx.x % kLoads * S::GROUPS + lane.group;
        take_exponentials(softmax, scores, scored >= range.start && scored <= range.position);
        add_values<DIM, HEADS>(softmax, scores, values);
        load(values, job.values, at + split.step);
    }

    store_warp<DIM, HEADS>(softmax, shared, lane, warp);
    __syncthreads();
    finish_row<DIM, HEADS>(job, heads, split.num, shared);
}

}  // namespace

#define ATTEND(DIM, HEADS, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) attend_##DIM##_##HEADS(             \
        const unsigned short* qkv, const int* positions, const int* tables, int table_stride,     \
        int width, const unsigned short* cos, const unsigned short* sin,                          \
        const unsigned short* q_norm, const unsigned short* k_norm, float eps,                    \
        unsigned short* keys, unsigned short* values, int num_kv_heads, int sharing,              \
        int window, int least_batches, float scale, float* parts, unsigned* tickets,              \
        unsigned* out) {                                                                          \
        extern __shared__ float memory[];                                                         \
        attend<DIM, HEADS>({qkv, positions, tables, table_stride, width, cos, sin, q_norm,        \
                            k_norm, eps, keys, values, num_kv_heads, sharing, window,             \
                            least_batches, scale, parts, tickets, out},                           \
                           memory);                                                               \
    }

ATTEND(64, 1, 2)
ATTEND(64, 2, 1)
ATTEND(64, 4, 1)
ATTEND(96, 1, 2)
ATTEND(96, 2, 1)
ATTEND(96, 4, 1)
ATTEND(128, 1, 2)
ATTEND(128, 2, 1)
ATTEND(128, 4, 1)
