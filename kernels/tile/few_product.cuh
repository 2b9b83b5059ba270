// x [M, K] times rows of a weight, for so few tokens (1 to 64) that time goes by how fast the
// weights stream in: what few_linear, few_gated and few_hidden are built of.
//
// Weights are the a of the mma, in row blocks of 16; tokens are its b, in octets. The eight warps
// of a block cut K among them, slab by slab, and each takes all rows of the block:
// so x is read once a pass, and what a warp waits for is its own. A pass takes AT_ONCE row blocks;
// behind some passes the warps' sums are added up, in the order of warps. Loops are left as loops:
// a kernel runs for so short a time that its code, read for the first time, counts like weights.
//
// A row of a slab is 64 HALVES bytes in a stage, and as many that are asked of L2 at once: 128 are
// worth it, for L2 takes so many requests a clock, whatever their size. Lane 4 g + t of the mma
// reads 16 bytes (8 columns) of row g: thread t of a quad has columns 8 t to 8 t + 7 of a half,
// which are not those that the mma names, but a and b agree. The halves of odd rows are exchanged:
// so the lanes of two neighbouring rows read from all banks.
//
// The product may start before the kernel in front of it has ended (ptx/pdl.cuh): weights do not
// depend on it, x does.
#pragma once

#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"

// Kilobytes of shared memory that a block may have: Hopper and data centre Blackwell; A100 and
// Orin; all other GPUs. What the kernels are built for goes by it.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define TWELL_SHARED_KB 227
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
#define TWELL_SHARED_KB 163
#else
#define TWELL_SHARED_KB 99
#endif

// A bf16 value that the previous kernel wrote.
__device__ __forceinline__ float written_value(const unsigned short* from) {
    return bf16_value(load_written_half(from));
}

namespace few {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 16;         // of a row block
constexpr int kOctet = 8;         // tokens
constexpr int kHalf = 32;         // columns of K in half a slab
constexpr int kHalfBytes = 512;   // of 8 rows of it
constexpr int kBlockSums = kRows * kOctet;

// What a kernel is built for: octets of tokens, row blocks in a pass, passes between two times that
// the warps' sums are added up, stages of a warp, halves of a slab. Where STAYS, x stays in shared
// memory, each warp's slabs in a place of their own, behind all else; else it comes with the
// weights, again in each pass.
template <int OCTETS, bool STAYS, int AT_ONCE, int PASSES, int STAGES, int HALVES>
struct Sizes {
    static constexpr bool kStays = STAYS;
    static constexpr int kOctets = OCTETS, kAtOnce = AT_ONCE, kPasses = PASSES;
    static constexpr int kStages = STAGES, kHalves = HALVES;
    static constexpr int kSlab = HALVES * kHalf;
    static constexpr int kPieceBytes = HALVES * kHalfBytes;  // of 8 rows of a slab
    static constexpr int kStageBytes = (2 * AT_ONCE + (kStays ? 0 : OCTETS)) * kPieceBytes;
    static constexpr int kRingBytes = kWarps * STAGES * kStageBytes;
    static constexpr int kSums = PASSES * AT_ONCE * OCTETS * kBlockSums;  // of a warp
    static constexpr unsigned kBytes = kRingBytes + kWarps * kSums * 4;  // and x_bytes, if it stays

    // Slabs of a warp, at most, and the bytes of x that stays: M rows of each slab.
    __device__ static int most_slabs(int K) { return (K / kSlab + kWarps - 1) / kWarps; }
    __device__ static unsigned x_bytes(int M, int K) {
        return kStays ? kWarps * most_slabs(K) * M * 2 * kSlab : 0;
    }
};

// Where a sum lies among those of a row block and octet: so that the 32 lanes of a warp, each with
// row g of token 2t, write to 32 banks.
__device__ __forceinline__ int place_of_sum(int row, int token) {
    return (token >> 1 | (token & 1) << 2) * kRows + (row ^ (token >> 2 & 1) * 8);
}

// The first `num` rows of a weight [., K].
struct FirstRows {
    const unsigned short* weight;
    int num;

    __device__ __forceinline__ int num_blocks() const { return (num + kRows - 1) / kRows; }
    __device__ __forceinline__ bool has(int i) const { return i < num; }

    // Row i, in the column of `from` in the first one.
    __device__ __forceinline__ const void* row(const unsigned short* from, int i,
                                               unsigned row_bytes) const {
        return offset_by(from, i, row_bytes);
    }
};

// `num` rows of a weight by a list of bytes in shared memory.
struct ListedRows {
    const unsigned short* weight;
    int num;
    unsigned list;

