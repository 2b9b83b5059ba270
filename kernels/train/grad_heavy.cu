// grad_heavy: the backward pass of the heavy rows (plan.cu), densely. How many there are the device
// alone knows: with none, the kernel ends at once.
//
// A persistent kernel goes through windows of the list of heavy rows, each in two steps:
//
//   1  gate, up and grad_h of the window's rows, from them gate's and up's gradients and h:
//      of 128 rows and 64 neurons a block, [window, N] bf16 each
//   2  what is wanted of  sums += gradients^T x, gradients^T x, h^T grad_y   float32 [N, K] each,
//      the first window without what was there; and grad_x of the rows, by grad_gate W_gate +
//      grad_up W_up.
//
// A block takes units of work, tiles of either step, in their order. A unit of step 2 waits for all
// of step 1, one of step 1 for all of the window before: always for units that were taken earlier,
// by blocks that run. So no block waits for one that does not, however few run at a time.
//
// Gate and up are multiplied once more than the forward pass did, so that nothing dense is kept; in
// another order, so that a gate within a rounding of 0 may fire in one of them alone.
// All products go over one loop: tiles of 128 x 128, 64 of the inner dimension at a time, three
// stages by cp.async, warps of 64 x 32 by mma.sync. An operand lies along (what is summed over is
// contiguous) or across; rows of x and grad_y are found through the list.
//
// Launch: any grid of blocks of 256 threads, 98304 bytes of dynamic shared memory. K a multiple of
// 64, N of 8. units: how many were taken, and how many are done, 0 before. Both of sums_gate and
// sums_up are null or neither is.
//
// order_heavy puts the list of heavy rows in ascending order: `plan` leaves it in one of time, and
// sums over its rows shall not depend on that. Launch: one block of 256 threads, 4 * (256 +
// ceil(M / 32)) bytes of dynamic shared memory.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/copies.cuh"
#include "ptx/handover.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"

namespace {

constexpr int kThreads = spec::GRAD_HEAVY_BLOCK;
constexpr int kTile = 128, kInner = 64, kHalf = 64;
constexpr int kOperandBytes = kTile * kInner * 2, kStageBytes = 2 * kOperandBytes, kStages = 3;
static_assert(kStages * kStageBytes == spec::GRAD_HEAVY_SMEM);

// Until so many units are done; `seen`: how many were, when the block last looked.
__device__ __forceinline__ void wait_for_units(const unsigned* done, int needed, int& seen) {
    if (seen >= needed) return;
    if (threadIdx.x == 0)
        while (load_acquire(done) < static_cast<unsigned>(needed)) {
        }
    __syncthreads();
    seen = needed;
}

// What the block wrote is there for those who wait.
__device__ __forceinline__ void end_unit(unsigned* done) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_release(done);
}

// A matrix [num_rows, num_columns] in memory, zeros around it.
struct Matrix {
    const unsigned short* at;
    int num_rows, num_columns;
    const int* rows;             // row i lies in the place of rows[i]; or null
    const unsigned short* half;  // of a tile's rows from 64 on those of this matrix, counted from
                                 // the tile's first; or null
};

// Starts to bring a box of ROWS rows and 64 or 128 columns; chunks of 16 bytes swizzled by rows.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void bring_box(unsigned to, const Matrix& from, int row, int column) {
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += kThreads) {
        const int r = i / CHUNKS, chunk = i % CHUNKS;
        const bool second = from.half && r >= kHalf;
        const int own_row = row + r - (second ? kHalf : 0), own_column = column + 8 * chunk;
        const bool inside = own_row < from.num_rows && own_column < from.num_columns;
        long long at = 0;
        if (inside) {
            const int line = from.rows ? from.rows[own_row] : own_row;
            at = static_cast<long long>(line) * from.num_columns + own_column;
        }
        copy_async_or_zero(inside, to + r * CHUNKS * 16 + ((chunk ^ (r & 7)) << 4),
                           (second ? from.half : from.at) + at);
    }
}

// An operand's tile of 128 x 64: ACROSS, the inner dimension goes down.
template <bool ACROSS>
__device__ __forceinline__ void bring_operand(unsigned to, const Matrix& from, int first,
                                              int inner) {
    if constexpr (ACROSS)
        bring_box<kInner, kTile>(to, from, inner, first);
    else
        bring_box<kTile, kInner>(to, from, first, inner);
}

