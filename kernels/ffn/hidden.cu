// hidden and hidden_kept over bf16, hidden_e4m3: hidden.cuh has it all. Over e4m3 sums without scales
// become up, and h becomes f16.
#include "ffn/hidden.cuh"

#define TWELL_HIDDEN(name, numbers, also)                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                     \
        name(const float* partial, long long partial_stride, int Q, const uint4* links,           \
             const int* pair_start, const unsigned* pairs, int M, int N, int tile_tokens, int cap,\
             int panel_rows, int num_panels, int group_rounds, const unsigned short* b_up,        \
             const int* num_rounds, uint4* records, unsigned* masks, unsigned* kept,              \
             const float2* token_scales, const float* neuron_scales) {                            \
        extern __shared__ uint4 staged[];                                                         \
        const Rounds rounds{num_rounds, records, links, masks, group_rounds};                     \
        fill_rounds({partial, partial_stride, Q, b_up}, rounds, pair_start, pairs, M, N,          \
                    tile_tokens, cap, panel_rows, num_panels, staged, also{kept},                 \
                    numbers{{token_scales, neuron_scales}});                                      \
    }

TWELL_ENTRIES(TWELL_HIDDEN)
