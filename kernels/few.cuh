// x [M, K] times rows of a weight, for so few tokens (1 to 64) that time goes by how fast the
// weights stream in: what few_linear, few_gated and few_hidden are built of.
//
// Weights are the a of the mma, in row blocks of 16; tokens are its b, in octets. The eight warps of
// a block cut K among them, slab by slab of 32 columns, and each takes all rows of the block: so x is
// read once a pass, and what a warp waits for is its own. A pass takes AT_ONCE row blocks; behind it
// the warps' sums are added up, in the order of warps.
//
// Nothing is exchanged between lanes. Lane 4 g + t copies 16 bytes (8 columns) of row g, and of row
// g + 8, and of token g of each octet, into its own 16 bytes of a stage, and reads them back as
// its registers of the mma: thread t of a quad has columns 8 t to 8 t + 7 of the slab, which are not
// the columns that the mma names, but a and b agree. The stages are but registers that can be
// filled behind the thread's back.
//
// The product may start before the kernel in front of it has ended (dependent.cuh): weights do not
// depend on it, x does.
#pragma once

#include "dependent.cuh"
#include "twell.cuh"

namespace few {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 16;    // of a row block
constexpr int kOctet = 8;    // tokens
constexpr int kSlab = 32;    // columns of K: 64 bytes of a row
constexpr int kPiece = 512;  // bytes of 8 rows of a slab, 16 a lane
constexpr int kBlockSums = kRows * kOctet;

// Bytes of shared memory: the stages of all warps, and their sums.
constexpr int ring_bytes(int octets, int at_once, int stages) {
    return kWarps * stages * (2 * at_once + octets) * kPiece;
}
constexpr int sums_bytes(int octets, int at_once) {
    return kWarps * at_once * octets * kBlockSums * 4;
}

// Where a sum lies among those of a row block and octet: so that the 32 lanes of a warp, each with
// row g of token 2t, write to 32 banks.
__device__ __forceinline__ int place_of_sum(int row, int token) {
    return (token >> 1 | (token & 1) << 2) * kRows + (row ^ (token >> 2 & 1) * 8);
}

// `rows(block, row)` gives the weight's row `row` of row block `block`, or null if there is none.
template <int OCTETS, int AT_ONCE, int STAGES, class Rows>
class Product {
  public:
    static constexpr int kStageBytes = (2 * AT_ONCE + OCTETS) * kPiece;  // of a warp
    static constexpr int kSums = AT_ONCE * OCTETS * kBlockSums;

    __device__ __forceinline__ Product(uint4* memory, const unsigned short* x, int M, int K,
                                       const Rows& rows, int num_blocks)
        : rows_(rows), sums_(reinterpret_cast<float*>(
                           reinterpret_cast<char*>(memory) + ring_bytes(OCTETS, AT_ONCE, STAGES))),
          M_(M), K_(K), num_blocks_(num_blocks) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        num_slabs_ = (K / kSlab - warp + kWarps - 1) / kWarps;
        first_column_ = warp * kSlab + lane % 4 * 8;
        x_ = x + static_cast<long long>(lane / 4) * K + first_column_;
        ring_ = reinterpret_cast<char*>(memory) + warp * STAGES * kStageBytes + lane * 16;
    }

