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
// reads 16 bytes of row g: thread t of a quad has columns 8 t to 8 t + 7 of a half (16 t to 16 t +
// 15 of weights of 8 bits), which are not those that the mma names, but a and b agree. The halves
// of odd rows are exchanged: so the lanes of two neighbouring rows read from all banks. Rows of x
// are longer than those of weights of fewer bits than 16, and of odd ones each two neighbouring 16
// bytes are exchanged instead.
//
// Such weights become bf16 in registers, exactly (tile/weights.cuh); scales of rows are for whoever
// takes the sums. e4m3 takes five instructions for two weights. f16 would take one, but has too
// little range for x. So of one octet that stays each warp makes its part of each row f16, times a
// power of two (tile/halves.cuh). The sums get the power back.
//
// The product may start before the kernel in front of it has ended (ptx/pdl.cuh): weights do not
// depend on it, x does.
#pragma once

#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/few_sizes.cuh"
#include "tile/halves.cuh"
#include "tile/weights.cuh"

// A bf16 value that the previous kernel wrote.
__device__ __forceinline__ float written_value(const unsigned short* from) {
    return bf16_value(load_written_half(from));
}

namespace few {

// x times `rows`, whose row blocks are 16 of them each. K a multiple of the slab.
template <class SIZES, class Rows>
class Product {
    static constexpr int kAtOnce = SIZES::kAtOnce, kPasses = SIZES::kPasses;
    static constexpr int kOctets = SIZES::kOctets;
    static constexpr int kStages = SIZES::kStages, kHalves = SIZES::kHalves;
    static constexpr int kChunks = 4 * kHalves;  // of 16 bytes, of a row
    static constexpr int kRowBytes = 16 * kChunks;
    static constexpr int kRowsAtOnce = 32 / kChunks;  // that a warp copies by one instruction
    static constexpr int kXChunks = SIZES::kWider * kChunks, kXRowBytes = 16 * kXChunks;
    static constexpr int kXRowsAtOnce = 32 / kXChunks;
    using Weight = typename SIZES::Weight;
    static constexpr int kSlabStep = kWarps * SIZES::kSlab;  // from a warp's slab to its next

