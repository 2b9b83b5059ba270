// rows [M, inner] times columns [N, inner]^T on Hopper: a persistent, warp-specialised pipeline
// that leaves each 64 x 256 tile in a warpgroup's registers and hands it to the kernel's own code.
//
// In a block one warpgroup loads (one thread of it, by TMA) and two others multiply, 64 rows each.
// Two neighbouring blocks form a cluster and take the same 256 columns for neighbouring rows: each
// loads half of the columns and multicasts it to both. Four stages of 128 bytes of `inner` are in
// flight. The multiplying warpgroups do not wait for each other, and what becomes of a tile can be
// put off into the next one's products (Multiplier): so the tensor cores stay busy.
//
// Columns come from two maps, `columns0` for columns 0-127 of the tile and `columns1` for 128-255:
// the same weight twice, or gate and up side by side (tile_columns = 128 then). COLUMNS says how
// the weight lies: `Along` as [N, inner], `Across` as [inner, N].
//
// Launch: cluster of 2 (even grid), kThreads threads, kPipelineBytes (+ kPatchBytes) of
// dynamic shared memory; rows in boxes of 64 x 64, columns in boxes of 128 x 64 if they lie along,
// of 64 x 64 if across, 128-byte swizzle.
#pragma once

#include "spec.cuh"
#include "ptx/barriers.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/cluster.cuh"
#include "tile/swizzled.cuh"

namespace product {

constexpr int kGroupRows = spec::INPUT_BOX_ROWS;
constexpr int kBlockColumns = 2 * spec::WEIGHT_BOX_ROWS;
constexpr int kInner = spec::PRODUCT_INNER, kInnerBytes = 2 * kInner;  // of a row of a stage
constexpr int kStages = spec::PRODUCT_STAGES;
constexpr int kGroupBytes = kGroupRows * kInnerBytes;
constexpr int kColumnsBytes = kBlockColumns * kInnerBytes;
constexpr int kStageBytes = 2 * kGroupBytes + kColumnsBytes;
static_assert(kStageBytes == spec::PRODUCT_STAGE_BYTES);
constexpr int kPipelineBytes = kStages * kStageBytes + 1024;  // 1024: to align the first stage
constexpr int kPatchBytes = spec::PATCH_BYTES;                // 4 KB a multiplying warp
constexpr int kPairsAtATime = 8;  // of row blocks: multiplied with all columns before going on

constexpr int kGroups = 2, kBlockRows = kGroups * kGroupRows;
constexpr int kThreads = spec::PRODUCT_BLOCK;
static_assert(kThreads == 128 * (1 + kGroups));

struct Shape {
    int num_rows, num_columns, num_inner;
    int tile_columns;  // columns by which neighbouring tiles differ

    __device__ int row_pairs() const { return (num_rows + 2 * kBlockRows - 1) / (2 * kBlockRows); }
    __device__ int column_tiles() const { return (num_columns + tile_columns - 1) / tile_columns; }
    __device__ int inner_blocks() const { return (num_inner + kInner - 1) / kInner; }
    __device__ int num_tiles() const { return row_pairs() * column_tiles(); }
};

struct Tile {
    int row, column;  // the first of each
    int column_tile;
};

// Tiles in an order that keeps kPairsAtATime pairs of row blocks and all columns in L2.
__device__ __forceinline__ Tile tile_at(const Shape& shape, int tile_idx, unsigned rank) {
    const int tiles_at_a_time = kPairsAtATime * shape.column_tiles();
    const int within = tile_idx % tiles_at_a_time;
    const int first = tile_idx / tiles_at_a_time * kPairsAtATime;
    const int pairs = min(kPairsAtATime, shape.row_pairs() - first);
    const int block = 2 * (first + within % pairs) + static_cast<int>(rank);
    const int column_tile = within / pairs;
    return {block * kBlockRows, column_tile * shape.tile_columns, column_tile};
}

struct Pipeline {
    unsigned stages;  // address of the first stage
    unsigned full, empty;

