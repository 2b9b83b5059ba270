// gate_pack over bf16 and e4m3: gate_pack.cuh has it all. Over e4m3 it may start before the kernel in
// front has ended (ptx/pdl.cuh).
#include "ffn/gate_pack.cuh"
#include "ptx/pdl.cuh"

using product::Bf16;
using product::E4m3;

#define TWELL_GATE_PACK(name, numbers)                                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::kThreads, 1)  \
        name(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,    \
             const unsigned short* b_gate, int num_rows, int num_columns, int num_inner,          \
             int num_slots, int* counts, int* entries, int* heavy_count,                          \
             const float2* token_scales, const float* neuron_scales) {                            \
        extern __shared__ unsigned char dynamic_memory[];                                         \
        const product::Shape shape{num_rows, num_columns, num_inner, product::kBlockColumns};     \
        Packing<numbers::kScaled> packing{{token_scales, neuron_scales}, b_gate, num_rows,        \
                                          num_columns, shape.column_tiles(), num_slots, counts,   \
                                          entries};                                               \
        if constexpr (numbers::kScaled) wait_for_previous();                                      \
        if (blockIdx.x == 0 && threadIdx.x == 0) *heavy_count = 0;                                \
        product::run<numbers::Rows>(shape, &x_map, &w_map, &w_map, dynamic_memory, packing);      \
    }

TWELL_ENTRIES(TWELL_GATE_PACK)
