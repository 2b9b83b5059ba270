// A block of `step`: what it is given, its shared memory, whose rows it has. See step.cuh.
#pragma once

#include "spec.cuh"
#include "decode/step_shared.cuh"
#include "decode/step_words.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/clock.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int K = spec::STEP_K;
static_assert(K == 1536 || K == 2048 || K == 3072 || K == 3584 || K == 4096,
              "who has which columns is written for these");
using Weight = spec::STEP_WEIGHT;  // of the layers
using Head = spec::STEP_HEAD;
constexpr bool kHeadIsAlike = Weight::kBits == Head::kBits;

constexpr int kWarps = spec::STEP_WARPS, kConsumers = 32 * kWarps;  // one more asks for weights
constexpr int kQuad = spec::STEP_QUAD;  // rows of a weight, the least that a block has
// Where groups of a row share scales, those of a quad, bf16 [row][group], lie behind its rows.
constexpr int kGroup = spec::STEP_GROUP;
constexpr int kQuadBytes = kQuad * (Weight::bytes(K) + (Weight::kGroupScales ? K / kGroup * 2 : 0));
// of a layer, what is asked for at once: 6 to 17 KB; and the scales of a quad's rows, beside them
constexpr int kUnitRows = Weight::kGroupScales ? 8 : kQuadBytes <= 16 * 1024 ? 4 : 2;
constexpr int kUnitBytes = (kQuadBytes * kUnitRows / kQuad + 127) / 128 * 128;  // of the ring
constexpr int kScaleBytes = Weight::kRowScales ? 4 * kQuad : 0;
constexpr int kUnits = spec::STEP_RING_KB * 1024 / kUnitBytes;  // of the ring
// units on their way at a time, 32 KB or so; with more, all else would queue behind
constexpr int kAhead = (spec::STEP_AHEAD_KB * 1024 + kUnitBytes / 2) / kUnitBytes;
constexpr int kTake = 4;   // units that a warp has in registers, but of codes of 4 bits
constexpr int kEager = 4;  // units of the next layer that do not wait for the rows of this one

// Of the gate's copy: row blocks by panels of 512 columns, of which a part, equal ones, is a unit.
constexpr int kScreenRows = 16, kPanelBytes = 4608;
constexpr int parts_of_screen(int parts = 2) {
    const bool fits = K / 512 % parts == 0 && K / 512 / parts * kPanelBytes <= kUnitBytes;
    return fits ? parts : parts_of_screen(parts + 1);
}
constexpr int kScreenParts = parts_of_screen(), kPartPanels = K / 512 / kScreenParts;
constexpr int kScreenBytes = kPartPanels * kPanelBytes;
static_assert(K % 512 == 0, "whole panels");
// Copies overtake each other, and a warp waits for each eighth unit alone. When one is there so are
// those that were asked for this many before it; so what had the place of its next one was there.
constexpr int kMostAhead = kUnits - kWarps, kScreenAhead = 48 * 1024 / kScreenBytes < kMostAhead
                                                               ? 48 * 1024 / kScreenBytes
                                                               : kMostAhead;
static_assert(kScreenAhead > 0, "a ring of more than a unit for each warp");

