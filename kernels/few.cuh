// x [M, K] times rows of a weight, for so few tokens (1 to 64) that time goes by how fast the
// weights stream in: what few_linear, few_gated and few_hidden are built of.
//
// Weights are the a of the mma, in row blocks of 16; tokens are its b, in octets. The eight warps of
// a block cut K among them, slab by slab of 32 columns, and each takes all rows of the block: so x is
// read once a pass, and what a warp waits for is its own. A pass takes AT_ONCE row blocks; behind some
// passes the warps' sums are added up, in the order of warps. Loops are left as loops: a kernel runs
// for so short a time that its code, read for the first time, counts like weights.
//
// A row of a slab is 64 HALVES bytes in a stage, and as many that are asked of L2 at once: 128 are
// worth it, for L2 takes so many requests a clock, whatever their size. Lane 4 g + t of the mma reads
// 16 bytes (8 columns) of row g: thread t of a quad has columns 8 t to 8 t + 7 of a half, which are not
// those that the mma names, but a and b agree. The halves of odd rows are exchanged: so the lanes of
// two neighbouring rows read from all banks.
//
// The product may start before the kernel in front of it has ended (dependent.cuh): weights do not
// depend on it, x does.
#pragma once

#include "dependent.cuh"
#include "twell.cuh"

namespace few {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 16;         // of a row block
constexpr int kOctet = 8;         // tokens
constexpr int kHalf = 32;         // columns of K in half a slab
constexpr int kHalfBytes = 512;   // of 8 rows of it
constexpr int kBlockSums = kRows * kOctet;

// What a kernel is built for: octets of tokens, row blocks in a pass, passes between two times that
// the warps' sums are added up, stages of a warp, halves of a slab.
template <int OCTETS, int AT_ONCE, int PASSES, int STAGES, int HALVES>
struct Sizes {
    static constexpr int kOctets = OCTETS, kAtOnce = AT_ONCE, kPasses = PASSES;
    static constexpr int kStages = STAGES, kHalves = HALVES;
    static constexpr int kSlab = HALVES * kHalf;
    static constexpr int kPieceBytes = HALVES * kHalfBytes;  // of 8 rows of a slab
    static constexpr int kStageBytes = (2 * AT_ONCE + OCTETS) * kPieceBytes;
    static constexpr int kRingBytes = kWarps * STAGES * kStageBytes;
    static constexpr int kSums = PASSES * AT_ONCE * OCTETS * kBlockSums;  // of a warp
    static constexpr unsigned kBytes = kRingBytes + kWarps * kSums * 4;
};

// Where a sum lies among those of a row block and octet: so that the 32 lanes of a warp, each with
// row g of token 2t, write to 32 banks.
__device__ __forceinline__ int place_of_sum(int row, int token) {
    return (token >> 1 | (token & 1) << 2) * kRows + (row ^ (token >> 2 & 1) * 8);
}

// `rows(block, row)` gives the weight's row `row` of row block `block`, or null if there is none.
template <class SIZES, class Rows>
class Product {
    static constexpr int kAtOnce = SIZES::kAtOnce, kPasses = SIZES::kPasses;
    static constexpr int kOctets = SIZES::kOctets;
    static constexpr int kStages = SIZES::kStages, kHalves = SIZES::kHalves;
    static constexpr int kChunks = 4 * kHalves;         // of 16 bytes, of a row
    static constexpr int kRowsAtOnce = 32 / kChunks;    // that a warp copies by one instruction
    static constexpr int kSlabStep = kWarps * SIZES::kSlab;  // from a warp's slab to its next

  public:
    __device__ __forceinline__ Product(uint4* memory, const unsigned short* x, int M, int K,
                                       const Rows& rows, int num_blocks)
        : rows_(rows), memory_(reinterpret_cast<char*>(memory)), x_(x), M_(M), K_(K),
          num_blocks_(num_blocks) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        num_slabs_ = (K / SIZES::kSlab - warp + kWarps - 1) / kWarps;
        copy_row_ = lane / kChunks;
        column_ = warp * SIZES::kSlab + lane % kChunks * 8;
        const int g = lane / 4, swapped = kHalves == 2 ? g % 2 * 64 : 0;
        read_at_ = warp * kStages * SIZES::kStageBytes + g * 16 * kChunks + swapped + lane % 4 * 16;
    }

    // Starts to bring the first weights.
    __device__ __forceinline__ void begin() {
        Step step = {0, 0};
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage) {
            if (is_step(step)) bring_rows(stage, step);
            advance(step);
        }
    }

    // All the rest. `finish(first, num)` is called by all threads when the sums of row blocks first
    // to first + num - 1 can be asked for.
    template <class Finish>
    __device__ __forceinline__ void run(const Finish& finish) {
        Step ahead = {0, 0};
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage) {
            if (is_step(ahead)) bring_x(stage, ahead);
            commit_copies();
            advance(ahead);
        }
        int stage = 0, held = 0;
