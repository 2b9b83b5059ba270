// What fires of a dense gate, as counts and entries (kernels/README.md), in ascending order of
// columns. For devices whose gate product is a library's; on Hopper `gate_pack` does both at once.
//
//   gate [M, N] bf16, bias included  ->  counts int32 [M, T], entries int32 [M, T, TILE]
//
// With TILE slots nothing overflows. A row that holds a NaN or an infinity lists all its columns,
// those that do not fire with the value +0: so 0 * Inf becomes NaN, as in the dense equation.
// Slots behind a count are left as they were. Sets heavy_count to 0 for `plan`.
//
// Launch: one block of 256 threads a row, no dynamic shared memory. gate is aligned to 16 bytes.
#include "spec.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"
#include "tile/lists.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kWarps = spec::PACK_BLOCK / 32;
constexpr int kColumns = TILE / 32;  // consecutive ones that a lane looks after

struct Columns {
    unsigned short gate[kColumns];  // +0 beyond the row's end
};

__device__ __forceinline__ Columns load_columns(const unsigned short* row, int column, int N) {
    Columns columns;
    if (N % kColumns == 0) {  // rows begin at multiples of 16 bytes
        uint4 words = make_uint4(0, 0, 0, 0);
        if (column < N) words = *reinterpret_cast<const uint4*>(row + column);
        const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) columns.gate[i] = pairs[i / 2] >> (16 * (i % 2));
    } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
            columns.gate[i] = column + i < N ? row[column + i] : 0;
    }
    return columns;
}

__device__ __forceinline__ bool not_finite(unsigned short gate) {
    return (gate & 0x7f80) == 0x7f80;
}

__device__ __forceinline__ bool any_not_finite(const unsigned short* row, int N, int warp,
                                               int lane) {
    bool found = false;
    for (int column = warp * TILE + lane * kColumns; column < N; column += kWarps * TILE) {
        const Columns columns = load_columns(row, column, N);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) found |= not_finite(columns.gate[i]);
    }
    return found;
}

// One tile: lane l holds columns first + 8l to first + 8l + 7.
__device__ __forceinline__ void pack_tile(const unsigned short* row, int first, int N,
                                          bool all_columns, int* count, int* entries,
                                          int lane) {
    const int column = first + lane * kColumns;
    const Columns columns = load_columns(row, column, N);
    unsigned fired = 0, listed = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        if (column + i < N) {
            fired |= static_cast<unsigned>(fires(bf16_value(columns.gate[i]))) << i;
            listed |= 1u << i;
        }
    }
    if (!all_columns) listed = fired;

    const int end = scan_warp(__popc(listed), lane);
    int* entry = entries + end - __popc(listed);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
        if (listed >> i & 1) {
            const unsigned value = fired >> i & 1 ? columns.gate[i] : 0;
            *entry++ = static_cast<int>(value << 16 | static_cast<unsigned>(column + i));
        }
    }
    if (lane == 31) *count = end;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(spec::PACK_BLOCK)
    pack(const unsigned short* gate, int M, int N, int* counts, int* entries, int* heavy_count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row = blockIdx.x;
    if (row == 0 && threadIdx.x == 0) *heavy_count = 0;
    const unsigned short* gate_row = gate + row * N;
    const bool all_columns = __syncthreads_or(any_not_finite(gate_row, N, warp, lane));
    const int num_tiles = (N + TILE - 1) / TILE;
    for (int tile = warp; tile < num_tiles; tile += kWarps) {
        const long long cell = row * num_tiles + tile;
        pack_tile(gate_row, tile * TILE, N, all_columns, counts + cell, entries + cell * TILE,
                  lane);
    }
}
