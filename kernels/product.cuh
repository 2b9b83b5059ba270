// rows [M, inner] times columns [N, inner]^T on Hopper: a persistent, warp-specialised pipeline that
// leaves each 128 x 256 tile in registers and hands it to the kernel that wants it.
//
// A block of 384 threads is one warpgroup of which one thread loads (TMA) and two that multiply, 64
// rows each. Two neighbouring blocks form a cluster and take the same columns for 256 neighbouring
// rows: each loads half of the columns and multicasts it to both. Four stages of 64 columns of
// `inner` are in flight. The two multiplying warpgroups do not wait for each other: when one
// finishes its tile, the other keeps the tensor cores busy.
//
// Columns come from two maps, `columns0` for rows 0-127 of the tile and `columns1` for 128-255: the
// same weight twice, or gate and up side by side (tile_columns = 128 then).
//
// Launch: cluster of 2 (even grid), 384 threads, kPipelineBytes + kPatchBytes of dynamic shared
// memory; both boxes 128 rows x 64 columns, 128-byte swizzle.
#pragma once

#include "hopper.cuh"
#include "wgmma.cuh"

namespace product {

constexpr int kBlockRows = 128;
constexpr int kBlockColumns = 256;
constexpr int kBlockInner = 64;
constexpr int kStages = 4;
constexpr int kRowsBytes = kBlockRows * kBlockInner * 2;
constexpr int kColumnsBytes = kBlockColumns * kBlockInner * 2;
constexpr int kStageBytes = kRowsBytes + kColumnsBytes;
constexpr int kPipelineBytes = kStages * kStageBytes + 1024;  // 1024: to align the first stage
constexpr int kPatchBytes = 8 * 4096;                         // 4 KB a multiplying warp
constexpr int kThreads = 384;
constexpr int kGroupRows = 8;  // of 256 rows: what is multiplied with all columns before going on

struct Shape {
    int num_rows, num_columns, num_inner;
    int tile_columns;  // columns by which neighbouring tiles differ

    __device__ int row_pairs() const { return (num_rows + 2 * kBlockRows - 1) / (2 * kBlockRows); }
    __device__ int column_tiles() const { return (num_columns + tile_columns - 1) / tile_columns; }
    __device__ int inner_blocks() const { return (num_inner + kBlockInner - 1) / kBlockInner; }
    __device__ int num_tiles() const { return row_pairs() * column_tiles(); }
};

struct Tile {
    int row, column;  // first of each, for this block
    int column_tile;
};

// Tiles in an order that keeps kGroupRows pairs of rows and all columns in L2.
__device__ __forceinline__ Tile tile_at(const Shape& shape, int tile_idx, unsigned rank) {
    const int tiles_a_group = kGroupRows * shape.column_tiles();
    const int group = tile_idx / tiles_a_group, within = tile_idx % tiles_a_group;
    const int first = group * kGroupRows;
    const int pairs = min(kGroupRows, shape.row_pairs() - first);
    const int pair = first + within % pairs;
    const int column_tile = within / pairs;
    return {(2 * pair + static_cast<int>(rank)) * kBlockRows, column_tile * shape.tile_columns,
            column_tile};
}

struct Pipeline {
    unsigned stages;  // address of the first stage
    unsigned full, empty;