    __device__ unsigned rows(int stage) const { return stages + stage * kStageBytes; }
    __device__ unsigned columns(int stage) const { return rows(stage) + 2 * kGroupBytes; }
    __device__ unsigned full_at(int stage) const { return full + 8 * stage; }
    __device__ unsigned empty_at(int stage) const { return empty + 8 * stage; }
};

// The block's half of a stage's columns, into both blocks; `column` is its first.
template <class COLUMNS>
__device__ __forceinline__ void load_columns(unsigned target, const TensorMap* columns, int column,
                                             int inner, unsigned full) {
    if constexpr (COLUMNS::kAcross) {
#pragma unroll
        for (int box = 0; box < kBlockColumns / 2 / 64; ++box)
            copy_box_to_cluster(target + box * COLUMNS::kBoxBytes, columns, column + 64 * box,
                                inner, full, 3);
    } else {
        copy_box_to_cluster(target, columns, inner, column, full, 3);
    }
}

// One thread of the block: fills the stages, tile after tile.
template <class COLUMNS>
__device__ __forceinline__ void load_tiles(const Pipeline& pipe, const Shape& shape,
                                           const TensorMap* rows, const TensorMap* columns0,
                                           const TensorMap* columns1) {
    const unsigned rank = cluster_rank();
    const int num_clusters = gridDim.x / 2, num_tiles = shape.num_tiles();
    const int inner_blocks = shape.inner_blocks();
    const TensorMap* columns = rank == 0 ? columns0 : columns1;
    const int half = columns0 == columns1 ? static_cast<int>(rank) * (kBlockColumns / 2) : 0;
    int stage = 0;
    unsigned parity = 1;  // a fresh barrier counts as just released
    for (int tile_idx = blockIdx.x / 2; tile_idx < num_tiles; tile_idx += num_clusters) {
        const Tile tile = tile_at(shape, tile_idx, rank);
        for (int block = 0; block < inner_blocks; ++block) {
            const int inner = block * kInner;
            barrier_wait(pipe.empty_at(stage), parity);
            barrier_expect_bytes(pipe.full_at(stage), kGroups * kGroupBytes + kColumnsBytes);
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
                copy_box(pipe.rows(stage) + group * kGroupBytes, rows, inner,
                         tile.row + group * kGroupRows, pipe.full_at(stage));
            load_columns<COLUMNS>(pipe.columns(stage) + rank * (kColumnsBytes / 2), columns,
                                  tile.column + half, inner, pipe.full_at(stage));
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
}

// One multiplying warpgroup. `finish.take(tile, sums)` gets each tile of 64 x 256 sums. It may
// leave work to `finish.later<0>()` to `later<3>()`, which run while the tensor cores are at the
// next tile (or at the end).
template <class COLUMNS, class Finish>
class Multiplier {
  public:
    __device__ Multiplier(const Pipeline& pipe, int group, Finish& finish)
        : pipe_(pipe), group_(group), finish_(finish) {}

    __device__ __forceinline__ void run(const Shape& shape) {
        const unsigned rank = cluster_rank();
        const int num_clusters = gridDim.x / 2, num_tiles = shape.num_tiles();
        const int inner_blocks = shape.inner_blocks();
        bool pending = false;
        for (int tile_idx = blockIdx.x / 2; tile_idx < num_tiles; tile_idx += num_clusters) {
            float sums[128];
            step<0>(sums, inner_blocks, pending);
            step<1>(sums, inner_blocks, pending);
            step<2>(sums, inner_blocks, pending);
            step<3>(sums, inner_blocks, pending);
            for (int block = 4; block < inner_blocks; ++block) {
                multiply(sums, 1);
                release_previous();
            }
            wgmma_wait<0>();
            release(unreleased_);
            unreleased_ = -1;
            Tile tile = tile_at(shape, tile_idx, rank);
            tile.row += group_ * kGroupRows;
            finish_.take(tile, sums);
            pending = true;
        }
        if (pending) {
            finish_.template later<0>();
            finish_.template later<1>();
            finish_.template later<2>();
            finish_.template later<3>();
        }
    }

  private:
    template <int BLOCK>
    __device__ __forceinline__ void step(float (&sums)[128], int inner_blocks, bool pending) {
        if (BLOCK < inner_blocks) multiply(sums, BLOCK > 0);
        if (pending) finish_.template later<BLOCK>();
        if (BLOCK < inner_blocks) release_previous();
    }

    __device__ __forceinline__ void multiply(float (&sums)[128], int add) {
        barrier_wait(pipe_.full_at(stage_), parity_);
        const unsigned long long rows =
            Along::descriptor(pipe_.rows(stage_) + group_ * kGroupBytes);
        const unsigned long long columns = COLUMNS::descriptor(pipe_.columns(stage_));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kInnerBytes / 32; ++k)
            COLUMNS::multiply(sums, rows + Along::kNext * k, columns + COLUMNS::kNext * k,
                              k > 0 ? 1 : add);
        wgmma_commit();
    }

    // All but the newest product has been made: its stage goes back to the loaders of both blocks.
    __device__ __forceinline__ void release_previous() {
        wgmma_wait<1>();
        if (unreleased_ >= 0) release(unreleased_);
        unreleased_ = stage_;
        if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
    }

    __device__ __forceinline__ void release(int stage) {
        if (threadIdx.x % 128 < 2)
            barrier_arrive_in_cluster(address_in_block(pipe_.empty_at(stage), threadIdx.x % 128));
    }

    const Pipeline& pipe_;
    const int group_;
    Finish& finish_;
    int stage_ = 0, unreleased_ = -1;
    unsigned parity_ = 0;
};

// The whole block. A tile that `finish` gets begins at its warpgroup's own row.
template <class COLUMNS = Along, class Finish>
__device__ __forceinline__ void run(const Shape& shape, const TensorMap* rows,
                                    const TensorMap* columns0, const TensorMap* columns1,
                                    unsigned char* dynamic_memory, Finish& finish) {
    __shared__ alignas(8) unsigned long long full[kStages], empty[kStages];
    const unsigned stages = (smem_address(dynamic_memory) + 1023) & ~1023u;
    const Pipeline pipe{stages, smem_address(full), smem_address(empty)};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(pipe.full_at(stage), 1);
            barrier_init(pipe.empty_at(stage), 2 * kGroups);  // the warpgroups of both blocks
        }
        barrier_init_fence();
    }
    cluster_sync();

    if (threadIdx.x / 128 == 0) {
        give_registers<40>();
        if (threadIdx.x == 0) load_tiles<COLUMNS>(pipe, shape, rows, columns0, columns1);
    } else {
        take_registers<232>();
        Multiplier<COLUMNS, Finish>(pipe, threadIdx.x / 128 - 1, finish).run(shape);
    }
    cluster_sync();  // neither block may leave while the other still signals it
}

}  // namespace product
