// attend: attention of new tokens over a cache in pages: rotary of q and k, the new k and v into
// the cache, softmax(q K^T scale) V. Each of B rows is one new token.
//
//   qkv           [B, (H + 2 Hkv) columns] bf16: the heads of q, then of k, then of v; an even
//                 number of columns up to DIM; all that is DIM wide has zeros in the others
//   positions     int32 [B]: where the new token stands. With `new_is_cached` a row below 0 is no
//                 token: it attends to itself, and nobody uses its result
//   cos, sin      [positions, DIM] bf16; the first 2 `half` columns are turned, the others have 1
//                 and 0
//   tables        int32 [B, width], rows `table_stride` apart; position p of row b lies in page
//                 tables[b, p / 64]
//   keys, values  [pages, Hkv, 64, DIM] bf16; keys as rotated
//   out           [B, H columns] bf16
//
// Rounded as transformers' apply_rotary_pos_emb in bf16 (and its RMSNorm over a head before, with
// q_norm and k_norm), from there on fp32. With a cap, scores are cap tanh(score / cap). Nothing
// cached at positions >= positions[b] is used. With a window only the last `window` positions
// count, the new one included.
//
// Several rows may be tokens of one sequence, with the same table. Then `store_keys` runs before
// and caches k and v of all of them; with `new_is_cached` the blocks wait for it before they read a
// batch that it may write (`is_old`), and store nothing. Each row is split and added up as if it
// were alone, so its result has the bits of a launch with one token of the sequence.
//
// A block has a row, a head of k and v with up to HEADS of the heads of q that share it, and one of
// the row's splits. 8 lanes (16 if DIM > 64, 32 if DIM > 128) hold a position, 16 bytes each. A
// warp takes a batch, 8 times the positions that it holds side by side, and has all its keys and
// values under way at once; those of the first batch, if it is old, before the previous kernel has
// ended. Of the 8 dot products that a lane has parts of, it ends with one whole: it takes that
// exponential and hands it round for the sums of values; a lane has 8 columns of those. Warps, and
// after them splits, keep (largest score, sum of exponentials, sums of values) and are put together
// at the end.
//
// Batches lie at multiples of their size. Warp i of all the warps of a row's splits takes batches
// i, i + warps, .. from the first that counts. A row that gives each warp of one block at most
// `whole_batches` stays whole; a longer one uses as many splits as give each warp `split_batches`.
// Other blocks leave at once. With one split there is no second step; with several the last block
// to arrive (tickets) adds up all parts in their order: results do not depend on time, nor on other
// rows.
//
// The new token's k and v are rotated and stored by the block whose batch it falls into, and used
// there out of shared memory: so no block waits for another. If H / Hkv > HEADS, several blocks
// rotate k, and the first of them stores it.
//
// Launch: attend_DIM_HEADS, 4 to 8 warps, which hold HEADS + 2 positions side by side, grid
// (Hkv ceil(H / Hkv / HEADS), B, splits), dynamic shared memory
// (HEADS DIM + DIM + warps HEADS (DIM + 2)) 4 bytes. If splits > 1:
//   parts    float32 [B, grid.x, splits, HEADS, DIM + 2]
//   tickets  uint32 [B, grid.x], zero before the first launch; every launch leaves zeros
#pragma once
#include "spec.cuh"
#include "decode/attend_softmax.cuh"
#include "decode/attend_token.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/pdl.cuh"

namespace {

template <int DIM, int HEADS>
__device__ __forceinline__ void finish_row(const Job& job, const Heads& heads, int num_splits,
                                           const Shared<DIM, HEADS>& shared) {
    constexpr int PAIRS = DIM / 2, PART = DIM + 2;
    const int num_warps = blockDim.x / 32, own_pairs = job.columns / 2;
    const long long row = blockIdx.y;
    const long long block = row * gridDim.x + blockIdx.x;
    unsigned* out = job.out + (row * job.num_kv_heads * job.sharing + heads.first) * own_pairs;
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
            if (at < own_pairs) out[h * own_pairs + at] = output(pair);
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
        if (at >= own_pairs) continue;
        out[h * own_pairs + at] = output(put_together(
            num_splits, [&](int s) { return __ldcg(first + s * HEADS * PART / 2); },
            [&](int s) { return __ldcg(first + s * HEADS * PART / 2 + 1 + at); }));
    }
}

