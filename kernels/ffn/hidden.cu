// hidden and hidden_kept over bf16: hidden.cuh has it all.
#include "ffn/hidden.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    hidden(const float* partial, long long partial_stride, int Q, const uint4* links,
           const int* pair_start, const unsigned* pairs, int M, int N, int tile_tokens, int cap,
           int panel_rows, int num_panels, int group_rounds, const unsigned short* b_up,
           const int* num_rounds, uint4* records, unsigned* masks) {
    extern __shared__ uint4 staged[];
    const Rounds rounds{num_rounds, records, links, masks, group_rounds};
    fill_rounds({partial, partial_stride, Q, b_up}, rounds,
                pair_start, pairs, M, N, tile_tokens, cap, panel_rows, num_panels, staged, Leave{});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    hidden_kept(const float* partial, long long partial_stride, int Q, const uint4* links,
                const int* pair_start, const unsigned* pairs, int M, int N, int tile_tokens,
                int cap, int panel_rows, int num_panels, int group_rounds,
                const unsigned short* b_up, const int* num_rounds, uint4* records, unsigned* masks,
                unsigned* kept) {
    extern __shared__ uint4 staged[];
    const Rounds rounds{num_rounds, records, links, masks, group_rounds};
    fill_rounds({partial, partial_stride, Q, b_up}, rounds,
                pair_start, pairs, M, N, tile_tokens, cap, panel_rows, num_panels, staged,
                Keep{kept});
}