// Where a lane's row of 16 bytes lies: `along` is the row of the tile (or column of the box, if it
// lies across), `inner` a multiple of 8.
template <bool ACROSS>
__device__ __forceinline__ unsigned chunk_at(unsigned tile, int along, int inner) {
    const int row = ACROSS ? inner : along, chunk = (ACROSS ? along : inner) / 8;
    return tile + row * (ACROSS ? 256 : 128) + ((chunk ^ (row & 7)) << 4);
}

template <bool ACROSS>
__device__ __forceinline__ void read_fragments(unsigned (&m)[4], unsigned row) {
    if constexpr (ACROSS)
        read_transposed(m, row);
    else
        read_matrices(m, row);
}

// A warp's place in a tile: 64 rows, and of the columns PAIRS times 16, `step` apart.
struct Part {
    int row, column, step;
};

// sums[64, PAIRS * 16] += a [64, 64] b [.., 64]^T of a stage.
template <bool A_ACROSS, bool B_ACROSS, int PAIRS>
__device__ __forceinline__ void multiply_stage(float (&sums)[4][2 * PAIRS][4], unsigned stage,
                                               const Part& part) {
    const int lane = threadIdx.x % 32, low = lane & 7, bit3 = lane >> 3 & 1, bit4 = lane >> 4;
#pragma unroll
    for (int inner = 0; inner < kInner; inner += 16) {
        unsigned b[PAIRS][4];
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const int column = part.column + pair * part.step;
            // matrices: inner 0-7, inner 8-15 of 8 columns, then of the next 8
            const unsigned at =
                B_ACROSS ? chunk_at<true>(stage + kOperandBytes, column + 8 * bit4,
                                          inner + low + 8 * bit3)
                         : chunk_at<false>(stage + kOperandBytes, column + low + 8 * bit4,
                                           inner + 8 * bit3);
            read_fragments<B_ACROSS>(b[pair], at);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = part.row + 16 * i;
            unsigned a[4];
            // matrices: rows 0-7, rows 8-15, then the same of inner 8-15
            const unsigned at =
                A_ACROSS ? chunk_at<true>(stage, row + 8 * bit3, inner + low + 8 * bit4)
                         : chunk_at<false>(stage, row + low + 8 * bit3, inner + 8 * bit4);
            read_fragments<A_ACROSS>(a, at);
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
                for (int eight = 0; eight < 2; ++eight)
                    multiply_add(sums[i][2 * pair + eight], a[0], a[1], a[2], a[3],
                                 b[pair][2 * eight], b[pair][2 * eight + 1]);
        }
    }
}

// sums += a's rows from `row` on times b's from `column` on, over `inner_size`.
template <bool A_ACROSS, bool B_ACROSS, int PAIRS>
__device__ __forceinline__ void multiply(float (&sums)[4][2 * PAIRS][4], unsigned stages,
                                         const Matrix& a, int row, const Matrix& b, int column,
                                         int inner_size, const Part& part) {
    const int num_blocks = (inner_size + kInner - 1) / kInner;
    const auto bring = [&](int block) {
        if (block < num_blocks) {
            const unsigned stage = stages + block % kStages * kStageBytes;
            bring_operand<A_ACROSS>(stage, a, row, block * kInner);
            bring_operand<B_ACROSS>(stage + kOperandBytes, b, column, block * kInner);
        }
        commit_copies();
    };
    bring(0);
    bring(1);
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
        wait_for_copies<1>();
        __syncthreads();
        bring(block + 2);
        multiply_stage<A_ACROSS, B_ACROSS, PAIRS>(sums, stages + block % kStages * kStageBytes,
                                                  part);
    }
    wait_for_copies<0>();
    __syncthreads();
}

// What a launch works on.
struct Job {
    const unsigned short *x, *grad_y, *w_gate, *w_up, *w_down;
    float penalty;
    const int* heavy_rows;
    int N, K;
    unsigned short *grad_gate, *grad_up, *hidden;  // of a window
};

// x or grad_y of the rows of a window.
__device__ __forceinline__ Matrix rows_of(const Job& job, const unsigned short* at, int start,
                                          int num) {
    return {at, num, job.K, job.heavy_rows + start, nullptr};
}

// Gradients of a pair of neighbouring neurons, and their h; bf16 pairs.
struct PairGrads {
    unsigned gate, up, hidden;

