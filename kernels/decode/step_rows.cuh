// step_rows: a step of 2 to 16 tokens, each of a text of its own, all layers and the head, in one
// kernel; a block a multiprocessor (Hopper). For models of hidden size 2048 whose heads of q are so
// many columns together; the sparse form. `step` (step.cuh) does the same for one token.
//
//   layers, embeddings, last_norm, head, cos, sin   as `step` takes them
//   tokens, positions   int32 [B]; tables: int32, rows `table_stride` apart; position p of row b
//                 lies in page tables[b, p / 64]
//   words         uint32, all bits set before the first launch: Block::part_words(kOwners, 0) of
//                 them four times; for launches with this B alone
//   epoch         uint32 [1], zero before the first launch: how often words were used
//   counts        int32 [num_layers, B]: neurons that fired
//   logits        float32 [B, V]
//
//     x -> norm -> q, k, v ->  attend  -> o, onto x -> norm -> gate -> up -> down -> sum
//       all            a head's        all              all       own  a part's  16 parts
//
// The chain is that of `step`: one warp streams through a ring what the others will need, and below
// each arrow stands whose results a block waits for. What is different:
// - All columns of an mma are tokens: x is in registers, and weights are read from rows that lie
//   4096 + 64 bytes apart (step_rows_products.cuh).
// - The caches of 16 texts are as large as q, k, v and o of a layer. They come through the ring,
//   too, while q is waited for.
// - A block reads up to 64 KB at a hand-over; tags would double that. So a word is all bits set
//   until it is written, which no number is: a NaN is 0x7fff. It is taken back two layers later,
//   when all have read it: who has x of a layer knows that all blocks are through with the layer
//   before. Words lie four times, for layers by turns, which go on from launch to launch.
// - Parts of y of all blocks would be 17 MB. So what fired is handed round, as bits, then what its
//   rows are multiplied by; a block has columns of many blocks' neurons (step_rows_ffn.cuh).
// - x takes 64 registers a lane. So the two warpgroups that compute get some of the third's, of
//   which two warps work: one brings rows of down.
//
// Rounding is as in the kernels for few tokens, but for RMSNorm: x times its weights is rounded, and
// the root is multiplied by the sums. Sums have one order: the same bits each time, and whatever the
// other tokens are.
//
// All blocks must run at the same time: no more than there are multiprocessors, and nothing else on
// the GPU that waits for this to end.
//
// Launch: step_rows_K_DIM, one block a multiprocessor, kOwners to kMostBlocks of them; at most
// Cached<DIM>::kTasks of the B H heads and kNeurons neurons a block; kThreads threads;
// Block::kBytes of dynamic shared memory.
#pragma once

#include "decode/step_rows_ffn.cuh"
#include "ptx/barriers.cuh"
#include "ptx/handover.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"

namespace {

template <int DIM>
struct Step : Neurons {
    using Neurons::Neurons;

    // ---- the warp that brings: of all layers, one after the other

    __device__ __forceinline__ void produce() const {
        const unsigned long long policy = passing_by();
        const Share gates = share(2, block());
        Ring ring = {0, 0, 0, 0, 1, 0, 0};
#pragma unroll 1
        for (int l = 0; l < args.num_layers; ++l) {
            const Layer* layer = args.layers + l;
            bring_rows(ring, layer->qkv, share(0, block()), policy);
            bring_cached<DIM>(ring, layer, policy);
            bring_rows(ring, layer->out, share(1, block()), policy);
            bring_rows(ring, layer->gate, gates, policy);
            barrier_wait(listed(), l & 1);
            bring_ups(ring, layer->up, 8 * gates.first, policy);
        }
        bring_rows(ring, args.head, share(3, block()), policy);
    }

    __device__ __forceinline__ void produce_downs() const {
        if (block() >= kOwners) return;
        const unsigned long long policy = passing_by();
        const unsigned epoch = __ldcg(args.epoch);
        unsigned refill = 1;
#pragma unroll 1
        for (int l = 0; l < args.num_layers; ++l) {
            barrier_wait(listed(), l & 1);
            bring_downs(args.layers[l].down, epoch + l, refill, policy);
        }
    }