// How a kind of weights lies in a unit, and how the lanes of a warp share its slice of the rows. A
// slice goes by groups of 64 bytes, two of which begin at a multiple of 128: so slices
// of an odd number have one of their neighbour's, which is multiplied by 0.
template <class Kind, bool HAS_GROUPS = Kind::kGroupScales>
struct Units {
    static constexpr int kAtOnce = kTake;
    static constexpr int kRowBytes = Kind::bytes(K);
    static constexpr int kRows = kUnitBytes / kRowBytes;  // of a unit
    static constexpr int kQuadUnits = kQuad / kRows;
    static constexpr int kSliceBytes = kRowBytes / kWarps;
    static constexpr bool kIsOdd = kSliceBytes % 128 != 0;
    static constexpr int kGroups = (kSliceBytes + 64 * kIsOdd) / 64;
    static constexpr int kChunks = (kRows * kGroups + 7) / 8;  // of 16 bytes, of a unit, of a lane
    static constexpr int kXBytes = Kind::kEights * 64 * kGroups;  // of x, beside the slice
};
// Of codes of 4 bits: see step_codes.cuh.
template <class Kind>
struct Units<Kind, true> {
    static constexpr int kAtOnce = K <= 2048 ? 4 : 2;  // as there are registers
    static constexpr int kRows = kUnitRows;
    static constexpr int kXBytes = K / kWarps * 2;
    static constexpr bool kIsOdd = false;
};
using Layers = Units<Weight>;
constexpr int kTakenRows = Layers::kAtOnce * kUnitRows;
constexpr int kMostRows = spec::STEP_MOST_ROWS;  // neurons of a block
// rows that are put together at once; a unit of two quads may be half empty
constexpr int kMapRows = spec::STEP_MOST_MAPPED + (kUnitRows > kQuad ? kUnitRows : 0);
constexpr int kMostSums = (kMostRows + kMapRows + kTakenRows - 1) / kTakenRows * kTakenRows;
// row blocks of the gate's copy that a warp has: each has its units in the ring at once
constexpr int kWarpBlocks = (kMostRows + kScreenRows * kWarps - 1) / (kScreenRows * kWarps);
constexpr int kSliceEights = K / kWarps / 8;        // of a row of K, of a warp
constexpr int kEights = (kSliceEights + 31) / 32;   // of those, of a lane, at most
constexpr int kOwnQuads = spec::STEP_OWN_QUADS;     // of x, of a block, at most; a power of two
constexpr int kMostDim = spec::STEP_MOST_DIM;       // of a head
constexpr int kMostParts = kMostDim > 128 ? 5 : 9;  // of a head; a warp awaits one, but not its own
constexpr int kApart = 37;                          // see Block::turn

using Layer = ScaledLayer<Weight>;
constexpr int kLayerBytes = sizeof(Layer);

struct Args {
    const Layer* layers;
    int num_layers, N, V, H, Hkv;
    const int *tokens, *positions, *tables;
    const unsigned short *embeddings, *last_norm;
    const void* head;
    const float* head_scales;
    const unsigned short *cos, *sin;
    float eps, scale;
    int is_silu;
    unsigned *words, *epoch;
    int* counts;
    float *logits, *most, *least;
    unsigned short* x;
    long long* stamps;
};

// So many quads of rows, or what is divided, to each block, and one more to the first `more`.
struct Division {
    int each, more;
};

struct Share {
    int first, num;

    __device__ __forceinline__ Share(int first, int num) : first(first), num(num) {}
    __device__ __forceinline__ Share(const Division& of, int block)
        : first(block * of.each + min(block, of.more)), num(of.each + (block < of.more)) {}
};

// What a warp has of the block's head: the same for all layers.
struct alignas(16) Attend {
    int head, kv, num_parts, part;
    Range range;
    int first, step, has_new, stores_new;  // batches of positions
    long long first_place, new_place;      // in the cache, of the first batch and of the new token
};

// Two columns of the b of an mma: a lane's part.
struct Column {
    unsigned b0, b1;
};
// x, for a kind of weights: bf16, or f16 times a power of two, and what takes that from the sums.
template <class Kind, bool IN_F16 = Kind::kInF16>
struct Columns {
    Column of[Kind::kEights * Units<Kind>::kChunks];
};
template <class Kind>
struct Columns<Kind, true> {
    Column of[Kind::kEights * Units<Kind>::kChunks];
    float back;
};

// A lane's part of a unit.
template <class Kind>
using Unit = uint4[Units<Kind>::kChunks];
// Of those in registers; and the scales of the lane's rows.
template <class Kind, bool HAS_SCALES = Kind::kRowScales>
struct Taken {
    Unit<Kind> units[kTake];
};
template <class Kind>
struct Taken<Kind, true> {
    Unit<Kind> units[kTake];
    float scales[kTake];
};

// 8 bf16, as they were before they had tags: those of columns `column` on, a multiple of 8.
__device__ __forceinline__ uint4 await_eight(const unsigned* words, int column, unsigned tag) {
    const unsigned* from = words + word_of(column);
    unsigned tries = 0;
    uint4 a, b;
#pragma unroll 1
    while (true) {
        a = load_relaxed(from), b = load_relaxed(from + 32);
        const unsigned wrong = (a.x ^ tag) | (a.y ^ tag) | (a.z ^ tag) | (a.w ^ tag) | (b.x ^ tag) |
                               (b.y ^ tag) | (b.z ^ tag) | (b.w ^ tag);
        if (!(wrong & 0xffff)) break;
        lose_patience(tries);
    }
    return make_uint4(permute_bytes(a.x, a.y, 0x7632), permute_bytes(a.z, a.w, 0x7632),
                      permute_bytes(b.x, b.y, 0x7632), permute_bytes(b.z, b.w, 0x7632));
}