    __device__ __forceinline__ int num_blocks() const { return (num + kRows - 1) / kRows; }
    __device__ __forceinline__ bool has(int i) const { return i < num; }

    __device__ __forceinline__ const void* row(const unsigned short* from, int i,
                                               unsigned row_bytes) const {
        return offset_by(from, load_shared_byte(list + i), row_bytes);
    }
};

// x times `rows`, whose row blocks are 16 of them each. K a multiple of the slab.
template <class SIZES, class Rows>
class Product {
    static constexpr int kAtOnce = SIZES::kAtOnce, kPasses = SIZES::kPasses;
    static constexpr int kOctets = SIZES::kOctets;
    static constexpr int kStages = SIZES::kStages, kHalves = SIZES::kHalves;
    static constexpr int kChunks = 4 * kHalves;       // of 16 bytes, of a row
    static constexpr int kRowBytes = 16 * kChunks;
    static constexpr int kRowsAtOnce = 32 / kChunks;  // that a warp copies by one instruction
    static constexpr int kSlabStep = kWarps * SIZES::kSlab;  // from a warp's slab to its next

  public:
    // `memory`: of the stages and sums; `x_memory`: of x, if it stays.
    __device__ __forceinline__ Product(unsigned memory, unsigned x_memory, const unsigned short* x,
                                       int M, int K, const Rows& rows)
        : rows_(rows), M_(M), num_blocks_(rows.num_blocks()), row_bytes_(2 * K),
          sums_(memory + SIZES::kRingBytes) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
        num_slabs_ = (K / SIZES::kSlab - warp + kWarps - 1) / kWarps;
        copy_row_ = lane / kChunks;
        const int column = warp * SIZES::kSlab + lane % kChunks * 8;
        rows_.weight = opaque(rows.weight + column);
        x_ = opaque(x + column);
        // the halves of odd rows are exchanged
        const int swap_copy = kHalves == 2 ? copy_row_ % 2 * 4 : 0;
        const int swap_read = kHalves == 2 ? g % 2 * 64 : 0;
        const unsigned ring = memory + warp * (kStages * SIZES::kStageBytes);
        copy_to_ = ring + copy_row_ * kRowBytes + (lane % kChunks ^ swap_copy) * 16;
        read_from_ = ring + g * kRowBytes + (swap_read ^ lane % 4 * 16);
        if constexpr (SIZES::kStays) {
            to_x_ = x_memory + warp * SIZES::most_slabs(K) * M * kRowBytes - ring;
            // of tokens that there are not, the last one's row
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet)
                read_x_[octet] = to_x_ + (min(octet * kOctet + g, M - 1) - g) * kRowBytes;
        }
    }

    // Starts to bring the first weights.
    __device__ __forceinline__ void begin() {
        Step step = {0, 0, 0};
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage) {
            if (is_step(step)) bring_rows(step);
            advance(step);
        }
    }

    // Starts to bring x, if it stays. Nobody may write it any more.
    __device__ __forceinline__ void begin_x() {
        if constexpr (SIZES::kStays) {
#pragma unroll 1
            for (int slab = 0; slab < num_slabs_; ++slab)
                bring_x(slab, to_x_ + slab * M_ * kRowBytes);
        }
    }

    // All the rest. `finish(first, num)` is called by all threads when the sums of row blocks first
    // to first + num - 1 can be asked for.
    template <class Finish>
    __device__ __forceinline__ void run(const Finish& finish) {
        Step ahead = {0, 0, 0};
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage) {
            if (!SIZES::kStays && is_step(ahead)) bring_x(ahead.slab, x_of(ahead));
            commit_copies();
            advance(ahead);
        }
        int held = 0;
