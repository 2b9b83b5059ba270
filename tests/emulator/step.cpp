// step (kernels/decode/step.cuh), emulated: TWELL_STEP_K, STEP_DIM and STEP_SPARSE come from outside.
#include "instructions.h"
#include "decode/step.cuh"

extern "C" int most_quads() { return kOwnQuads; }
extern "C" int most_rows() { return kMostRows; }

extern "C" int step(int num_blocks, unsigned seed, const Layer* layers, int num_layers, int N,
                    int V, int H, int Hkv, const int* tokens, const int* positions,
                    const int* tables, const unsigned short* embeddings,
                    const unsigned short* last_norm, const unsigned short* head,
                    const unsigned short* cos, const unsigned short* sin, float eps, float scale,
                    unsigned* words, unsigned* epoch, int* counts, float* logits) {
    const Args args = {layers,     num_layers, N,    V,   H,   Hkv, tokens, positions,
                       tables,     embeddings, last_norm, head, cos, sin, eps, scale,
                       words,      epoch,      counts,    logits};
    return emulator::run(num_blocks, kConsumers + 32, (Block::kBytes + 1023) / 1024 * 1024, seed,
                         [&](char* memory) { Step<STEP_DIM, STEP_SPARSE>(args, memory).run(); });
}
