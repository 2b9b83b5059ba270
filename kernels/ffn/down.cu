// down over bf16: down.cuh has it all.
#include "ffn/down.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    down(const unsigned short* w_down, const unsigned short* b_down, const int* num_rounds,
         const uint4* rounds, const unsigned* masks, int M, int N, int K, int panel, int panel_rows,
         int num_panels, int group_rounds, float* y32, unsigned short* y) {
    extern __shared__ uint4 planes[];
    sum_rounds<Bf16Columns>(w_down, b_down, num_rounds, rounds, masks, M, N, K, panel, panel_rows,
                            num_panels, group_rounds, y32, y, planes);
}