    // ---- the warps that compute

    // The next layer's pointers, into shared memory.
    __device__ __forceinline__ void keep_layer(int l) const {
        const auto* from = reinterpret_cast<const unsigned long long*>(args.layers);
        if (thread() < kLayerWords && l < args.num_layers)
            at<unsigned long long>(kLayers)[l % kLayersKept * kLayerWords + thread()] =
                __ldg(from + l * kLayerWords + thread());
    }

    // The residual; rows of down, since 0 times what was there before may be NaN.
    __device__ __forceinline__ void begin() const {
        if (thread() < kTokens * kOwn / 4 && block() < kOwners) {
            const int token = thread() / 4;
            float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
            if (token < args.num_tokens) {
                const unsigned short* row = args.embeddings +
                                            static_cast<long long>(args.tokens[token]) * K +
                                            block() * kOwn + thread() % 4 * 4;
                x = make_float4(bf16_value(row[0]), bf16_value(row[1]), bf16_value(row[2]),
                                bf16_value(row[3]));
            }
            at<float4>(kOwnX)[thread()] = x;
        }
        for (int i = thread(); i < kDowns * kDownPitch / 16; i += kConsumers)
            at<uint4>(kDown)[i] = four_times(0);
        fence_for_engine();
        if (thread() < kTokens) at<int>(kCounts)[thread()] = 0;
        if (block() == 0) {  // nobody counts before all have been told of layer 0
            for (int i = thread(); i < args.num_layers * args.num_tokens; i += kConsumers)
                args.counts[i] = 0;
            fence_gpu();
        }
    }

    // What becomes of an octet's sums, a warp an octet: logits, q, k and v, or x.
    __device__ __forceinline__ void use_sum(const Layer& layer, bool is_head, int phase, int octet,
                                            unsigned tick) const {
        const int token = lane() / 2, row = 8 * octet + lane() % 2 * 4;
        float4 sum = phase == 1 ? sum_of_octet() : normalised_sum(token);
        if (is_head) {
            if (token < args.num_tokens)
                *reinterpret_cast<float4*>(args.logits + static_cast<long long>(token) * args.V +
                                           row) = sum;
            return;
        }
        add_bias(sum, phase ? layer.out_bias : layer.qkv_bias, row);
        if (phase) {
            float4& x = at<float4>(kOwnX)[token * (kOwn / 4) + row % kOwn / 4];
            sum = x = onto(x, sum);
        }
        if (token < args.num_tokens)
            give(tick, phase ? row_words(2) + place_in_row(token, row)
                             : qkv_words() + (token * num_columns() + row) / 2,
                 rounded_four(sum));
    }

    // 0: q, k and v, or the head; 1: o; 2: gate, whose sums are left where they are. And asks for
    // the weights of the next norm.
    __device__ __forceinline__ void multiply_rows(Slice& x, uint4& norm, int l, int phase,
                                                  unsigned tick) {
        const bool is_head = l == args.num_layers;
        const Share own = share(is_head ? 3 : phase, block());
        const unsigned short* next = phase == 0                ? nullptr
                                     : phase == 1              ? layer(l).ffn_norm
                                     : l + 1 < args.num_layers ? layer(l + 1).input_norm
                                                               : args.last_norm;
        if (own.num == 0) {
            if (next) norm = norm_weights(next);
            return;
        }
        Octet octet;
        take(octet);  // before x is there
        if (l + phase == 0)
            embed(x);
        else
            await_x(x, words(tick) + row_words(phase));
        if (phase != 1) normalise_x(x, norm);
        sync_consumers();  // all have done with the sums before
        if (next) norm = norm_weights(next);
        int done = 0;  // octets whose sums were used
#pragma unroll 1
        for (int i = 0; i < own.num;) {
            multiply(x, octet, i - done);
            if (++i < own.num) take(octet);
            if (i - done < kOctets && i < own.num) continue;
            sync_consumers();
            if (phase == 2) return;
            if (warp() < i - done)
                use_sum(layer(l), is_head, phase, own.first + done + warp(), tick);
            done = i;
            if (i < own.num) sync_consumers();
        }
    }