    // Starts to bring the first weights.
    __device__ __forceinline__ void begin() {
        Step step = {0, 0};
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (is_step(step)) bring_rows(stage, step);
            advance(step);
        }
    }

    // All the rest. `finish(first, num)` is called by all threads when the sums of row blocks first
    // to first + num - 1 can be asked for.
    template <class Finish>
    __device__ __forceinline__ void run(const Finish& finish) {
        Step ahead = {0, 0};
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (is_step(ahead)) bring_x(stage, ahead);
            commit_copies();
            advance(ahead);
        }
        int stage = 0;
        for (int first = 0; first < num_blocks_; first += AT_ONCE) {
            const int num = min(AT_ONCE, num_blocks_ - first);
            float sums[AT_ONCE][OCTETS][4] = {};
            for (int i = 0; i < num_slabs_; ++i) {
                wait_for_copies<STAGES - 1>();
                multiply(sums, stage, num);
                if (is_step(ahead)) bring_rows(stage, ahead), bring_x(stage, ahead);
                commit_copies();
                advance(ahead);
                if (++stage == STAGES) stage = 0;
            }
            store(sums, num);
            __syncthreads();
            finish(first, num);
            __syncthreads();
        }
    }

    // Of row block first + `block`: the sum over K.
    __device__ __forceinline__ float sum(int block, int row, int token) const {
        const float* at =
            sums_ + (block * OCTETS + token / kOctet) * kBlockSums + place_of_sum(row, token % 8);
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += at[warp * kSums];
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
        if (++step.slab >= num_slabs_) step.slab = 0, step.first += AT_ONCE;
    }

    __device__ __forceinline__ char* piece(int stage, int i) const {
        return ring_ + stage * kStageBytes + i * kPiece;
    }

    __device__ __forceinline__ void bring_rows(int stage, const Step& step) const {
        const int column = first_column_ + step.slab * (kWarps * kSlab);
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; ++i) {
            const int block = step.first + i / 2;
            if (block >= num_blocks_) break;
            const unsigned short* row = rows_(block, i % 2 * 8 + threadIdx.x % 32 / 4);
            if (row) copy_async(smem_address(piece(stage, i)), row + column);
        }
    }

    __device__ __forceinline__ void bring_x(int stage, const Step& step) const {
        const unsigned short* from = x_ + step.slab * (kWarps * kSlab);
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            if (octet * kOctet + threadIdx.x % 32 / 4 < M_)
                copy_async(smem_address(piece(stage, 2 * AT_ONCE + octet)), from);
            from += static_cast<long long>(kOctet) * K_;
        }
    }

    // What was not brought is anything: it stays in the sums of rows and tokens that there are not.
    __device__ __forceinline__ void multiply(float (&sums)[AT_ONCE][OCTETS][4], int stage,
                                             int num) const {
        uint4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            low[i] = *reinterpret_cast<const uint4*>(piece(stage, 2 * i));
            high[i] = *reinterpret_cast<const uint4*>(piece(stage, 2 * i + 1));
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            const uint4 b = *reinterpret_cast<const uint4*>(piece(stage, 2 * AT_ONCE + octet));
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (i >= num) break;
                float(&own)[4] = sums[i][octet];
                multiply_add(own, low[i].x, high[i].x, low[i].y, high[i].y, b.x, b.y);
                multiply_add(own, low[i].z, high[i].z, low[i].w, high[i].w, b.z, b.w);
            }
        }
    }

    __device__ __forceinline__ void store(const float (&sums)[AT_ONCE][OCTETS][4], int num) const {
        const int row = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
        float* to = sums_ + threadIdx.x / 32 * kSums;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (i >= num) break;
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    to[place_of_sum(row + j / 2 * 8, token + j % 2)] = sums[i][octet][j];
                to += kBlockSums;
            }
        }
    }

    Rows rows_;
    float* sums_;
    const unsigned short* x_;  // the lane's
    char* ring_;               // the lane's
    int M_, K_, num_blocks_, num_slabs_, first_column_;
};

// Consecutive rows of a weight [N, K].
struct WeightRows {
    const unsigned short* weight;
    int first, N, K;

    __device__ __forceinline__ const unsigned short* operator()(int block, int row) const {
        const int n = first + block * kRows + row;
        return n < N ? weight + static_cast<long long>(n) * K : nullptr;
    }
};

// The row blocks [begin, end) of this block of threads, of `num` in all.
struct Share {
    int begin, end;

    __device__ __forceinline__ explicit Share(int num)
        : begin(static_cast<int>(static_cast<long long>(num) * blockIdx.x / gridDim.x)),
          end(static_cast<int>(static_cast<long long>(num) * (blockIdx.x + 1) / gridDim.x)) {}
};

__device__ __forceinline__ float rounded(float value) { return bf16_value(bf16_bits(value)); }

}  // namespace few
