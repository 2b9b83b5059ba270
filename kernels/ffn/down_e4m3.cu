// down over e4m3: W_down in e4m3, two columns to a short, with scales of its columns; h in f16
// (down.cuh).
#include "ffn/down.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    down_e4m3(const unsigned short* w_down, const unsigned short* b_down, const int* num_rounds,
              const uint4* rounds, const unsigned* masks, int M, int N, int K, int panel,
              int panel_rows, int num_panels, int group_rounds, float* y32, unsigned short* y,
              const float2* token_scales, const float* column_scales) {
    extern __shared__ uint4 planes[];
    sum_rounds(w_down, nullptr, num_rounds, rounds, masks, M, N, K, panel, panel_rows, num_panels,
               group_rounds, y32, y, planes,
               E4m3Columns{b_down, token_scales, column_scales, y32, y, M, K, panel, num_panels});
}
