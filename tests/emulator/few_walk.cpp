// few_walk (kernels/ffn/few_walk.cuh), emulated: WALK_ALL and WALK_SIZE come from outside.
#include "clusters.h"
#include "ffn/few_walk.cuh"

extern "C" int few_walk_bytes(int cap, int ways, int warps, int columns) {
    return few_walk::Sizes{0, 0, cap, ways, warps, columns}.bytes(WALK_SIZE);
}

extern "C" int few_walk_of(int tokens, int num_threads, int num_bytes, unsigned seed,
                           const unsigned short* x, const unsigned short* w_up,
                           const unsigned short* w_down, const unsigned short* b_up,
                           const unsigned short* b_down, const unsigned short* gate,
                           const unsigned short* residual, int N, int K, int cap,
                           int ways, int warps, int columns, int* counts, unsigned short* y) {
    emulator::cluster_size = WALK_SIZE;
    emulator::cluster_meetings.clear();
    return emulator::run(tokens * WALK_SIZE, num_threads, num_bytes, seed, [&](char* memory) {
        few_walk::walk_token<WALK_ALL, WALK_SIZE>(
            x, w_up, w_down, b_up, b_down, gate, residual,
            {N, K, cap, ways, warps, columns}, counts, y, reinterpret_cast<uint4*>(memory));
    });
}