template <int DIM, int HEADS>
__device__ __forceinline__ void attend(const Job& job, float* memory) {
    let_next_start();
    using S = Shape<DIM>;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const Lane<DIM> lane(threadIdx.x % 32);
    const Heads heads = heads_of_block(job, HEADS);
    const Shared<DIM, HEADS> shared(memory, num_warps);

    // where to read: the page is a guess, looked up at the same time as the position
    const int* table = job.tables + static_cast<long long>(blockIdx.y) * job.table_stride;
    const int before = blockIdx.z * num_warps;
    const int guess = (before + warp) * S::BATCH / kPage;
    int page = load_constant_word(table + min(guess, job.width - 1));
    const Range range = range_of_row<DIM>(job, load_constant_word(job.positions + blockIdx.y));
    const Split split = split_of_block(job, range);
    if (static_cast<int>(blockIdx.z) >= split.num) return;
    int at = range.first + before + warp;
    const auto page_of = [&](int batch) { return min(batch, range.last) * S::BATCH / kPage; };
    if (page_of(at) != guess) page = __ldg(table + page_of(at));

    // the first batch, unless the kernel in front caches some of it, and what the new token is
    // turned by
    if (job.new_is_cached && !is_old<DIM>(range, at)) wait_for_previous();
    uint4 keys[kLoads], values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) keys[i] = values[i] = make_uint4(0, 0, 0, 0);
    const auto load = [&](uint4(&to)[kLoads], const unsigned short* cache, int batch) {
        cache += place_in_cache<DIM>(job, page, heads.kv, batch * S::BATCH);
        load_batch<DIM>(to, cache, range, batch, lane);
    };
    load(keys, job.keys, at);
    load(values, job.values, at);
    const int number = warp * S::GROUPS + lane.group;
    const bool has_new_head = warp * S::GROUPS < HEADS + 2;
    NewHead head;
    if (has_new_head)
        head = begin_new_head<DIM, HEADS>(job, heads, range, lane, number, split.has_new);
    int next_page = __ldg(table + page_of(at + split.step));
    fetch_batches<DIM>(job, table, heads.kv, range, at + split.step, split.step);
    wait_for_previous();
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
        if (job.cap > 0.f) cap_scores(scores, job.cap * kLog2E);
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

#define TWELL_ATTEND(name, DIM, HEADS, BLOCKS)                                                     \
    extern "C" __global__ void __launch_bounds__(spec::ATTEND_BLOCK, BLOCKS)                       \
        name(const unsigned short* qkv, const int* positions, const int* tables, int table_stride, \
             int width, const unsigned short* cos, const unsigned short* sin, int columns,         \
             int half, const unsigned short* q_norm, const unsigned short* k_norm, float eps,      \
             unsigned short* keys, unsigned short* values, int num_kv_heads, int sharing,          \
             int window, int whole_batches, int split_batches, int new_is_cached, float scale,     \
             float cap, float* parts, unsigned* tickets, unsigned* out) {                          \
        extern __shared__ float memory[];                                                          \
        attend<DIM, HEADS>({qkv,     positions, tables,        table_stride,  width,               \
                            cos,     sin,       columns,       half,          q_norm,              \
                            k_norm,  eps,       keys,          values,        num_kv_heads,        \
                            sharing, window,    whole_batches, split_batches, new_is_cached,       \
                            scale,   cap,       parts,         tickets,       out},                \
                           memory);                                                                \
    }

TWELL_ENTRIES(TWELL_ATTEND)