#pragma unroll 1
        for (int first = 0; first < num_blocks_; first += kAtOnce) {
            const int num = min(kAtOnce, num_blocks_ - first);
            float sums[kAtOnce][kOctets][4] = {};
#pragma unroll 1
            for (int i = 0; i < num_slabs_; ++i) {
                wait_for_copies<kStages - 1>();
                __syncwarp();
                multiply(sums, stage, num);
                __syncwarp();
                if (is_step(ahead)) bring_rows(stage, ahead), bring_x(stage, ahead);
                commit_copies();
                advance(ahead);
                if (++stage == kStages) stage = 0;
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

    // All of `num` row blocks' rows and tokens, dealt to the threads: use(block, row, token). A half
    // warp has the 16 rows of one token; tokens that there are not are among them.
    template <class Use>
    __device__ __forceinline__ static void for_each(int num, const Use& use) {
        constexpr int kTokens = kOctet * kOctets;
#pragma unroll 1
        for (int i = threadIdx.x / kRows; i < num * kTokens; i += kThreads / kRows)
            use(i / kTokens, threadIdx.x % kRows, i % kTokens);
    }

    // Of row block first + `block`: the sum over K.
    __device__ __forceinline__ float sum(int block, int row, int token) const {
        const float* at = all_sums() + (block * kOctets + token / kOctet) * kBlockSums +
                          place_of_sum(row, token % kOctet);
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += at[warp * SIZES::kSums];
        return sum;
    }

  private:
    // The warp's slab `slab` of the pass that begins with row block `first`.
    struct Step {
        int first, slab;
    };

    __device__ __forceinline__ bool is_step(const Step& step) const {
        return step.first < num_blocks_ && num_slabs_ > 0;
    }

    __device__ __forceinline__ void advance(Step& step) const {
        if (++step.slab >= num_slabs_) step.slab = 0, step.first += kAtOnce;
    }

    __device__ __forceinline__ float* all_sums() const {
        return reinterpret_cast<float*>(memory_ + SIZES::kRingBytes);
    }

    // Into piece i of a stage: 16 bytes of its row `row`, if there are any.
    __device__ __forceinline__ void bring(int stage, int i, int row, const unsigned short* from) const {
        const int chunk = threadIdx.x % kChunks ^ (kHalves == 2 ? row % 2 * 4 : 0);
        char* to = memory_ + (threadIdx.x / 32 * kStages + stage) * SIZES::kStageBytes +
                   i * SIZES::kPieceBytes + (row * kChunks + chunk) * 16;
        if (from) copy_async(smem_address(to), from + column_);
    }

    __device__ __forceinline__ void bring_rows(int stage, const Step& step) const {
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
            const int block = step.first + i / 2;
            if (block >= num_blocks_) break;
#pragma unroll
            for (int row = copy_row_; row < 8; row += kRowsAtOnce) {
                const unsigned short* from = rows_(block, i % 2 * 8 + row);
                bring(stage, i, row, from ? from + step.slab * kSlabStep : nullptr);
            }
        }
    }

    __device__ __forceinline__ void bring_x(int stage, const Step& step) const {
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
            for (int row = copy_row_; row < 8; row += kRowsAtOnce) {
                const int token = octet * kOctet + row;
                const unsigned short* from = x_ + static_cast<long long>(token) * K_;
                bring(stage, 2 * kAtOnce + octet, row,
                      token < M_ ? from + step.slab * kSlabStep : nullptr);
            }
        }
    }

    // What was not brought is anything: it stays in the sums of rows and tokens that there are not.
    __device__ __forceinline__ void multiply(float (&sums)[kAtOnce][kOctets][4], int stage,
                                             int num) const {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const char* from = memory_ + stage * SIZES::kStageBytes + (read_at_ ^ half * 64);
            uint4 low[kAtOnce], high[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                low[i] = read(from, 2 * i);
                high[i] = read(from, 2 * i + 1);
            }
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet) {
                const uint4 b = read(from, 2 * kAtOnce + octet);
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

    __device__ __forceinline__ static uint4 read(const char* from, int piece) {
        return *reinterpret_cast<const uint4*>(from + piece * SIZES::kPieceBytes);
    }

    __device__ __forceinline__ void store(const float (&sums)[kAtOnce][kOctets][4], int first,
                                          int num) const {
        const int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
        float* to = all_sums() + threadIdx.x / 32 * SIZES::kSums + first * kOctets * kBlockSums;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i >= num) break;
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    to[place_of_sum(row + j / 2 * 8, token + j % 2)] = sums[i][octet][j];
                to += kBlockSums;
            }
        }
    }

    Rows rows_;
    char* memory_;
    const unsigned short* x_;
    int M_, K_, num_blocks_, num_slabs_;
    int copy_row_, column_;  // what the lane copies
    int read_at_;            // what it reads
};

// `num` rows of a weight [., K]: the first ones, or those of a list.
struct Rows {
    const unsigned short* weight;
    const unsigned char* list;
    int num, K;

    __device__ __forceinline__ const unsigned short* operator()(int block, int row) const {
        const int i = block * kRows + row;
        if (i >= num) return nullptr;
        return weight + static_cast<long long>(list ? list[i] : i) * K;
    }
};

// The row blocks [begin, end) of this block of threads, of `num` in all.
struct Share {
    int begin, end;

    __device__ __forceinline__ explicit Share(int num)
        : begin(num * blockIdx.x / gridDim.x), end(num * (blockIdx.x + 1) / gridDim.x) {}
};

__device__ __forceinline__ float rounded(float value) { return bf16_value(bf16_bits(value)); }

}  // namespace few
