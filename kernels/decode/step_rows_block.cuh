// A block of `step_rows` (step_rows.cuh): what it is given, its shared memory, whose rows it has,
// and the words by which blocks hand each other results.
#pragma once

#include "spec.cuh"
#include "decode/step_shared.cuh"
#include "ptx/bf16.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"

namespace {

using Layer = LayerOf<unsigned short>;
constexpr int kLayerWords = sizeof(Layer) / 8;

constexpr int K = spec::ROWS_K;
constexpr int kWarps = 8, kConsumers = 32 * kWarps;  // of three warpgroups; the third brings
constexpr int kThreads = kConsumers + 128;
static_assert(kThreads == spec::ROWS_BLOCK);
constexpr int kTokens = spec::ROWS_TOKENS;    // at most
constexpr int kPitch = 2 * K + 64;                // of rows in shared memory: 8 lanes, all banks
constexpr int kUnitRows = 4, kUnitBytes = kUnitRows * kPitch;  // what is asked for at once
constexpr int kPlaces = 4, kUnits = 2 * kPlaces;  // of the ring: octets of rows, halves of them
constexpr int kMostFlying = 32;                   // KB on their way, as in `step`
constexpr int kOctets = spec::ROWS_OCTETS;    // of gates of a block, at most
constexpr int kNeurons = 8 * kOctets;
constexpr int kParts = spec::ROWS_PARTS;      // of all that fired
constexpr int kGroups = spec::ROWS_GROUPS;    // of the columns of y
constexpr int kOwners = kParts * kGroups;         // blocks that have columns of x
constexpr int kOwn = K / kOwners;                 // so many each
constexpr int kSources = spec::ROWS_SOURCES;  // blocks whose neurons are of one part, at most
constexpr int kMostBlocks = kParts * kSources;
constexpr int kDowns = 112, kDownColumns = K / kGroups;  // of rows of down, at a time
constexpr int kDownPitch = 2 * kDownColumns + 16;
constexpr int kMostTasks = spec::ROWS_TASKS;  // heads of tokens, of a block, if DIM is 64

struct Args {
    const Layer* layers;
    int num_layers, N, V, H, Hkv;
    const int *tokens, *positions, *tables;
    int num_tokens, table_stride;
    const unsigned short *embeddings, *last_norm, *head, *cos, *sin;
    float eps, scale;
    unsigned *words, *epoch;
    int* counts;
    float* logits;
};

struct Share {
    int first, num;  // octets of rows of a weight
};

// A head of a token that the block attends with.
struct alignas(16) Task {
    int token, head, kv, is_there, start, position;
};

// x of 16 tokens, of a warp's 256 columns: of every 32 the lane's eight, of tokens g and g + 8.
using Slice = uint4[K / kWarps / 32][2];
// A lane's part of eight rows of a weight, of the same columns.
using Octet = uint4[K / kWarps / 32];

// ---- words: ~0 until they are written

__device__ __forceinline__ bool is_missing(const uint4& v) {
    return max(max(v.x, v.y), max(v.z, v.w)) == ~0u;
}

__device__ __forceinline__ uint4 await_words(const unsigned* from) {
    unsigned tries = 0;
    uint4 v = load_relaxed(from);
#pragma unroll 1
    while (is_missing(v)) {
        lose_patience(tries);
        v = load_relaxed(from);
    }
    return v;
}

// All of those that are missing at once, until none is.
template <int NUM, class From>
__device__ __forceinline__ void await_all(uint4 (&v)[NUM], From from) {
    unsigned tries = 0;
#pragma unroll 1
    while (true) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            const bool missing = is_missing(v[i]);
            any = any || missing;
            load_relaxed_if(missing, from(i), v[i]);
        }
        if (!any) break;
        lose_patience(tries);
    }
    __syncwarp();
}

__device__ __forceinline__ uint4 four_times(unsigned word) {
    return make_uint4(word, word, word, word);
}

__device__ __forceinline__ uint2 rounded_four(const float4& v) {
    return make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
}

__device__ __forceinline__ float4 onto(const float4& x, const float4& v) {
    return make_float4(rounded(rounded(v.x) + x.x), rounded(rounded(v.y) + x.y),
                       rounded(rounded(v.z) + x.z), rounded(rounded(v.w) + x.w));
}

struct Block {
    // shared memory, bytes from its first one
    static constexpr int kRing = 0;
    static constexpr int kDown = kRing + kUnits * kUnitBytes;
    static constexpr int kSums = kDown + kDowns * kDownPitch;      // [octet][warp][token][8]
    static constexpr int kSumBytes = kWarps * kTokens * 8 * 4;     // of an octet
    static constexpr int kNormWeights = kSums + kOctets * kSumBytes;
    static constexpr int kNorms = kNormWeights + 2 * K;            // [2][token][warp]
    static constexpr int kOwnX = kNorms + 2 * kTokens * kWarps * 4;  // [token][kOwn], the residual
    static constexpr int kGates = kOwnX + kTokens * kOwn * 4;      // [neuron][token]
    static constexpr int kHidden = kGates + kNeurons * kTokens * 4;  // [neuron][token] bf16
    static constexpr int kList = kHidden + kDowns * kTokens * 2;
    static constexpr int kMasks = kList + kNeurons * 4;            // [octet]: which fired
    static constexpr int kCounts = kMasks + 32;                    // [token]: how many
    static constexpr int kTotal = kCounts + kTokens * 4;           // of others' neurons; which
    static constexpr int kMap = kTotal + 16;
    static constexpr int kLayers = kMap + 2 * kSources * kNeurons;  // those about this one
    static constexpr int kTasks = kLayers + kLayersKept * sizeof(Layer);
    static constexpr int kBarriers = kTasks + kMostTasks * sizeof(Task);
    static constexpr unsigned kBytes = kBarriers + 8 * (kUnits + kPlaces + 4);
    static_assert(kBytes <= 227 * 1024, "what a block may ask for on Hopper");
    static_assert(kLayers % 16 == 0 && kTasks % 16 == 0 && kMasks % 16 == 0, "read by 16 bytes");
    // in turns: q, k and v lie where the gates will, and heads' parts where no sums of o will
    static constexpr int kNew = kGates, kNewEnd = kHidden;
    static constexpr int kHeads = kSums + 2 * kSumBytes, kHeadsEnd = kNormWeights;

