// The rows that do not fit the packed form (overflowed, too dense, or not finite), computed densely
// on Hopper tensor cores. How many there are is known to the device alone: `heavy_count`.
//
// The host launches the three kernels for one window of the list of heavy rows after another; a
// window that starts behind the count costs an empty launch.
//   heavy_gather   x_rows [window, K] = x[heavy_rows]
//   heavy_hidden   hidden [window, N] = relu(x_rows W_gate^T + b_gate) * (x_rows W_up^T + b_up)
//   heavy_down     y[heavy_rows] = hidden W_down^T + b_down, W_down lying as [N, K]
// The gate is multiplied a second time: a row rarely comes here, and so no dense gate is ever kept.
// With at most `few` heavy rows nothing is done: heavy_walk.cuh has done it, or there is none.
// All may start before the previous kernel has ended (ptx/pdl.cuh).
//
// Over e4m3 x_rows, W_gate and W_up are e4m3 with scales; the hidden state is bf16, and so W_down is
// made bf16, without its scales, if more than `few` rows are heavy:
//   heavy_widen    wide [N, K] bf16 = w_down [N, K] e4m3
// heavy_gather takes x_rows in shorts; behind a walk x_rows are there.
//
// Launch: gather and widen any grid x 256 threads, widen of a multiple of 16 bytes. hidden, down: grid
// even, at most one block a multiprocessor, 384 threads, kPipelineBytes + kPatchBytes (230400) of
// dynamic shared memory; maps of x_rows [window, K], hidden [window, N] and w_down [N, K] in boxes of
// 64 rows x 64 columns, of w_gate [N, K] and w_up [N, K] in boxes of 128 x 64, of e4m3 twice as wide.
// N must be a multiple of 8.
#pragma once
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/hopper_product.cuh"
#include "tile/swizzled.cuh"

namespace {

__device__ __forceinline__ int rows_in_window(const int* heavy_count, int few, int window_start,
                                              int window) {
    const int num = *heavy_count;
    return num <= few ? 0 : max(0, min(window, num - window_start));
}

__device__ __forceinline__ float high_half(unsigned pair) {
    return __uint_as_float(pair & 0xffff0000);
}

__device__ __forceinline__ unsigned hidden_pair(const float* gate, const float* up) {
    const unsigned gates = bf16_pair(gate[0], gate[1]), ups = bf16_pair(up[0], up[1]);
    return bf16_pair(keep_fired(bf16_value(gates)) * bf16_value(ups),
                     keep_fired(high_half(gates)) * high_half(ups));
}

// A warp's 16 rows of 128 bf16 columns on their way from fragments to whole lines.
class Patch {
  public:
    __device__ explicit Patch(unsigned char* memory)
        : lines_(reinterpret_cast<uint4*>(memory) + threadIdx.x / 32 % 8 * 256) {}

    // pair j of row `lane / 4` (+ 8 if `lower`) of the warp
    __device__ void put(int j, bool lower, unsigned pair) {
        const int lane = threadIdx.x % 32, row = lane / 4 + 8 * lower;
        reinterpret_cast<unsigned*>(lines_ + row * 16 + (j ^ (row & 7)))[lane % 4] = pair;
    }

    // `line(row)` gives where row 0-15 of the warp goes, or null; columns < num_columns are written
    template <class Line>
    __device__ void write(int num_columns, Line line) {
        __syncwarp();
        const int lane = threadIdx.x % 32, chunk = lane % 16;
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const int row = 2 * step + lane / 16;
            unsigned short* target = line(row);
            const uint4 values = lines_[row * 16 + (chunk ^ (row & 7))];
            if (target && 8 * chunk < num_columns)
                reinterpret_cast<uint4*>(target)[chunk] = values;
        }
        __syncwarp();
    }

  private:
    uint4* lines_;
};

__device__ __forceinline__ unsigned char* patches(unsigned char* dynamic_memory) {
    const unsigned start = smem_address(dynamic_memory);
    const unsigned aligned = (start + 1023) & ~1023u;
    return dynamic_memory + (aligned - start) + product::kStages * product::kStageBytes;
}

// Adds bf16 biases of the pairs first + 8 j, first + 8 j + 1, to pairs j0 <= j < j0 + COUNT.
template <int COUNT>
__device__ __forceinline__ void add_bias(float (&sums)[128], int j0, const unsigned short* bias,
                                         int first, int num_columns) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const int column = first + 8 * j;
        if (column >= num_columns) continue;
        const float low = bf16_value(bias[column]), high = bf16_value(bias[column + 1]);
        float* four = sums + 4 * (j0 + j);
        four[0] += low, four[1] += high, four[2] += low, four[3] += high;
    }
}