  public:
    // `memory`: of the stages and sums; `x_memory`: of x, if it stays.
    __device__ __forceinline__ Product(unsigned memory, unsigned x_memory, const unsigned short* x,
                                       int M, int K, const Rows& rows)
        : rows_(rows), M_(M), num_blocks_(rows.num_blocks()), row_bytes_(Weight::bytes(K)),
          sums_(memory + SIZES::kRingBytes) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
        num_slabs_ = (K / SIZES::kSlab - warp + kWarps - 1) / kWarps;
        copy_row_ = lane / kChunks;
        x_row_ = lane / kXChunks;
        rows_.weight =
            opaque(Weight::at(rows.weight, warp * SIZES::kSlab + lane % kChunks * Weight::kEach));
        x_ = opaque(x + warp * SIZES::kSlab + lane % kXChunks * 8);
        // the halves of odd rows are exchanged
        const int swap_copy = kHalves == 2 ? copy_row_ % 2 * 4 : 0;
        const int swap_read = kHalves == 2 ? g % 2 * 64 : 0;
        const unsigned ring = memory + warp * (kStages * SIZES::kStageBytes);
        copy_to_ = ring + copy_row_ * kRowBytes + (lane % kChunks ^ swap_copy) * 16;
        read_from_ = ring + g * kRowBytes + (swap_read ^ lane % 4 * 16);
        x_to_ = copy_to_, x_from_ = read_from_;
        if constexpr (SIZES::kWider > 1) {
            x_to_ = ring + x_row_ * kXRowBytes + (lane % kXChunks ^ x_row_ % 2) * 16;
            x_from_ = ring + g * kXRowBytes + (lane % 4 * SIZES::kWider ^ g % 2) * 16;
        }
        if constexpr (SIZES::kStays) {
            const unsigned bytes = SIZES::most_slabs(K) * M * kXRowBytes + SIZES::kPowerBytes;
            to_x_ = x_memory + warp * bytes - ring;
            own_x_ = ring + to_x_;
            powers_ = own_x_ + bytes - SIZES::kPowerBytes;
            // of tokens that there are not, the last one's row
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet)
                read_x_[octet] = to_x_ + (min(octet * kOctet + g, M - 1) - g) * kXRowBytes;
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
                bring_x(slab, to_x_ + slab * M_ * kXRowBytes);
        }
    }

    // Behind begin_x, once: makes the warp's part of x what `multiply` reads.
    __device__ __forceinline__ void settle_x() const {
        if constexpr (SIZES::kInF16) {
            commit_copies();
            wait_for_copies<0>();
            __syncwarp();
            const int lane = threadIdx.x % 32;
#pragma unroll 1
            for (int row = lane / kXChunks; row - lane / kXChunks < M_; row += kXRowsAtOnce)
                settle_row(row, own_x_ + row * kXRowBytes + lane % kXChunks * 16);
            __syncwarp();
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
        const unsigned at = sums_ + 4 * ((block * kOctets + token / kOctet) * kBlockSums +
                                         place_of_sum(row, token % kOctet));
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp)
            sum += load_shared_float(at + warp * SIZES::kSums * 4);
        return sum;
    }

  private:
    // A row of the warp's x as f16, in all of its slabs, by kXChunks lanes; `first`: what the lane
    // has of the first slab. Rows that there are not are left alone.
    __device__ __forceinline__ void settle_row(int row, unsigned first) const {
        const bool is_there = row < M_;
        const unsigned step = M_ * kXRowBytes;
        unsigned most = 0;  // of the bits without the sign, in both halves
#pragma unroll 1
        for (int slab = 0; is_there && slab < num_slabs_; ++slab) {
            const uint4 v = load_shared(first + slab * step);
            most = most_of(v, most);
        }
        most = max(most & 0xffff, most >> 16);
#pragma unroll
        for (int i = kXChunks / 2; i > 0; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
        const unsigned power = power_for_f16(most), pair = power << 7 | power << 23;
#pragma unroll 1
        for (int slab = 0; is_there && slab < num_slabs_; ++slab) {
            const uint4 v = load_shared(first + slab * step);
            store_shared(first + slab * step,
                         make_uint4(scaled_f16(v.x, pair), scaled_f16(v.y, pair),
                                    scaled_f16(v.z, pair), scaled_f16(v.w, pair)));
        }
        if (is_there && threadIdx.x % kXChunks == 0)
            store_shared_float(powers_ + 4 * row, power_back(power));
    }

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
        const typename Weight::Memory* from = rows_.weight + step.slab * kSlabStep;
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
        const unsigned to = x_to_ + place;
        const unsigned short* from = x_ + slab * kSlabStep;
#pragma unroll
        for (int i = 0; i < kOctets * kOctet; i += kXRowsAtOnce)
            copy_async_if(x_row_ + i < M_, to + i * kXRowBytes,
                          offset_by(from, x_row_ + i, SIZES::kWider * row_bytes_));
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
            // 8 of a lane's columns at a time
#pragma unroll
            for (int part = 0; part < Weight::kEights; ++part) {
                uint4 lower[kAtOnce], upper[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    lower[i] = operands_of<Weight, SIZES::kInF16>(low[i], part);
                    upper[i] = operands_of<Weight, SIZES::kInF16>(high[i], part);
                }
                multiply_octets(sums, lower, upper, stage, slab, half, part, num);
            }
        }
    }

    __device__ __forceinline__ void multiply_octets(float (&sums)[kAtOnce][kOctets][4],
                                                    const uint4 (&low)[kAtOnce],
                                                    const uint4 (&high)[kAtOnce], int stage,
                                                    int slab, int half, int part, int num) const {
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
            const uint4 b = load_shared(x_at(octet, stage, slab, half, part));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (i >= num) break;
                float (&own)[4] = sums[i][octet];
                multiply_add_either<SIZES::kInF16>(own, low[i].x, high[i].x, low[i].y, high[i].y,
                                                   b.x, b.y);
                multiply_add_either<SIZES::kInF16>(own, low[i].z, high[i].z, low[i].w, high[i].w,
                                                   b.z, b.w);
            }
        }
    }

    // Where the lane reads 8 columns of x.
    __device__ __forceinline__ unsigned x_at(int octet, int stage, int slab, int half,
                                             int part) const {
        const unsigned from = SIZES::kWider > 1
                                  ? (x_from_ ^ part * 16) + half * (64 * SIZES::kWider)
                                  : read_from_ ^ half * 64;
        return SIZES::kStays ? from + read_x_[octet] + slab * M_ * kXRowBytes
                             : from + stage * SIZES::kStageBytes +
                                   2 * kAtOnce * SIZES::kPieceBytes + octet * SIZES::kXPieceBytes;
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
                for (int j = 0; j < 4; ++j) {
                    float sum = sums[i][octet][j];
                    if constexpr (SIZES::kInF16)
                        sum *= load_shared_float(powers_ + 4 * (octet * kOctet + token + j % 2));
                    store_shared_float(to + 4 * ((i * kOctets + octet) * kBlockSums +
                                                 place_of_sum(row + j / 2 * 8, token + j % 2)),
                                       sum);
                }
        }
    }

    Rows rows_;                // from the lane's column on
    const unsigned short* x_;  // the same
    int M_, num_blocks_, num_slabs_, copy_row_, x_row_;
    unsigned row_bytes_, sums_, copy_to_, read_from_, x_to_, x_from_;
    unsigned to_x_, read_x_[kOctets];  // from the warp's first stage to its x; where a lane reads
    unsigned own_x_, powers_;  // of the warp: addresses of its x, and of its rows' powers of two
};

}  // namespace few
