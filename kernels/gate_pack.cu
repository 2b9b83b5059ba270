// gate = x W_gate^T (+ b_gate), and of it only what fires, packed (kernels/README.md). Hopper.
//
// The product is product.cuh's; this file is what becomes of a tile of sums. A row of the tile lies
// in the four lanes of a quad. Each lane rounds its sums to bf16, compares, and keeps one bit an
// element; a prefix sum over the quad's counts tells each lane where its entries go. So the entries
// of a (row, tile) are in a fixed order, but by lane, not by column. Entries beyond S are counted and
// not written, slots behind the count are left as they were. Bit 30 of a count says that the
// tile holds a NaN or an infinity.
//
// Launch: grid even, at most one block a multiprocessor, block 384, kPipelineBytes of dynamic
// shared memory (197632), both maps with boxes of 128 rows x 64 columns.
#include "product.cuh"

namespace {

constexpr int kNotFinite = 1 << 30;

__device__ __forceinline__ unsigned round_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 0xffff in each half that lies above the threshold or is NaN.
__device__ __forceinline__ unsigned fires(unsigned pair, unsigned threshold_pair) {
    unsigned fired;
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(fired) : "r"(pair), "r"(threshold_pair));
    return fired;
}

// Stays zero (of either sign) in each half while every pair it was given is finite.
__device__ __forceinline__ unsigned add_zero_times(unsigned pair, unsigned sum) {
    unsigned next;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(next) : "r"(pair), "r"(0u), "r"(sum));
    return next;
}

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

// Packs the row of which this quad of lanes holds 256 columns: sums OFFSET, OFFSET + 1 of each four.
template <int OFFSET>
__device__ __forceinline__ void pack_row(const float (&sums)[128], int first_column,
                                         unsigned threshold_pair, bool inside, int* count,
                                         int* entries, int num_slots) {
    // round, compare, remember: bit j (low) and 16 + j (high) of mask[j / 16] for pair j
    unsigned pairs[32], mask[2] = {0, 0}, poison = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        pairs[j] = round_pair(sums[4 * j + OFFSET], sums[4 * j + OFFSET + 1]);
        mask[j / 16] |= fires(pairs[j], threshold_pair) & (0x10001u << (j % 16));
        poison = add_zero_times(pairs[j], poison);
    }

    // prefix sum over the quad: count in the low half, lanes that saw NaN or Inf in the high half
    const int quad_lane = threadIdx.x % 4;
    const unsigned fired = __popc(mask[0]) + __popc(mask[1]);
    const unsigned own = fired | ((poison & 0x7fff7fff) ? 0x10000u : 0u);
    unsigned upto = own;
    const unsigned one_below = __shfl_up_sync(~0u, upto, 1, 4);
    if (quad_lane >= 1) upto += one_below;
    const unsigned two_below = __shfl_up_sync(~0u, upto, 2, 4);
    if (quad_lane >= 2) upto += two_below;
    const unsigned total = __shfl_sync(~0u, upto, 3, 4);
    if (quad_lane == 0 && inside) *count = (total & 0xffff) | (total >> 16 ? kNotFinite : 0);

    // write what fired; pairs that fired in no row of the warp are skipped together
    const int slot = (upto - own) & 0xffff;
    int* target = entries + slot;
    int* const end = inside ? entries + num_slots : entries;
    const unsigned any = __reduce_or_sync(
        ~0u, ((mask[0] | mask[0] >> 16) & 0xffff) | (mask[1] | mask[1] >> 16) << 16);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        if (any >> j & 1) {
            const unsigned column = first_column + 8 * j;
            if (mask[j / 16] & 1u << (j % 16)) {
                if (target < end) *target = pairs[j] << 16 | column;
                ++target;
            }
            if (mask[j / 16] & 0x10000u << (j % 16)) {
                if (target < end) *target = (pairs[j] & 0xffff0000) | (column + 1);
                ++target;
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    gate_pack(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const unsigned short* b_gate, float threshold, int num_rows, int num_columns,
              int num_inner, int num_slots, int* counts, int* entries, int* heavy_count) {
    extern __shared__ unsigned char dynamic_memory[];
    if (blockIdx.x == 0 && threadIdx.x == 0) *heavy_count = 0;
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns};
    const int num_tiles = shape.column_tiles();
    const unsigned threshold_pair = round_pair(threshold, threshold);
    product::run(shape, &x_map, &w_map, &w_map, dynamic_memory,
                 [&](int warpgroup, const product::Tile& tile, float(&sums)[128]) {
                     const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
                     const int first_column = tile.column + 2 * (lane % 4);
                     if (b_gate) {
                         add_bias<0>(sums, b_gate, first_column, num_columns);
                         add_bias<8>(sums, b_gate, first_column, num_columns);
                         add_bias<16>(sums, b_gate, first_column, num_columns);
                         add_bias<24>(sums, b_gate, first_column, num_columns);
                     }
                     const int row = tile.row + 64 * warpgroup + 16 * warp + lane / 4;
                     const long long cell =
                         static_cast<long long>(row) * num_tiles + tile.column_tile;
                     pack_row<0>(sums, first_column, threshold_pair, row < num_rows,
                                 counts + cell, entries + cell * num_slots, num_slots);
                     const long long below = cell + 8ll * num_tiles;
                     pack_row<2>(sums, first_column, threshold_pair, row + 8 < num_rows,
                                 counts + below, entries + below * num_slots, num_slots);
                 });
}
