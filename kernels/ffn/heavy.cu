// The rows that do not fit the packed form (overflowed, too dense, or not finite), computed densely
// on Hopper tensor cores. How many there are is known to the device alone: `heavy_count`.
//
// The host launches the three kernels for one window of the list of heavy rows after another; a
// window that starts behind the count costs an empty launch.
//   heavy_gather   x_rows [window, K] = x[heavy_rows]
//   heavy_hidden   hidden [window, N] = relu(x_rows W_gate^T + b_gate) * (x_rows W_up^T + b_up)
//   heavy_down     y[heavy_rows] = hidden W_down^T + b_down, W_down lying as [N, K]
// The gate is multiplied a second time: a row rarely comes here, and so no dense gate is ever kept.
//
// Launch: gather any grid x 256 threads. hidden, down: grid even, at most one block a
// multiprocessor, 384 threads, kPipelineBytes + kPatchBytes (230400) of dynamic shared memory; maps
// of x_rows [window, K], hidden [window, N] and w_down [N, K] in boxes of 64 rows x 64 columns, of
// w_gate [N, K] and w_up [N, K] in boxes of 128 x 64. N must be a multiple of 8.
#include "spec.cuh"
#include "ptx/bf16.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/fires.cuh"
#include "tile/hopper_product.cuh"
#include "tile/swizzled.cuh"

namespace {

__device__ __forceinline__ int rows_in_window(const int* heavy_count, int window_start,
                                              int window) {
    return max(0, min(window, *heavy_count - window_start));
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
            if (target && 8 * chunk < num_columns) reinterpret_cast<uint4*>(target)[chunk] = values;
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

// gate and up of 128 columns stand side by side in a tile: sums 0-63 are gates, 64-127 ups
struct HiddenTiles {
    Patch patch;
    const unsigned short *b_gate, *b_up;
    int num_rows, num_columns;
    unsigned short* hidden;

    __device__ __forceinline__ void take(const product::Tile& tile, float (&sums)[128]) {
        const int first_column = tile.column + threadIdx.x % 4 * 2;
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

struct DownTiles {
    Patch patch;
    const unsigned short* b_down;
    const int* heavy_rows;
    int window_start, num_rows, num_inner;
    unsigned short* y;

    __device__ __forceinline__ void take(const product::Tile& tile, float (&sums)[128]) {
        const int first_column = tile.column + threadIdx.x % 4 * 2;
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

extern "C" __global__ void __launch_bounds__(spec::GATHER_BLOCK)
    heavy_gather(const unsigned short* x, const int* heavy_rows, const int* heavy_count,
                 int window_start, int window, int num_inner, unsigned short* x_rows) {
    const int num_rows = rows_in_window(heavy_count, window_start, window);
    for (int i = blockIdx.x; i < num_rows; i += gridDim.x) {
        const long long row = heavy_rows[window_start + i];
        const uint4* source = reinterpret_cast<const uint4*>(x + row * num_inner);
        uint4* target = reinterpret_cast<uint4*>(x_rows + static_cast<long long>(i) * num_inner);
        for (int chunk = threadIdx.x; chunk < num_inner / 8; chunk += blockDim.x)
            target[chunk] = source[chunk];
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_hidden(const __grid_constant__ TensorMap x_map,
                 const __grid_constant__ TensorMap gate_map,
                 const __grid_constant__ TensorMap up_map, const unsigned short* b_gate,
                 const unsigned short* b_up, const int* heavy_count, int window_start, int window,
                 int num_columns, int num_inner, unsigned short* hidden) {
    extern __shared__ unsigned char dynamic_memory[];
    const int num_rows = rows_in_window(heavy_count, window_start, window);
    if (num_rows == 0) return;
    HiddenTiles tiles{Patch(patches(dynamic_memory)), b_gate, b_up, num_rows, num_columns, hidden};
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns / 2};
    product::run(shape, &x_map, &gate_map, &up_map, dynamic_memory, tiles);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    heavy_down(const __grid_constant__ TensorMap hidden_map,
               const __grid_constant__ TensorMap down_map, const unsigned short* b_down,
               const int* heavy_rows, const int* heavy_count, int window_start, int window,
               int num_columns, int num_inner, unsigned short* y) {
    extern __shared__ unsigned char dynamic_memory[];
    const int num_rows = rows_in_window(heavy_count, window_start, window);
    if (num_rows == 0) return;
    DownTiles tiles{
        Patch(patches(dynamic_memory)), b_down, heavy_rows, window_start, num_rows, num_inner, y};
    const product::Shape shape{num_rows, num_inner, num_columns, product::kBlockColumns};
    product::run<Across>(shape, &hidden_map, &down_map, &down_map, dynamic_memory, tiles);
}