// Multiplies pairs j0 <= j < j0 + COUNT by the scales of their columns, first + 8 j and the next,
// and of the upper and the lower row.
template <int COUNT>
__device__ __forceinline__ void scale_pairs(float (&sums)[128], int j0, const float* columns,
                                            int first, int num_columns, float upper, float lower) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        float low = 0, high = 0;
        load_floats_if(first + 8 * j < num_columns, columns + first + 8 * j, low, high);
        float* four = sums + 4 * (j0 + j);
        four[0] = four[0] * low * upper, four[1] = four[1] * high * upper;
        four[2] = four[2] * low * lower, four[3] = four[3] * high * lower;
    }
}

// Scales of x, of the rows of W_gate and W_up; over bf16 null.
struct HiddenScales {
    const float2* tokens;  // quantise_rows.cu
    const float *gate_scales, *up_scales;
    const int* heavy_rows;
    int window_start;

    __device__ __forceinline__ float of_row(int row, int num_rows) const {
        return row < num_rows ? tokens[heavy_rows[window_start + row]].x : 0.f;
    }
    __device__ __forceinline__ void scale(float (&sums)[128], int row, int num_rows, int column,
                                          int num_columns) const {
        const float upper = of_row(row, num_rows), lower = of_row(row + 8, num_rows);
        scale_pairs<16>(sums, 0, gate_scales, column, num_columns, upper, lower);
        scale_pairs<16>(sums, 16, up_scales, column, num_columns, upper, lower);
    }
};

// Scales of the columns of W_down; over bf16 null.
struct DownScales {
    const float* column_scales;

    __device__ __forceinline__ void scale(float (&sums)[128], int column, int num_columns) const {
        scale_pairs<32>(sums, 0, column_scales, column, num_columns, 1.f, 1.f);
    }
};

// gate and up of 128 columns stand side by side in a tile: sums 0-63 are gates, 64-127 ups
template <bool SCALED>
struct HiddenTiles : HiddenScales {
    Patch patch;
    const unsigned short *b_gate, *b_up;
    int num_rows, num_columns;
    unsigned short* hidden;

    __device__ __forceinline__ void take(const product::Tile& tile, float (&sums)[128]) {
        const int first_column = tile.column + threadIdx.x % 4 * 2;
        if constexpr (SCALED)
            scale(sums, tile.row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, num_rows,
                  first_column, num_columns);
        if (b_gate) add_bias<16>(sums, 0, b_gate, first_column, num_columns);
        if (b_up) add_bias<16>(sums, 16, b_up, first_column, num_columns);
#pragma unroll
        for (int lower = 0; lower < 2; ++lower)
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float* gate = sums + 4 * j + 2 * lower;
                patch.put(j, lower, hidden_pair(gate, gate + 64));
            }
        const int first_row = tile.row + threadIdx.x / 32 % 4 * 16;
        patch.write(num_columns - tile.column, [&](int row) -> unsigned short* {
            if (first_row + row >= num_rows) return nullptr;
            return hidden + static_cast<long long>(first_row + row) * num_columns + tile.column;
        });
    }

    template <int STEP>
    __device__ void later() {}
};

template <bool SCALED>
struct DownTiles : DownScales {
    Patch patch;
    const unsigned short* b_down;
    const int* heavy_rows;
    int window_start, num_rows, num_inner;
    unsigned short* y;

    __device__ __forceinline__ void take(const product::Tile& tile, float (&sums)[128]) {
        const int first_column = tile.column + threadIdx.x % 4 * 2;
        if constexpr (SCALED) scale(sums, first_column, num_inner);
        if (b_down) add_bias<32>(sums, 0, b_down, first_column, num_inner);
        const int first_row = tile.row + threadIdx.x / 32 % 4 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float* four = sums + 64 * half + 4 * j;
                patch.put(j, false, bf16_pair(four[0], four[1]));
                patch.put(j, true, bf16_pair(four[2], four[3]));
            }
            const int column = tile.column + 128 * half;
            patch.write(num_inner - column, [&](int row) -> unsigned short* {
                const int i = first_row + row;
                if (i >= num_rows) return nullptr;
                const long long target = heavy_rows[window_start + i];
                return y + target * num_inner + column;
            });
        }
    }

    template <int STEP>
    __device__ void later() {}
};

}  // namespace
