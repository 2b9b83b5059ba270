// gate_pack over bf16: gate_pack.cuh has it all.
#include "ffn/gate_pack.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    gate_pack(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const unsigned short* b_gate, int num_rows, int num_columns, int num_inner,
              int num_slots, int* counts, int* entries, int* heavy_count) {
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns};
    Packing<Unscaled> packing{{},        b_gate, num_rows, num_columns, shape.column_tiles(),
                              num_slots, counts, entries};
    pack_product<Along>(&x_map, &w_map, shape, packing, heavy_count);
}
