// choose: the end of a round. A row has read Q tokens: its next input, and drafts of what follows.
// After each of them a token is chosen. The first one is kept, and each further one if the draft
// that it follows was chosen, too. The last one kept becomes the row's next input. The host gets
// records of all that.
//
//   logits     float32 [B, Q, V]
//   ids        int32 [V], ascending: the tokens that the logits are of; null: token i has the ith
//   fields     int32, one line for each of Field in sampler.py, `fields_stride` apart; a row is a
//              column
//   tokens     int32 [B, Q]: what the row has read; null if Q is 1
//   positions  int32 [B, Q]: where they stand. Below 0 there is no token: such places come before
//              all others of their row. Null if Q is 1
//   fired      int32 [L, B, Q], or null: how many neurons fired in each layer
//   record     int32 [2, B, Q, .], rows `record_stride`, tokens `token_stride` and halves
//              `slot_stride` apart: the token, then what fired. May be the host's memory. The first
//              half and the second are written by turns. In the place of the token -1 where the
//              best is NaN (the row goes on), and -2 where it is not kept.
//
// A row of temperature 0 takes the largest logit, others the largest of logit / temperature +
// noise, and of several the first; NaN is the largest of all, as it is to torch. The noise is that
// of sampler.py: it depends on seed, position and token alone.
//
// A block has a part of a token's logits, each thread four at a time. The best of a token so far
// lies in `best`, as a number: the value's order, and the chosen token turned round. The last block
// of a row to arrive finds the row's, and sets all for the next round: what is chosen does not
// depend on time.
//
// Launch: 256 threads, grid (any, B Q). best uint64 [B, Q] and tickets uint32 [B] are
// zero before the first launch; every launch leaves zeros.
#include "spec.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/pdl.cuh"

namespace {

constexpr int kThreads = spec::CHOOSE_BLOCK, kWarps = kThreads / 32;
constexpr int kNoToken = -1, kNotKept = -2;
enum Field { kToken, kPosition, kLimit, kTemperature, kTopP, kTopK, kSeedLow, kSeedHigh, kSlot };

// Of the noise: sampler.py's _mixed and _ODD.
constexpr unsigned kOdd = 0x9e3779b9;

__device__ __forceinline__ unsigned mixed(unsigned bits, unsigned more = 0) {
    bits = (bits ^ bits >> 16) * 0x7feb352d ^ more;
    bits = (bits ^ bits >> 15) * 0x846ca68b;
    return bits ^ bits >> 16;
}

// What draws from a row. A row that is greedy has none.
struct Noise {
    float temperature;
    unsigned first, second;

    __device__ __forceinline__ float drawn(float logit, unsigned token) const {
        const unsigned bits = mixed(token * kOdd + first, second) & 0x7fffffff;
        // 0x1p-31: between 0 and 1, fine near 0
        const float exponential =
            -log1pf(-(static_cast<float>(static_cast<int>(bits)) + 0.5f) * 0x1p-31f);
        return logit / temperature - logf(exponential);
    }
};

// Larger for larger values; the largest of all for NaN, one for both zeros.
__device__ __forceinline__ unsigned order_of(float value) {
    if (value != value) return ~0u;
    const unsigned bits = __float_as_uint(value + 0.f);
    return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}

// A value's order and its token; none is {0, ~0}.
struct Best {
    unsigned order, token;

    // `other` comes after all that were taken.
    __device__ __forceinline__ void take(float value, unsigned other) {
        const unsigned of_other = order_of(value);
        if (of_other > order) order = of_other, token = other;
    }