#pragma unroll 1
        for (int first = 0; first < num_blocks_; first += kAtOnce) {
            const int num = min(kAtOnce, num_blocks_ - first);
            float sums[kAtOnce][kOctets][4] = {};
#pragma unroll 1
            for (int i = 0; i < num_slabs_; ++i) {
                // the stage that comes next is the one that has waited longest
                wait_for_copies<kStages - 1>();
                __syncwarp();
                multiply(sums, ahead.stage, i, num);
                __syncwarp();
                if (is_step(ahead)) {
                    bring_rows(ahead);
                    if (!SIZES::kStays) bring_x(ahead.slab, x_of(ahead));
                }
                commit_copies();
                advance(ahead);
            }
            store(sums, held, num);
            held += num;
            if (held < kPasses * kAtOnce && first + num < num_blocks_) continue;
            __syncthreads();
            finish(first + num - held, held);
            __syncthreads();
            held = 0;
        }
    }

    // All of `num` row blocks' rows and tokens, dealt to the threads: use(block, row, token). A
    // half warp has the 16 rows of one token; tokens that there are not are among them.
    template <class Use>
    __device__ __forceinline__ static void for_each(int num, const Use& use) {
        constexpr int kTokens = kOctet * kOctets;
#pragma unroll 1
        for (int i = threadIdx.x / kRows; i < num * kTokens; i += kThreads / kRows)
            use(i / kTokens, threadIdx.x % kRows, i % kTokens);
    }

    // Of row block first + `block`: the sum over K.
    __device__ __forceinline__ float sum(int block, int row, int token) const {
        const unsigned at =
            sums_ + 4 * ((block * kOctets + token / kOctet) * kBlockSums +
                         place_of_sum(row, token % kOctet));
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp)
            sum += load_shared_float(at + warp * SIZES::kSums * 4);
        return sum;
    }

  private:
    // The warp's slab `slab` of the pass that begins with row block `first`; it goes to `stage`.
    struct Step {
        int first, slab, stage;
    };

    __device__ __forceinline__ bool is_step(const Step& step) const {
        return step.first < num_blocks_ && num_slabs_ > 0;
    }

    __device__ __forceinline__ void advance(Step& step) const {
        if (++step.slab >= num_slabs_) step.slab = 0, step.first += kAtOnce;
        if (++step.stage == kStages) step.stage = 0;
    }

    __device__ __forceinline__ void bring_rows(const Step& step) const {
        const unsigned to = copy_to_ + step.stage * SIZES::kStageBytes;
        const unsigned short* from = rows_.weight + step.slab * kSlabStep;
        const int first = step.first * kRows + copy_row_;
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce * 8; i += kRowsAtOnce)
            copy_async_if(rows_.has(first + i), to + i * kRowBytes,
                          rows_.row(from, first + i, row_bytes_));
    }

    // Where a stage has x, from the stages' first byte on.
    __device__ __forceinline__ unsigned x_of(const Step& step) const {
        return step.stage * SIZES::kStageBytes + 2 * kAtOnce * SIZES::kPieceBytes;
    }

    __device__ __forceinline__ void bring_x(int slab, unsigned place) const {
        const unsigned to = copy_to_ + place;
        const unsigned short* from = x_ + slab * kSlabStep;
#pragma unroll
        for (int i = 0; i < kOctets * kOctet; i += kRowsAtOnce)
            copy_async_if(copy_row_ + i < M_, to + i * kRowBytes,
                          offset_by(from, copy_row_ + i, row_bytes_));
    }

    // What was not brought is anything: it stays in the sums of rows and tokens that there are not.
    __device__ __forceinline__ void multiply(float (&sums)[kAtOnce][kOctets][4], int stage,
                                             int slab, int num) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const unsigned from = (read_from_ ^ half * 64) + stage * SIZES::kStageBytes;
            uint4 low[kAtOnce], high[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                low[i] = load_shared(from + 2 * i * SIZES::kPieceBytes);
                high[i] = load_shared(from + (2 * i + 1) * SIZES::kPieceBytes);
            }
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet) {
                const unsigned x_from =
                    SIZES::kStays
                        ? (read_from_ ^ half * 64) + read_x_[octet] + slab * M_ * kRowBytes
                        : from + (2 * kAtOnce + octet) * SIZES::kPieceBytes;
                const uint4 b = load_shared(x_from);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (i >= num) break;
                    float(&own)[4] = sums[i][octet];
                    multiply_add(own, low[i].x, high[i].x, low[i].y, high[i].y, b.x, b.y);
                    multiply_add(own, low[i].z, high[i].z, low[i].w, high[i].w, b.z, b.w);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const float (&sums)[kAtOnce][kOctets][4], int first,
                                          int num) const {
        const int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
        const unsigned to =
            sums_ + 4 * (threadIdx.x / 32 * SIZES::kSums + first * kOctets * kBlockSums);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= num) break;
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    store_shared_float(to + 4 * ((i * kOctets + octet) * kBlockSums +
                                           place_of_sum(row + j / 2 * 8, token + j % 2)),
                                 sums[i][octet][j]);
        }
    }

    Rows rows_;                // from the lane's column on
    const unsigned short* x_;  // the same
    int M_, num_blocks_, num_slabs_, copy_row_;
    unsigned row_bytes_, sums_, copy_to_, read_from_;
    unsigned to_x_, read_x_[kOctets];  // from the warp's first stage to its x; where a lane reads
};

// The row blocks [begin, end) of this block of threads, of `num` in all.
struct Share {
    int begin, end;

    __device__ __forceinline__ explicit Share(int num)
        : begin(num * blockIdx.x / gridDim.x), end(num * (blockIdx.x + 1) / gridDim.x) {}
};

}  // namespace few