    __device__ __forceinline__ PairGrads(float penalty, const float* gates, const float* ups,
                                         const float* grads) {
        float of_gate[2], of_up[2], h[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float gate = rounded(gates[i]);
            const float up_value = rounded(ups[i]);
            const bool fired = fires(gate);
            const float kept = fired ? gate : 0.f;
            h[i] = rounded(kept * up_value);
            const float sign = h[i] > 0.f ? penalty : h[i] < 0.f ? -penalty : 0.f;
            const float grad = rounded(grads[i] + sign);
            of_gate[i] = fired ? grad * up_value : 0.f;
            of_up[i] = grad * kept;
        }
        gate = bf16_pair(of_gate[0], of_gate[1]), up = bf16_pair(of_up[0], of_up[1]);
        hidden = bf16_pair(h[0], h[1]);
    }
};

// Step 1: a tile of 128 rows and 64 neurons.
__device__ __forceinline__ void pair_tile(const Job& job, unsigned stages, int start, int num_rows,
                                          int row, int column) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Part part{warp / 4 * 64, warp % 4 * 16, kHalf};
    float both[4][4][4] = {}, grads[4][2][4] = {};
    const Matrix gate_up{job.w_gate, job.N, job.K, nullptr, job.w_up};
    multiply<false, false, 2>(both, stages, rows_of(job, job.x, start, num_rows), row, gate_up,
                              column, job.K, part);
    const Matrix down{job.w_down, job.N, job.K, nullptr, nullptr};
    multiply<false, false, 1>(grads, stages, rows_of(job, job.grad_y, start, num_rows), row, down,
                              column, job.K, part);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int eight = 0; eight < 2; ++eight)
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int own_row = row + part.row + 16 * i + 8 * lower + lane / 4;
                const int own_column = column + part.column + 8 * eight + lane % 4 * 2;
                if (own_row >= num_rows || own_column >= job.N) continue;
                const PairGrads found(job.penalty, both[i][eight] + 2 * lower,
                                      both[i][2 + eight] + 2 * lower, grads[i][eight] + 2 * lower);
                const long long at = static_cast<long long>(own_row) * job.N + own_column;
                *reinterpret_cast<unsigned*>(job.grad_gate + at) = found.gate;
                *reinterpret_cast<unsigned*>(job.grad_up + at) = found.up;
                *reinterpret_cast<unsigned*>(job.hidden + at) = found.hidden;
            }
}

// Step 2 of a weight: a tile of `sums` [N, K] over the window's rows.
__device__ __forceinline__ void weight_tile(const Job& job, unsigned stages,
                                            const unsigned short* values,
                                            const unsigned short* others, int start, int num_rows,
                                            int row, int column, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Part part{warp / 4 * 64, warp % 4 * 32, 16};
    float found[4][4][4] = {};
    const Matrix a{values, num_rows, job.N, nullptr, nullptr};
    multiply<true, true, 2>(found, stages, a, row, rows_of(job, others, start, num_rows), column,
                            num_rows, part);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int own_row = row + part.row + 16 * i + 8 * lower + lane / 4;
                const int own_column = column + part.column + 8 * j + lane % 4 * 2;
                if (own_row >= job.N || own_column >= job.K) continue;
                float2* at = reinterpret_cast<float2*>(
                    sums + static_cast<long long>(own_row) * job.K + own_column);
                float2 sum = make_float2(found[i][j][2 * lower], found[i][j][2 * lower + 1]);
                if (start > 0) {
                    const float2 before = *at;
                    sum.x += before.x, sum.y += before.y;
                }
                *at = sum;
            }
}

// Step 2 of grad_x: a tile of it.
__device__ __forceinline__ void x_tile(const Job& job, unsigned stages, int start, int num_rows,
                                       int row, int column, unsigned short* grad_x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Part part{warp / 4 * 64, warp % 4 * 32, 16};
    float found[4][4][4] = {};
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const Matrix a{i == 0 ? job.grad_gate : job.grad_up, num_rows, job.N, nullptr, nullptr};
        const Matrix b{i == 0 ? job.w_gate : job.w_up, job.N, job.K, nullptr, nullptr};
        multiply<false, true, 2>(found, stages, a, row, b, column, job.N, part);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const int own_row = row + part.row + 16 * i + 8 * lower + lane / 4;
            if (own_row >= num_rows) continue;
            const long long line = job.heavy_rows[start + own_row];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int own_column = column + part.column + 8 * j + lane % 4 * 2;
                if (own_column < job.K)
                    *reinterpret_cast<unsigned*>(grad_x + line * job.K + own_column) =
                        bf16_pair(found[i][j][2 * lower], found[i][j][2 * lower + 1]);
            }
        }
}

