// gate = x W_gate^T (+ b_gate), and of it only what fires, packed (kernels/README.md). Hopper.
//
// The product is tile/hopper_product.cuh's; this file is what becomes of a tile of sums. A row of
// the tile lies in the four lanes of a quad. Each lane rounds its sums to bf16, compares, and keeps
// one bit an element; a prefix sum over the quad's counts tells each lane where its entries go. So
// the entries of a (row, tile) are in a fixed order, but by lane, not by column. Entries beyond S
// are counted and not written, slots behind the count are left as they were. Bit 30 of a count says
// that the tile holds a NaN or an infinity.
//
// Launch: grid even, at most one block a multiprocessor, kPipelineBytes (197632) of dynamic shared
// memory, x_map in boxes of 64 rows x 64 columns, w_map 128 x 64. 384 threads and tiles of 128
// rows.
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/tma.cuh"
#include "tile/fires.cuh"
#include "tile/hopper_product.cuh"
#include "tile/lists.cuh"

namespace {

static_assert(product::kBlockColumns == TILE);

// Adds the bf16 biases of column pairs FIRST to FIRST + 7.
template <int FIRST>
__device__ __forceinline__ void add_bias(float (&sums)[128], const unsigned short* b_gate,
                                         int first_column, int num_columns) {
#pragma unroll
    for (int j = FIRST; j < FIRST + 8; ++j) {
        const int column = first_column + 8 * j;
        if (column >= num_columns) continue;
        const unsigned pair = *reinterpret_cast<const volatile unsigned*>(b_gate + column);
        const float low = __uint_as_float(pair << 16);
        const float high = __uint_as_float(pair & 0xffff0000);
        sums[4 * j] += low, sums[4 * j + 1] += high;
        sums[4 * j + 2] += low, sums[4 * j + 3] += high;
    }
}

// One of the two rows of which a quad of lanes holds 256 columns: 32 pairs of columns a lane.
class Row {
  public:
    // sums OFFSET and OFFSET + 1 of each four, rounded to bf16
    template <int OFFSET>
    __device__ __forceinline__ void round(const float (&sums)[128]) {
#pragma unroll
        for (int j = 0; j < 32; ++j)
            pairs_[j] = bf16_pair(sums[4 * j + OFFSET], sums[4 * j + OFFSET + 1]);
    }

    // compare, remember: bit j (low) and 16 + j (high) of mask[j / 16] for pair j; then count
    __device__ __forceinline__ void compare(int* count) {
        unsigned poison = 0;
        mask_[0] = mask_[1] = 0;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            mask_[j / 16] |= fires_pair(pairs_[j]) & (0x10001u << (j % 16));
            poison = multiply_add_pairs(pairs_[j], 0, poison);  // 0 while all are finite
        }
        // prefix sum over the quad: fired in the low half, lanes that saw NaN or Inf in the high
        const int quad_lane = threadIdx.x % 4;
        const unsigned fired = __popc(mask_[0]) + __popc(mask_[1]);
        const unsigned own = fired | ((poison & 0x7fff7fff) ? 0x10000u : 0u);
        unsigned upto = own;
        const unsigned one_below = __shfl_up_sync(~0u, upto, 1, 4);
        if (quad_lane >= 1) upto += one_below;
        const unsigned two_below = __shfl_up_sync(~0u, upto, 2, 4);
        if (quad_lane >= 2) upto += two_below;
        const unsigned total = __shfl_sync(~0u, upto, 3, 4);
        first_slot_ = (upto - own) & 0xffff;
        if (quad_lane == 0 && count) *count = (total & 0xffff) | (total >> 16 ? NOT_FINITE : 0);
    }

    // Writes what fired; of four pairs of columns together, if they fired in any row of the warp.
    // Within the four there is no branch: divergence costs more than stores that are not made.
    __device__ __forceinline__ void store(int first_column, int limit, int* entries) const {
        int slot = first_slot_;
        const unsigned any = __reduce_or_sync(
            ~0u, ((mask_[0] | mask_[0] >> 16) & 0xffff) | (mask_[1] | mask_[1] >> 16) << 16);
#pragma unroll
        for (int four = 0; four < 32; four += 4) {
            if (any >> four & 0xf) {
#pragma unroll
                for (int j = four; j < four + 4; ++j) {
                    const unsigned column = first_column + 8 * j;
                    const unsigned low = mask_[j / 16] & 1u << (j % 16);
                    const unsigned high = mask_[j / 16] & 0x10000u << (j % 16);
                    store_if(low, slot, limit, entries + slot, pairs_[j] << 16 | column);
                    slot += low != 0;
                    store_if(high, slot, limit, entries + slot,
                             (pairs_[j] & 0xffff0000) | (column + 1));
                    slot += high != 0;
                }
            }
        }
    }

  private:
    unsigned pairs_[32], mask_[2];
    int first_slot_;
};

// What becomes of a tile: rounded at once, packed while the next one is multiplied.
struct Packing {
    const unsigned short* b_gate;
    int num_rows, num_columns, num_tiles, num_slots;
    int* counts;
    int* entries;

    Row upper, lower;  // 8 rows further down
    int row, column, column_tile;

    __device__ __forceinline__ void take(const product::Tile& tile, float (&sums)[128]) {
        const int lane = threadIdx.x % 32;
        row = tile.row + threadIdx.x / 32 % 4 * 16 + lane / 4;
        column = tile.column + 2 * (lane % 4);
        column_tile = tile.column_tile;
        if (b_gate) {
            add_bias<0>(sums, b_gate, column, num_columns);
            add_bias<8>(sums, b_gate, column, num_columns);
            add_bias<16>(sums, b_gate, column, num_columns);
            add_bias<24>(sums, b_gate, column, num_columns);
        }
        // behind the last column: 0 times an infinity of x would be NaN, and seem to fire
        if (tile.column + product::kBlockColumns > num_columns) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (column + 8 * j >= num_columns)
                    sums[4 * j] = sums[4 * j + 1] = sums[4 * j + 2] = sums[4 * j + 3] = 0;
        }
        upper.round<0>(sums);
        lower.round<2>(sums);
    }

    template <int STEP>
    __device__ __forceinline__ void later() {
        const int own_row = row + (STEP < 2 ? 0 : 8);
        const bool inside = own_row < num_rows;
        const long long cell = static_cast<long long>(own_row) * num_tiles + column_tile;
        Row& part = STEP < 2 ? upper : lower;
        if constexpr (STEP % 2 == 0)
            part.compare(inside ? counts + cell : nullptr);
        else
            part.store(column, inside ? num_slots : 0, entries + cell * num_slots);
    }
};

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    gate_pack(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const unsigned short* b_gate, int num_rows, int num_columns, int num_inner,
              int num_slots, int* counts, int* entries, int* heavy_count) {
    extern __shared__ unsigned char dynamic_memory[];
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns};
    Packing packing{b_gate,    num_rows, num_columns, shape.column_tiles(),
                    num_slots, counts,   entries};
    if (blockIdx.x == 0 && threadIdx.x == 0) *heavy_count = 0;
    product::run(shape, &x_map, &w_map, &w_map, dynamic_memory, packing);
}