    // Of the warp: in each lane.
    __device__ __forceinline__ Best of_warp() const {
        const unsigned largest = __reduce_max_sync(~0u, order);
        return {largest, __reduce_min_sync(~0u, order == largest ? token : ~0u)};
    }
};

// Logits at .. at + 4 of those of a token; anything for those after the last. Where V is no
// multiple of four, they do not begin at 16 bytes.
__device__ __forceinline__ uint4 load_four(const float* logits, int at, int V) {
    uint4 four = make_uint4(0, 0, 0, 0);
    load_written_if(V % 4 == 0 && at < V, logits + at, four);
    load_written_word_if(V % 4 != 0 && at < V, logits + at, four.x);
    load_written_word_if(V % 4 != 0 && at + 1 < V, logits + at + 1, four.y);
    load_written_word_if(V % 4 != 0 && at + 2 < V, logits + at + 2, four.z);
    load_written_word_if(V % 4 != 0 && at + 3 < V, logits + at + 3, four.w);
    return four;
}

// The best of the block's part of a row: in each thread of the first warp.
__device__ __forceinline__ Best best_of_block(const float* logits, const int* ids, int V,
                                              const Noise& noise) {
    __shared__ Best of_warps[kWarps];
    Best best = {0, ~0u};
    int at = 4 * (blockIdx.x * kThreads + threadIdx.x);
    const int step = 4 * gridDim.x * kThreads;
    uint4 next = load_four(logits, at, V);
#pragma unroll 1
    for (; at < V; at += step) {
        const float four[4] = {__uint_as_float(next.x), __uint_as_float(next.y),
                               __uint_as_float(next.z), __uint_as_float(next.w)};
        next = load_four(logits, at + step, V);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (at + i >= V) continue;
            unsigned token = at + i;
            if (ids) token = ids[token];
            best.take(noise.temperature > 0.f ? noise.drawn(four[i], token) : four[i], token);
        }
    }
    best = best.of_warp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    return of_warps[threadIdx.x % kWarps].of_warp();
}

// The tokens chosen for a row, as far as they are kept, into `record`; returns how many, and the
// last of them.
__device__ __forceinline__ int2 keep_chosen(unsigned long long* best, const int* tokens,
                                            const int* positions, int Q, int* record,
                                            int token_stride) {
    int num_kept = 0, last = 0;
    bool agrees = true;
    for (int i = 0; i < Q; ++i) {
        const unsigned long long number = atomicExch(best + i, 0ull);
        const int token = ~static_cast<unsigned>(number);
        const bool is_nan = number >> 32 == ~0u;
        const bool is_kept = agrees && (Q == 1 || positions[i] >= 0);
        record[i * token_stride] = !is_kept ? kNotKept : is_nan ? kNoToken : token;
        if (!is_kept) continue;
        ++num_kept, last = token;
        agrees = !is_nan && i + 1 < Q && tokens[i + 1] == token;
    }
    return make_int2(num_kept, last);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    choose(const float* logits, const int* ids, int V, int* fields, int fields_stride,
           const int* tokens, const int* positions, int Q, const int* fired, int L, int* record,
           int record_stride, int token_stride, int slot_stride, unsigned long long* best,
           unsigned* tickets) {
    __shared__ unsigned said;
    const int row = Q == 1 ? blockIdx.y : blockIdx.y / Q;
    const auto field = [&](Field which) -> int& { return fields[which * fields_stride + row]; };

    // nothing of the row is written while a round is under way, but at its end
    const int position = field(kPosition), limit = field(kLimit), slot = field(kSlot);
    const unsigned low = field(kSeedLow), high = field(kSeedHigh);
    const unsigned own_position = Q == 1 ? position : positions[blockIdx.y];
    const unsigned first = mixed(low ^ mixed(own_position + kOdd));
    const Noise noise = {__int_as_float(field(kTemperature)), first,
                         mixed(high ^ mixed(first + kOdd))};
    wait_for_previous();
    const Best own = best_of_block(logits + static_cast<long long>(blockIdx.y) * V, ids, V, noise);
    if (threadIdx.x == 0) {
        const unsigned long long number = own.order;
        atomicMax(best + blockIdx.y, number << 32 | ~own.token);
        said = take_ticket(tickets + row, gridDim.x * Q);
    }
    __syncthreads();
    if (said != gridDim.x * Q - 1) return;

    // the row's, in its last block
    const int from = row * Q;
    int* own_record = record + static_cast<long long>(row) * record_stride +
                      static_cast<long long>(slot) * slot_stride;
    if (threadIdx.x == 0) {
        const int2 kept =
            keep_chosen(best + from, tokens + from, positions + from, Q, own_record, token_stride);
        field(kToken) = kept.y;
        field(kPosition) = min(position + kept.x, limit);
        field(kSlot) = 1 - slot;
    }
    for (int i = threadIdx.x; i < L * Q; i += kThreads) {
        const int layer = i / Q, token = i % Q;
        own_record[token * token_stride + 1 + layer] =
            __ldcg(fired + layer * gridDim.y + from + token);
    }
}
