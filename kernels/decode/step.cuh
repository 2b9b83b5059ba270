// step: a whole step of one token, all layers and the head, in one kernel; a block a multiprocessor
// (Hopper). For models of hidden size K = spec::STEP_K whose heads of q are K columns together.
//
//   layers      Layer [num_layers]: a layer's weights by rows, its cache and window;
//               biases and the norms of q and k may be null, windows are the same in all layers.
//               Of a kind of weights with scales (tile/weights.cuh) they come last, fp32; of int4
//               those of down alone, bf16
//   tokens, positions   int32 [1]; tables: int32, position p lies in page tables[p / 64]
//   embeddings  [., K]; last_norm [K]; head [V, K]; cos, sin [positions, DIM]; all bf16. The head
//               of int4 layers has 8 bits: step_head.cuh says what it, head_scales, most and least
//               are; of other layers there are none of the latter
//   words       uint32, zero before the first launch; step_block.cuh says what lies where
//   epoch       uint32 [1], zero before the first launch: how often words were used
//   counts      int32 [num_layers]: neurons that fired
//   logits      float32 [V]; V may be 0, then nothing is read of a head
//   x           bf16 [K]: what the head multiplies, normalised
//   stamps      int64 [num_layers, Stage::kAll, blocks], or null: clocks behind the stages of a
//               layer (step_shared.cuh); what a block does not do it leaves as it is
//   is_silu     1: the dense form has SiLU in the place of ReLU, and counts nothing
//
// A layer has some 60 MB of weights (of K 2048 in bf16), and for one token each weight is
// multiplied once: the step takes as long as reading them. So a ninth warp requests weights all the
// time, matrix after matrix and layer after layer, into a ring of some 190 KB (`produce`), while
// the eight other warps wait for results of other blocks (`consume`):
//
//     x -> norm -> q, k, v -> attend -> o, onto x -> norm -> gate -> what fired -> up, down -> sum
//       all            a head's      all             all        own                all        own
//
// Below each arrow stands whose results a block waits for: those of all blocks, of the blocks that
// have a head, or its own. A block that finds that a neuron fires reads its rows of up and down
// (step_rows.cuh) and writes what they add to y. Of its own columns of y a block adds up the parts
// of all blocks. These five exchanges use words with tags (step_words.cuh): there is no barrier
// over the GPU, and no fence.
//
// Neurons that share one gate, the linear map of a fit, come last. Each block has as many of them
// as the others, and their gate next to its own gates. They fire together, so the ring brings their
// rows, as in the dense form. The form "screened" reads a copy of the gate in 4 bits, and those
// rows of the gate that the copy does not rule out (step_screen.cuh).
//
// What makes it fast (MEASURED.md has the times):
// - Only kAhead units of a block are on their way at a time, which keeps the memory busy. Memory
//   answers requests in their order: if more weights were requested, later requests, those for
//   words included, would wait for them. For the same reason the ring requests only kEager units of
//   the next layer before the rows of this layer's fired neurons have arrived.
// - Whoever awaits words reads whole lines of them. What is small of a layer (pointers, norms,
//   biases) is on its way a layer ahead: a load that comes late holds up all looks at words behind
//   it.
// - A head's positions are parts of several blocks, whose results its first block awaits side by
//   side.
// - No local memory is used: with so much shared memory, L1 has 28 KB left for the stacks of 288
//   threads.
// - Weights go from the ring to the tensor cores as they lie, four units at a time. The first four
//   are read before x has arrived.
// - The three products of a layer share their code, which is short.
//
// Weights of 8 bits (tile/weights.cuh) take half the bytes, so a unit has twice the rows, or half
// the bytes. e4m3 becomes f16 on its way to the tensor cores, by one instruction for two weights; x
// is f16 there, too, times a power of two for each warp and product. The scales of rows come with
// the rows. The scales of the columns of y are requested as soon as the gates are known. The head
// stays bf16: its units have as many bytes, and fewer rows.
//
// int4 has other products, which step_codes.cuh describes; step_int4.cuh puts them in the place of
// these. Its gate is its own screen, and its head, of 8 bits, gives rough logits.
//
// Numbers are rounded where the kernels for few tokens round them. Sums are added in a fixed order,
// so a step has the same bits each time.
//
// All blocks must run at the same time: at most one block per multiprocessor, and nothing else on
// the GPU that waits for this kernel to end.
//
// Launch: step_K_DIM, step_K_DIM_dense or step_K_DIM_screened, the first two also with the end of
// another kind of weights (_e4m3, _int4); one block per multiprocessor, at least H and K / 4 /
// kOwnQuads of them; at most kMostRows rows of the gate per block; 288 threads; Block::kBytes of
// dynamic shared memory.
#pragma once

#include "decode/step_ffn.cuh"

namespace {
using Ffn = Neurons;
}  // namespace

#include "decode/step_layers.cuh"