// For one block; by a map of bits.
__device__ __forceinline__ void order_rows(int* rows, int count, unsigned* sums, int num_rows) {
    unsigned* bits = sums + kThreads;
    const int num_words = (num_rows + 31) / 32;
    for (int i = threadIdx.x; i < num_words; i += kThreads) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads)
        atomicOr(bits + rows[i] / 32, 1u << rows[i] % 32);
    __syncthreads();
    const int share = (num_words + kThreads - 1) / kThreads;
    const int first = threadIdx.x * share, end = min(first + share, num_words);
    unsigned own = 0;
    for (int i = first; i < end; ++i) own += __popc(bits[i]);
    sums[threadIdx.x] = own;
    __syncthreads();
    int at = 0;
    for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) at += sums[i];
    for (int i = first; i < end; ++i)
        for (unsigned left = bits[i]; left; left &= left - 1)
            rows[at++] = 32 * i + __ffs(left) - 1;
}

__device__ __forceinline__ int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_heavy(const unsigned short* x, const unsigned short* grad_y, const unsigned short* w_gate,
               const unsigned short* w_up, const unsigned short* w_down, const float* penalty_at,
               const int* heavy_rows, const int* heavy_count, int window, int N, int K,
               unsigned short* grad_gate, unsigned short* grad_up, unsigned short* hidden,
               float* sums_gate, float* sums_up, float* sums_down, unsigned short* grad_x,
               unsigned* units) {
    extern __shared__ uint4 memory[];
    __shared__ int taken;
    const int count = *heavy_count;
    if (count == 0) return;
    const unsigned stages = smem_address(memory);
    const float penalty = penalty_at ? *penalty_at : 0.f;
    const Job job{x,          grad_y, w_gate, w_up,      w_down,  penalty,
                  heavy_rows, N,      K,      grad_gate, grad_up, hidden};
    const int neuron_tiles = tiles_of(N, kTile), weight_tiles = neuron_tiles * tiles_of(K, kTile);
    const int of_weights = ((sums_gate ? 2 : 0) + (sums_down ? 1 : 0)) * weight_tiles;

    int start = 0, first_unit = 0, seen = 0, ahead = 0;
    if (threadIdx.x == 0) ahead = atomicAdd(units, 1u);
    while (true) {
        if (threadIdx.x == 0) taken = ahead;
        __syncthreads();
        int unit = taken;
        __syncthreads();
        if (threadIdx.x == 0) ahead = atomicAdd(units, 1u);

        // its window
        int num_rows, row_tiles, of_pairs;
        while (true) {
            if (start >= count) return;
            num_rows = min(window, count - start), row_tiles = tiles_of(num_rows, kTile);
            of_pairs = row_tiles * tiles_of(N, kHalf);
            const int of_x = grad_x ? row_tiles * tiles_of(K, kTile) : 0;
            const int num_units = of_pairs + of_weights + of_x;
            if (unit < first_unit + num_units) break;
            start += window, first_unit += num_units;
        }
        unit -= first_unit;
        wait_for_units(units + 1, first_unit + (unit < of_pairs ? 0 : of_pairs), seen);
        if (unit < of_pairs) {
            pair_tile(job, stages, start, num_rows, unit % row_tiles * kTile,
                      unit / row_tiles * kHalf);
        } else if ((unit -= of_pairs) < of_weights) {
            const int which = unit / weight_tiles + (sums_gate ? 0 : 2), tile = unit % weight_tiles;
            weight_tile(job, stages, which == 0 ? grad_gate : which == 1 ? grad_up : hidden,
                        which == 2 ? grad_y : x, start, num_rows, tile % neuron_tiles * kTile,
                        tile / neuron_tiles * kTile,
                        which == 0 ? sums_gate : which == 1 ? sums_up : sums_down);
        } else {
            unit -= of_weights;
            x_tile(job, stages, start, num_rows, unit % row_tiles * kTile,
                   unit / row_tiles * kTile, grad_x);
        }
        end_unit(units + 1);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    order_heavy(int* heavy_rows, const int* heavy_count, int M) {
    extern __shared__ uint4 memory[];
    const int count = *heavy_count;
    if (count > 1) order_rows(heavy_rows, count, reinterpret_cast<unsigned*>(memory), M);
}