struct Block {
    // shared memory, bytes from its first one
    static constexpr int kRing = 0;
    static constexpr int kSums = kRing + kUnits * kUnitBytes;  // [2][row][warp]
    static constexpr int kDealt = (kSums + 2 * kMostSums * kWarps * 4 + 255) / 256 * 256;  // x
    static constexpr int kNorms = kDealt + kWarps * Layers::kXBytes;  // [2][warp]
    static constexpr int kBacks = kNorms + 2 * kWarps * 4;            // of x in f16, [warp]
    static constexpr int kOwn = kBacks + kWarps * 4;                  // of x, the residual
    static constexpr int kTurn = kOwn + kOwnQuads * kQuad * 4;        // cos, sin
    static constexpr int kLayers = kTurn + 2 * 2 * kMostDim;          // those about this one
    static constexpr int kAttends = kLayers + kLayersKept * sizeof(Layer);
    static constexpr int kDivisions =
        kAttends + kWarps * sizeof(Attend);                            // qkv, o, gate, head, map
    static constexpr int kScales = kDivisions + 6 * sizeof(Division);  // of the ring's rows
    static constexpr int kUpScales = kScales + kUnits * kScaleBytes;   // of the block's neurons
    static constexpr int kBarriers = kUpScales + Weight::kRowScales * kMostRows * 4;
    // in turns: what attention has, and what the FFN has
    static constexpr int kAttend = kBarriers + (8 * (2 * kUnits + 1) + 15) / 16 * 16;
    static constexpr int kColumns = kAttend;                     // of y, [warp][32]
    static constexpr int kList = kColumns + kWarps * 32 * 4;     // neurons that fired
    static constexpr int kHidden = kList + kMostRows * 4;        // what they are worth
    static constexpr int kCandidates = kHidden + kMostRows * 4;  // neurons that may fire
    static constexpr int kGates = kCandidates + kMostRows * 4;
    static constexpr int kCandidateGates = kGates + kMostRows * 4;
    static constexpr int kMasks = kCandidateGates + kMostRows * 4;  // of a row block each
    // see Screened::round_x
    static constexpr int kBytesOfX = kMasks + kMostRows / kScreenRows * 4;
    static constexpr int kGroupsOfX = kBytesOfX + K;
    static constexpr int kPlanes = kBytesOfX;  // see CodesDown
    // of groups of neurons, the scales of down's columns: [group][K] bf16, apart by some bytes
    static constexpr int kMostGroups = (kMostRows - kQuad + kGroup - 1) / kGroup + 1 + 2;
    static constexpr int kDownScales = kGroupsOfX + K / 32 * 8, kDownScaleBytes = 2 * K + 32;
    static constexpr int kListEnd =
        kDownScales + (Weight::kGroupScales ? kMostGroups * kDownScaleBytes : 0);
    // what a head is put together of: of own warps, and of parts in other blocks
    static constexpr int kAttendSums = kWarps + kMostParts - 1;
    static constexpr int kAttendEnd = kAttend + (2 * kMostDim + kAttendSums * (kMostDim + 2)) * 4;
    static constexpr unsigned kBytes = kAttendEnd > kListEnd ? kAttendEnd : kListEnd;
    static_assert(kBytes <= 227 * 1024, "what a block may ask for on Hopper");
    static_assert(kLayers % 16 == 0 && kAttends % 16 == 0 && kAttend % 16 == 0 &&
                      kBytesOfX % 16 == 0,
                  "read by 16 bytes");
    static_assert(kScales % 16 == 0 && kDealt % 256 == 0, "copied; groups are exchanged there");

    const Args& args;
    int thread_idx, block_idx;
    unsigned memory;  // its address
    char* generic;
    int slot;  // of the ring, whose unit comes next
    unsigned parity;
    int sums_at, norms_at;

    __device__ __forceinline__ Block(const Args& given, void* dynamic)
        : args(given), thread_idx(threadIdx.x), block_idx(blockIdx.x),
          memory(smem_address(dynamic)), generic(static_cast<char*>(dynamic)), slot(0), parity(0),
          sums_at(0), norms_at(0) {}

    __device__ __forceinline__ int thread() const { return opaque(thread_idx); }
    __device__ __forceinline__ int block() const { return opaque(block_idx); }

    template <class T>
    __device__ __forceinline__ T* at(int byte) const {
        return reinterpret_cast<T*>(generic + byte);
    }