    __device__ __forceinline__ void ffn(const Slice& x, const Layer& layer, const Share& own, int l,
                                        unsigned tick) {
        use_gates(layer, own, tick);
        barrier_wait(listed(), l & 1);
        if (thread() < args.num_tokens) {
            int& count = at<int>(kCounts)[thread()];
            if (count) atomicAdd(args.counts + l * args.num_tokens + thread(), count);
            count = 0;
        }
        take_back_hidden(tick);
        const uint2 both = fired();
        const int num = __popc(both.x) + __popc(both.y);
#pragma unroll 1
        for (int i = 0; 8 * i < num; ++i) {
            Octet octet;
            take(octet);
            multiply(x, octet, i);
        }
        sync_consumers();
        give_hidden(layer, own, num, tick);
        if (block() >= kOwners) return;
        multiply_downs(l, tick);
        sync_consumers();
        add_parts(layer, tick);
    }

    __device__ __forceinline__ void consume() {
        const unsigned epoch = __ldcg(args.epoch);
        const Share gates = share(2, block());
        uint4 norm = norm_weights(args.layers->input_norm);
        keep_layer(0);
        begin();
        sync_consumers();
        Slice x;
#pragma unroll 1
        for (int l = 0;; ++l) {
            const unsigned tick = epoch + l;
            keep_layer(l + 1);
#pragma unroll 1
            for (int phase = 0; phase < 3; ++phase) {
                multiply_rows(x, norm, l, phase, tick);
                if (l == args.num_layers) {
                    if (block() == 0 && thread() == 0) *args.epoch = tick;
                    return;
                }
                if (phase == 0)
                    attend_heads<DIM>(layer(l), tick, [&] {
                        if (block() < kOwners) take_back_parts(tick);
                    });
                if (phase == 2) ffn(x, layer(l), gates, l, tick);
            }
        }
    }

    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kUnits; ++i) barrier_init(full(i), 1);
            for (int i = 0; i < kPlaces; ++i) barrier_init(empty(i), kWarps);
            barrier_init(listed(), kOctets);
            barrier_init(mapped(), 1);
            barrier_init(down_full(), 1);
            barrier_init(down_empty(), kWarps);
            barrier_init_fence();
        }
        if (threadIdx.x < Cached<DIM>::kTasks) plan_task(threadIdx.x);
        __syncthreads();
        if (threadIdx.x < kConsumers) {
            take_registers<216>();
            consume();
        } else {
            give_registers<72>();
            if (threadIdx.x < kConsumers + 32)
                produce();
            else if (threadIdx.x < kConsumers + 64)
                produce_downs();
        }
    }
};

}  // namespace

#define TWELL_STEP_ROWS(name, DIM)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name(                              \
        const Layer* layers, int num_layers, int N, int V, int H, int Hkv, const int* tokens,    \
        const int* positions, const int* tables, int num_tokens, int table_stride,               \
        const unsigned short* embeddings, const unsigned short* last_norm,                       \
        const unsigned short* head, const unsigned short* cos, const unsigned short* sin,        \
        float eps, float scale, unsigned* words, unsigned* epoch, int* counts, float* logits) {  \
        extern __shared__ __align__(1024) char memory[];                                         \
        if (dynamic_smem_bytes() < Block::kBytes) __trap();                                      \
        const Args args = {layers, num_layers, N,    V,     H,   Hkv,   tokens, positions,       \
                           tables, num_tokens, table_stride, embeddings, last_norm, head, cos,   \
                           sin,    eps,        scale, words, epoch, counts, logits};             \
        Step<DIM>(args, memory).run();                                                           \
    }
