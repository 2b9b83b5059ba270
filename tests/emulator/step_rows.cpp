// step_rows (kernels/decode/step_rows.cuh), emulated: STEP_DIM comes from outside.
#include "rows.h"
#include "decode/step_rows.cuh"

extern "C" int step_rows(int num_blocks, unsigned seed, const Layer* layers, int num_layers, int N,
                         int V, int H, int Hkv, const int* tokens, const int* positions,
                         const int* tables, int num_tokens, int table_stride,
                         const unsigned short* embeddings, const unsigned short* last_norm,
                         const unsigned short* head, const unsigned short* cos,
                         const unsigned short* sin, float eps, float scale, unsigned* words,
                         unsigned* epoch, int* counts, float* logits) {
    const Args args = {layers, num_layers, N,    V,     H,   Hkv,   tokens, positions,
                       tables, num_tokens, table_stride, embeddings, last_norm, head, cos,
                       sin,    eps,        scale, words, epoch, counts, logits};
    return emulator::run(num_blocks, kThreads, (Block::kBytes + 1023) / 1024 * 1024, seed,
                         [&](char* memory) { Step<STEP_DIM>(args, memory).run(); });
}
