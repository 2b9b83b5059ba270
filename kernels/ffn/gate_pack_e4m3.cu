// gate_pack over e4m3: x and W_gate with scales of their rows (gate_pack.cuh). May start before the
// kernel in front has ended (ptx/pdl.cuh).
#include "ffn/gate_pack.cuh"
#include "ptx/pdl.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)
    gate_pack_e4m3(const __grid_constant__ TensorMap x_map,
                   const __grid_constant__ TensorMap w_map, const unsigned short* b_gate,
                   int num_rows, int num_columns, int num_inner, int num_slots, int* counts,
                   int* entries, int* heavy_count, const float2* token_scales,
                   const float* neuron_scales) {
    const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns};
    Packing<Scaled> packing{{token_scales, neuron_scales}, b_gate,    num_rows, num_columns,
                            shape.column_tiles(),          num_slots, counts,   entries};
    wait_for_previous();
    pack_product<AlongE4m3>(&x_map, &w_map, shape, packing, heavy_count);
}