    __device__ unsigned rows(int stage) const { return stages + stage * kStageBytes; }
    __device__ unsigned columns(int stage) const { return rows(stage) + kRowsBytes; }
    __device__ unsigned full_at(int stage) const { return full + 8 * stage; }
    __device__ unsigned empty_at(int stage) const { return empty + 8 * stage; }
};

// One thread of the block: fills the stages, tile after tile.
__device__ __forceinline__ void load_tiles(const Pipeline& pipe, const Shape& shape,
                                           const TensorMap* rows, const TensorMap* columns0,
                                           const TensorMap* columns1) {
    const unsigned rank = cluster_rank();
    const int num_clusters = gridDim.x / 2, num_tiles = shape.num_tiles();
    const int inner_blocks = shape.inner_blocks();
    const TensorMap* columns = rank == 0 ? columns0 : columns1;
    const int half = columns0 == columns1 ? static_cast<int>(rank) * kBlockRows : 0;
    int stage = 0;
    unsigned parity = 1;  // a fresh barrier counts as just released
    for (int tile_idx = blockIdx.x / 2; tile_idx < num_tiles; tile_idx += num_clusters) {
        const Tile tile = tile_at(shape, tile_idx, rank);
        for (int block = 0; block < inner_blocks; ++block) {
            const int inner = block * kBlockInner;
            barrier_wait(pipe.empty_at(stage), parity);
            barrier_expect_bytes(pipe.full_at(stage), kStageBytes);
            copy_box(pipe.rows(stage), rows, inner, tile.row, pipe.full_at(stage));
            copy_box_to_cluster(pipe.columns(stage) + rank * kRowsBytes, columns, inner,
                                tile.column + half, pipe.full_at(stage), 3);
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
}

// One multiplying warpgroup: `finish(tile, sums)` gets each tile of 64 x 256 sums.
template <class Finish>
__device__ __forceinline__ void multiply_tiles(const Pipeline& pipe, const Shape& shape,
                                               int warpgroup, Finish finish) {
    const unsigned rank = cluster_rank();
    const int num_clusters = gridDim.x / 2, num_tiles = shape.num_tiles();
    const int inner_blocks = shape.inner_blocks();
    const int lane_of_group = threadIdx.x % 128;
    int stage = 0;
    unsigned parity = 0;
    for (int tile_idx = blockIdx.x / 2; tile_idx < num_tiles; tile_idx += num_clusters) {
        float sums[128];
        int unreleased = -1;
        for (int block = 0; block < inner_blocks; ++block) {
            barrier_wait(pipe.full_at(stage), parity);
            const unsigned rows = pipe.rows(stage) + warpgroup * (kRowsBytes / 2);
            const unsigned long long rows_tile = tile_descriptor(rows);
            const unsigned long long columns_tile = tile_descriptor(pipe.columns(stage));
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockInner / 16; ++k)
                wgmma_64x256x16(sums, rows_tile + 2 * k, columns_tile + 2 * k, block + k > 0);
            wgmma_commit();
            // the stage before this one has been read: give it back to both loaders
            wgmma_wait<1>();
            if (unreleased >= 0 && lane_of_group < 2)
                barrier_arrive_in_cluster(pipe.empty_at(unreleased), lane_of_group);
            unreleased = stage;
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        if (lane_of_group < 2)
            barrier_arrive_in_cluster(pipe.empty_at(unreleased), lane_of_group);
        finish(tile_at(shape, tile_idx, rank), sums);
    }
}

// The whole block. `finish(warpgroup, tile, sums)` runs in the multiplying warpgroups.
template <class Finish>
__device__ __forceinline__ void run(const Shape& shape, const TensorMap* rows,
                                    const TensorMap* columns0, const TensorMap* columns1,
                                    unsigned char* dynamic_memory, Finish finish) {
    __shared__ alignas(8) unsigned long long full[kStages], empty[kStages];
    const unsigned stages = (shared_address(dynamic_memory) + 1023) & ~1023u;
    const Pipeline pipe{stages, shared_address(full), shared_address(empty)};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(pipe.full_at(stage), 1);
            barrier_init(pipe.empty_at(stage), 4);  // two warpgroups of two blocks
        }
        barrier_init_fence();
    }
    cluster_sync();

    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles(pipe, shape, rows, columns0, columns1);
    } else {
        take_registers<232>();
        multiply_tiles(pipe, shape, warpgroup - 1,
                       [&](const Tile& tile, float(&sums)[128]) {
                           finish(warpgroup - 1, tile, sums);
                       });
    }
    cluster_sync();  // neither block may leave while the other still signals it
}

}  // namespace product