    const Args& args;
    int thread_idx, block_idx;
    unsigned memory;  // its address
    char* generic;
    int place;        // of the ring, that comes next
    unsigned parity;
    int norms_at;
    unsigned down_parity;

    __device__ __forceinline__ Block(const Args& given, void* dynamic)
        : args(given), thread_idx(threadIdx.x), block_idx(blockIdx.x),
          memory(smem_address(dynamic)), generic(static_cast<char*>(dynamic)), place(0), parity(0),
          norms_at(0), down_parity(0) {}

    __device__ __forceinline__ int thread() const { return opaque(thread_idx); }
    __device__ __forceinline__ int warp() const { return thread() / 32; }
    __device__ __forceinline__ int lane() const { return thread() % 32; }
    __device__ __forceinline__ int block() const { return opaque(block_idx); }

    template <class T>
    __device__ __forceinline__ T* at(int byte) const {
        return reinterpret_cast<T*>(generic + byte);
    }

    __device__ __forceinline__ unsigned full(int i) const { return memory + kBarriers + 8 * i; }
    __device__ __forceinline__ unsigned empty(int i) const { return full(kUnits + i); }
    __device__ __forceinline__ unsigned listed() const { return full(kUnits + kPlaces); }
    __device__ __forceinline__ unsigned mapped() const { return full(kUnits + kPlaces + 1); }
    __device__ __forceinline__ unsigned down_full() const { return full(kUnits + kPlaces + 2); }
    __device__ __forceinline__ unsigned down_empty() const { return full(kUnits + kPlaces + 3); }
    __device__ __forceinline__ const Layer& layer(int l) const {
        return at<Layer>(kLayers)[l % kLayersKept];
    }
    __device__ __forceinline__ const Task& task(int j) const { return at<Task>(kTasks)[j]; }

    // ---- who has what

    // Octets of rows: of q, k and v (0), o (1), gate (2) or the head (3). Of the gate the last
    // blocks have one more, of q, k and v the first.
    __device__ __forceinline__ Share share(int which, int block) const {
        if (which == 1) return {2 * block, block < kOwners ? 2 : 0};
        const int blocks = gridDim.x;
        const int octets = (which == 0 ? num_columns() : which == 2 ? args.N : args.V) / 8;
        const int each = octets / blocks, more = octets % blocks;
        const int from = which == 2 ? blocks - more : 0;  // those that have one more
        return {block * each + max(0, min(block - from, more)),
                each + (block >= from && block < from + more)};
    }

    // Of q, k and v.
    __device__ __forceinline__ int num_columns() const {
        return (args.H + 2 * args.Hkv) * (K / args.H);
    }

    // ---- words for other blocks: in four turns, by layers

    __device__ __forceinline__ unsigned* words(unsigned tick) const {
        return args.words + static_cast<long long>(tick & 3) * part_words(kOwners, 0);
    }
    // x of the layer (0), what heads attend to (1), x between (2): see place_in_row
    __device__ __forceinline__ static int row_words(int which) {
        return which * (kTokens * K / 2);
    }
    // q, k and v: [token][column]
    __device__ __forceinline__ int qkv_words() const { return row_words(3); }
    // which of a block's neurons fired, by octets
    __device__ __forceinline__ int mask_words(int source) const {
        return qkv_words() + kTokens * num_columns() / 2 + source * 8;
    }
    // [block's neuron][token]
    __device__ __forceinline__ int hidden_words(int neuron) const {
        return mask_words(gridDim.x) + neuron * (kTokens / 2);
    }
    // parts of y, of an owner's columns: see give_part
    __device__ __forceinline__ int part_words(int owner, int part) const {
        return hidden_words(gridDim.x * kNeurons) + (owner * kParts + part) * (kTokens * kOwn);
    }

    // A token's column, in a row's words: so that a warp loads its slice as it lies.
    __device__ __forceinline__ static int place_in_row(int token, int column) {
        return (column / 32 * kTokens + token) * 16 + column % 32 / 2;
    }

    // A word for this turn; and that of two layers ago, which all have read, is taken back.
    __device__ __forceinline__ void give(unsigned tick, int at, unsigned word) const {
        store_relaxed_word(words(tick) + at, word);
        store_relaxed_word(words(tick + 2) + at, ~0u);
    }
    __device__ __forceinline__ void give(unsigned tick, int at, uint2 both) const {
        store_relaxed_pair(words(tick) + at, both.x, both.y);
        store_relaxed_pair(words(tick + 2) + at, ~0u, ~0u);
    }
};

}  // namespace
