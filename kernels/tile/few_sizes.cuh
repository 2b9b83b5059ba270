// What products of few tokens (few_product.cuh) are built for, which rows they take, and how blocks
// share them.
#pragma once

#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/shared.cuh"
#include "tile/weights.cuh"

namespace few {

constexpr int kWarps = spec::FEW_WARPS, kThreads = 32 * kWarps;
constexpr int kRows = spec::FEW_ROWS;  // of a row block
constexpr int kOctet = 8;              // tokens
constexpr int kHalfBytes = 512;        // of 8 rows of half a slab of weights
constexpr int kBlockSums = kRows * kOctet;

// What a kernel is built for: kind of weights, octets of tokens, row blocks in a pass, passes
// between two times that the warps' sums are added up, stages of a warp, halves of a slab. Where
// STAYS, x stays in shared memory, each warp's slabs in a place of their own, behind all else; else
// it comes with the weights, again in each pass.
template <class WEIGHT, int OCTETS, bool STAYS, int AT_ONCE, int PASSES, int STAGES, int HALVES>
struct Sizes {
    using Weight = WEIGHT;
    static constexpr bool kMayBeF16 = WEIGHT::kInF16 && STAYS && OCTETS == 1;
#if __CUDA_ARCH__ >= 890
    static constexpr bool kInF16 = kMayBeF16;
#else
    static constexpr bool kInF16 = false;
#endif
    // of a warp: what its rows of x were multiplied by
    static constexpr int kPowerBytes = kMayBeF16 ? 4 * kOctet : 0;
    static constexpr int kWider = WEIGHT::kEights;  // x is, than weights
    static constexpr bool kStays = STAYS;
    static constexpr int kOctets = OCTETS, kAtOnce = AT_ONCE, kPasses = PASSES;
    static constexpr int kStages = STAGES, kHalves = HALVES;
    static constexpr int kSlab = HALVES * (kHalfBytes / 8 * 8 / WEIGHT::kBits);
    static_assert(WEIGHT::kMultiple % kSlab == 0, "rows are whole slabs");
    static constexpr int kPieceBytes = HALVES * kHalfBytes;  // of 8 rows of a slab
    static constexpr int kXPieceBytes = kWider * kPieceBytes;
    static constexpr int kStageBytes =
        2 * AT_ONCE * kPieceBytes + (kStays ? 0 : OCTETS * kXPieceBytes);
    static constexpr int kRingBytes = kWarps * STAGES * kStageBytes;
    static constexpr int kSums = PASSES * AT_ONCE * OCTETS * kBlockSums;  // of a warp
    static constexpr unsigned kBytes = kRingBytes + kWarps * kSums * 4;  // and x_bytes, if it stays

    // Slabs of a warp, at most, and the bytes of x that stays: M rows of each slab.
    __device__ static constexpr int most_slabs(int K) { return (K / kSlab + kWarps - 1) / kWarps; }
    __device__ static constexpr unsigned x_bytes(int M, int K) {
        return kStays ? kWarps * (most_slabs(K) * M * 2 * kSlab + kPowerBytes) : 0;
    }
};

// Where a sum lies among those of a row block and octet: so that the 32 lanes of a warp, each with
// row g of token 2t, write to 32 banks.
__device__ __forceinline__ int place_of_sum(int row, int token) {
    return (token >> 1 | (token & 1) << 2) * kRows + (row ^ (token >> 2 & 1) * 8);
}

// The first `num` rows of a weight [., K].
template <class Weight>
struct FirstRows {
    using Memory = typename Weight::Memory;
    const Memory* weight;
    int num;

    __device__ __forceinline__ int num_blocks() const { return (num + kRows - 1) / kRows; }
    __device__ __forceinline__ bool has(int i) const { return i < num; }

    // Row i, in the column of `from` in the first one.
    __device__ __forceinline__ const void* row(const Memory* from, int i,
                                               unsigned row_bytes) const {
        return offset_by(from, i, row_bytes);
    }
};

// `num` rows of a weight by a list of bytes in shared memory.
template <class Weight>
struct ListedRows {
    using Memory = typename Weight::Memory;
    const Memory* weight;
    int num;
    unsigned list;

    __device__ __forceinline__ int num_blocks() const { return (num + kRows - 1) / kRows; }
    __device__ __forceinline__ bool has(int i) const { return i < num; }

    __device__ __forceinline__ const void* row(const Memory* from, int i,
                                               unsigned row_bytes) const {
        return offset_by(from, load_shared_byte(list + i), row_bytes);
    }
};

// The row blocks [begin, end) of this block of threads, of `num` in all.
struct Share {
    int begin, end;

    __device__ __forceinline__ explicit Share(int num)
        : begin(num * blockIdx.x / gridDim.x), end(num * (blockIdx.x + 1) / gridDim.x) {}
};

}  // namespace few