    __device__ __forceinline__ unsigned full(int i) const { return memory + kBarriers + 8 * i; }
    __device__ __forceinline__ unsigned empty(int i) const { return full(kUnits + i); }
    __device__ __forceinline__ unsigned has_rows() const { return full(2 * kUnits); }
    __device__ __forceinline__ const Division& division(int which) const {
        return at<Division>(kDivisions)[which];
    }
    __device__ __forceinline__ const Layer& layer(int l) const {
        return at<Layer>(kLayers)[l % kLayersKept];
    }
    // Sums of warps lie in two places by turns: while those in the one are still being read, the
    // next product may write the other.
    __device__ __forceinline__ float* sums() const {
        return at<float>(kSums) + sums_at * (kMostSums * kWarps);
    }
    __device__ __forceinline__ void flip_sums() { sums_at ^= 1; }

    // What the block's first warp has just done in a layer.
    __device__ __forceinline__ void stamp(int l, int stage) const {
        if (args.stamps && thread() == 0 && l < args.num_layers)
            args.stamps[(l * Stage::kAll + stage) * gridDim.x + block()] = clock_now();
    }

    // Behind the neurons that have gates of their own are those that share one: where, and the
    // block's quads of them.
    __device__ __forceinline__ int first_shared() const { return division(5).each; }
    __device__ __forceinline__ Share mapped() const { return Share(division(4), block()); }

    // ---- words: x, what heads attend to, x between; q, k and v; parts of y; parts of heads

    __device__ __forceinline__ unsigned* row_words(int phase) const {
        return args.words + phase * K;
    }
    __device__ __forceinline__ unsigned* qkv_words() const { return args.words + 3 * K; }
    __device__ __forceinline__ unsigned* y_parts() const { return args.words + 6 * K; }
    __device__ __forceinline__ uint4* head_parts() const {
        return reinterpret_cast<uint4*>(y_parts() + gridDim.x * K);
    }

    // Which block's share of q, k and v and of the FFN a block has in the next layer: not always
    // the larger one.
    __device__ __forceinline__ static int turn(int turned) {
        turned += kApart;
        return turned >= static_cast<int>(gridDim.x) ? turned - static_cast<int>(gridDim.x)
                                                     : turned;
    }

    // Of so many quads of rows, the units.
    __device__ __forceinline__ static constexpr int units_of(int quads) {
        return kUnitRows > kQuad ? (quads + 1) / 2 : quads * (kQuad / kUnitRows);
    }

    // Eight `i` of the thread, of a row of K: those whose weights its warp multiplies. Of codes
    // every eighth block of 64 columns is one warp's.
    __device__ __forceinline__ int eight_of(int i) const {
        if (Weight::kGroupScales)
            return i * 256 + thread() % 32 / 8 * 64 + thread() / 32 * 8 + thread() % 8;
        return thread() / 32 * kSliceEights + i * 32 + thread() % 32;
    }

    // Whether it has one. Of some sizes a slice is no multiple of 32 eights: the last lanes have
    // one less, and zeros in its place.
    __device__ __forceinline__ static constexpr bool all_have(int i) {
        return 32 * (i + 1) <= kSliceEights;
    }
    __device__ __forceinline__ bool has_eight(int i) const {
        return all_have(i) || 32 * i + thread() % 32 < kSliceEights;
    }

    __device__ __forceinline__ void load_row(const unsigned short* row,
                                             uint4 (&eights)[kEights]) const {
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            if (!all_have(i) || Weight::kGroupScales) eights[i] = make_uint4(0, 0, 0, 0);
            load_streamed_if(has_eight(i), row + 8 * eight_of(i), eights[i]);
        }
    }

    // The sum of the warps' numbers, in all of them.
    __device__ __forceinline__ float sum_of_block(float of_warp) {
        float* all = at<float>(kNorms) + norms_at * kWarps;
        norms_at ^= 1;
        if (thread() % 32 == 0) all[thread() / 32] = of_warp;
        sync_consumers();
        return sum_of_warps(all);
    }

    __device__ __forceinline__ void normalise_row(uint4 (&eights)[kEights],
                                                  const uint4 (&weights)[kEights]) {
        float values[kEights][8], sum = 0.f;
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            unpack(eights[i], values[i]);
            sum += sum_of_squares(values[i]);
        }
        sum = sum_over_lanes(sum);
        const float root = reciprocal_root(sum_of_block(sum) * (1.f / K) + args.eps);
#pragma unroll
        for (int i = 0; i < kEights; ++i) eights[i] = scaled(values[i], root, weights[i]);
    }
};

}  // namespace
