// The layers of `step` (step.cuh), one after the other, and the head. `Ffn`, which is declared in
// front of this file, has the products and the FFN of the kind of weights.
#pragma once

#include "ptx/barriers.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/handover.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"

namespace {

template <int DIM, int FORM>
struct Step : Ffn {
    using Ffn::Ffn;
    using X = Columns<Weight>;

    // A layer's pointers, into shared memory; wait_for_copies waits.
    __device__ __forceinline__ void keep_layer(int l) const {
        copy_async_if(thread() < kLayerBytes / 16 && l < args.num_layers,
                      memory + kLayers + l % kLayersKept * kLayerBytes + 16 * thread(),
                      reinterpret_cast<const char*>(args.layers + l) + 16 * thread());
        commit_copies();
    }

    // What is small of a layer, into L2: of each the block has some lines.
    __device__ __forceinline__ void fetch_small(int l) const {
        if (l >= args.num_layers) return;
        const Layer& next = layer(l);
        const int first = 64 * (block() + static_cast<int>(gridDim.x) * thread());
        const auto fetch = [&](const unsigned short* from, int num) {
            if (from != nullptr && first < num) prefetch_into_l2(from + first);
        };
        fetch(next.input_norm, K);
        fetch(next.ffn_norm, K);
        fetch(next.qkv_bias, (args.H + 2 * args.Hkv) * DIM);
        fetch(next.gate_bias, args.N);
    }

    // The embedding, the residual, what positions are turned by.
    __device__ __forceinline__ void begin(const Share& own, int position) const {
        const unsigned short* row = args.embeddings + static_cast<long long>(args.tokens[0]) * K;
        for (int i = thread(); i < K / 8; i += kConsumers)  // where sums will be
            load_streamed_if(true, row + 8 * i, at<uint4>(kSums)[i]);
        clear_dealt();
        if (thread() < kQuad * own.num)
            at<float>(kOwn)[thread()] = bf16_value(row[kQuad * own.first + thread()]);
        if (thread() < DIM / 4) {
            const int which = thread() / (DIM / 8), eight = thread() % (DIM / 8);
            load_streamed_if(
                true,
                (which ? args.sin : args.cos) + static_cast<long long>(position) * DIM + 8 * eight,
                at<uint4>(kTurn + which * 2 * kMostDim)[eight]);
        }
        if (block() == 0) {  // nobody counts before all have been told of layer 0
            for (int l = thread(); l < args.num_layers; l += kConsumers) args.counts[l] = 0;
            fence_gpu();
        }
    }

    // What becomes of the sums of a product's rows, a thread a row: logits, q, k and v, or x.
    __device__ __forceinline__ void use_sum(int l, int phase, int row, float bias,
                                            unsigned tag) const {
        float sum = sum_of_warps(sums() + thread() * kWarps);
        if (l == args.num_layers) {
            args.logits[row] = sum;
            return;
        }
        sum += bias;
        if (phase) {
            float& x = at<float>(kOwn)[thread()];
            sum = x = rounded(rounded(sum) + x);
        }
        store_relaxed_word((phase ? row_words(2) : qkv_words()) + word_of(row),
                           tagged(bf16_bits(sum), tag));
    }

    __device__ __forceinline__ void consume() {
        const int L = args.num_layers;
        const Share own(division(1), block());
        const int position = args.positions[0];
        const unsigned epoch = __ldcg(args.epoch);
        uint4 norm[kEights];
        X x;
        load_row(args.layers->input_norm, norm);
        keep_layer(0);
        keep_layer(1);
        begin(own, position);
        wait_for_copies<0>();
        sync_consumers();
        const bool attends = plan_attend<DIM>(position, layer(0).window);
        int turned = block();
#pragma unroll 1
        for (int l = 0;; ++l, turned = turn(turned)) {
            const unsigned tag = (epoch + l + 1) & 0xffff;
            if constexpr (!kHeadIsAlike)
                if (l == L) {
                    Columns<Head> x_of_head;
                    await_x(x_of_head, norm, L, 0, tag);
                    multiply_head(x_of_head);
                    return end_step(epoch);
                }
            keep_layer(l + 2);
            fetch_small(l + 1);
            if (l < L && attends) fetch_cached<DIM>(layer(l));
            // 0: q, k and v, or the head, if it is as they are; 1: o; 2: gate
#pragma unroll 1
            for (int phase = 0; phase < 3; ++phase) {
                const Share share(division(l == L ? 3 : phase),
                                  phase == 1 || l == L ? block() : turned);
                multiply(x, norm, l, phase, share, tag);
                stamp(l, Stage::kOfPhase * phase + Stage::kMultiplied);
                if (l == L) return end_step(epoch);
                if (phase < 2) {  // x is not wanted any more
                    if (phase == 0 && attends) {
                        attend_head<DIM>(layer(l), tag);
                        stamp(l, Stage::kAttended);
                    }
                    continue;
                }
                finish_layer(x, norm, l, share, turned, own, tag);
            }
        }
    }

    // The product of a phase. Its sums become what `use_sum` makes of them, or, those of the gate,
    // stay where they are.
    __device__ __forceinline__ void multiply(X& x, uint4 (&norm)[kEights], int l, int phase,
                                             const Share& share, unsigned tag) {
        const bool screens = FORM == kScreenedForm && phase == 2;
        if constexpr (FORM == kScreenedForm)
            if (screens) {
                await_x(x, norm, l, phase, tag);
                sync_consumers();
                screen(layer(l), share.first, share.num);
                // the map's units wait for what was there before them, which not all warps saw
                if (mapped().num > 0) sync_consumers();
            }
        constexpr int kAtOnce = Layers::kAtOnce;
        int num_units = screens ? 0 : units_of(share.num);
        if (FORM != kDenseForm && phase == 2 && mapped().num > 0)
            num_units += units_of(1) + units_of(mapped().num);
        if (phase == 2) Ffn::template fetch_scales<FORM>(layer(l), share);
        // of the thread's row of those whose sums are used together
        const auto bias_of = [&](int rows_before) -> unsigned {
            if (phase == 2 || l == args.num_layers) return 0;
            const unsigned short* biases = phase ? layer(l).out_bias : layer(l).qkv_bias;
            const int row = rows_before + thread();
            if (biases == nullptr || row >= kQuad * share.num) return 0;
            return load_streamed_half(biases + kQuad * share.first + row);
        };
        unsigned bias = bias_of(0);
        Taken<Weight> taken = {};          // or it would be kept from phase to phase
        if (Weight::kGroupScales) x = {};  // the same; where it is short, that would cost more

        // the first units are taken before x is there
#pragma unroll 1
        for (int i = -kAtOnce; i < num_units; i += kAtOnce) {
            float parts[kAtOnce] = {};
            if (i >= 0) multiply_taken(parts, taken, x);
            if (i + kAtOnce < num_units) take(taken, min(kAtOnce, num_units - i - kAtOnce));
            if (i < 0) {
                if (!screens) await_x(x, norm, l, phase, tag);
                continue;
            }
            const int row = i * kUnitRows % kMostSums, num = min(kAtOnce, num_units - i);
            store_parts(parts, num, sums() + row * kWarps);
            if (row + kTakenRows < kMostSums && i + kAtOnce < num_units) continue;
            if (phase == 2) break;
            sync_consumers();
            int rows = row + num * kUnitRows;
            if (Weight::kGroupScales) rows = min(rows, kQuad * share.num - (i * kUnitRows - row));
            if (thread() < rows)
                use_sum(l, phase, kQuad * share.first + i * kUnitRows - row + thread(),
                        __uint_as_float(bias << 16), tag);
            flip_sums();
            if (i + kAtOnce < num_units) bias = bias_of(i * kUnitRows - row + rows);
        }
    }

    // Behind the gates' sums: the layer's FFN, onto x, to all blocks.
    __device__ __forceinline__ void finish_layer(const X& x, uint4 (&norm)[kEights], int l,
                                                 const Share& share, int turned, const Share& own,
                                                 unsigned tag) {
        wait_for_copies<0>();
        if (FORM != kDenseForm) sync_consumers();
        if constexpr (Weight::kRowScales) fetch_column_scale(layer(l), own);
        layer_at = l;
        if constexpr (FORM != kDenseForm)
            // made anew: kept through the product it takes registers
            Ffn::template ffn<FORM>(layer(l), Share(division(2), opaque(turned)), x, tag,
                                    args.counts + l);
        else
            ffn_dense(layer(l), Weight::kGroupScales ? Share(division(2), opaque(turned)) : share,
                      x, tag, args.counts + l);
        if (Weight::kGroupScales) load_next_norm(norm, l);  // through the FFN it takes registers
        add_parts(layer(l), own, tag);
    }

    // The next step waits for the next tags.
    __device__ __forceinline__ void end_step(unsigned epoch) const {
        if (block() == 0 && thread() == 0) *args.epoch = epoch + args.num_layers;
    }

    // The phase's x, normalised but for o; and the weights of the next norm are asked for.
    template <class Kind>
    __device__ __forceinline__ void await_x(Columns<Kind>& x, uint4 (&norm)[kEights], int l,
                                            int phase, unsigned tag) {
        const unsigned* from = row_words(phase);
        const unsigned wanted = phase ? tag : (tag - 1) & 0xffff;
        uint4 eights[kEights];
#pragma unroll
        for (int i = 0; i < kEights; ++i) {
            if (!all_have(i)) eights[i] = make_uint4(0, 0, 0, 0);
            if (has_eight(i))
                eights[i] = l + phase > 0 ? await_eight(from, 8 * eight_of(i), wanted)
                                          : at<uint4>(kSums)[eight_of(i)];
        }
        __syncwarp();
        stamp(l, Stage::kOfPhase * phase + Stage::kAwaited);
        if (phase != 1) normalise_row(eights, norm);
        if (l == args.num_layers && block() == 0) give_state(eights);
        if constexpr (FORM == kScreenedForm)
            if (phase == 2) round_x(eights);
        if (phase == 1) load_row(layer(l).ffn_norm, norm);
        if (phase == 2 && !Weight::kGroupScales) load_next_norm(norm, l);
        deal(eights, x);
        stamp(l, Stage::kOfPhase * phase + Stage::kDealt);
    }

    // What the head multiplies.
    __device__ __forceinline__ void give_state(const uint4 (&eights)[kEights]) const {
#pragma unroll
        for (int i = 0; i < kEights; ++i)
            if (has_eight(i)) reinterpret_cast<uint4*>(args.x)[eight_of(i)] = eights[i];
    }

    __device__ __forceinline__ void load_next_norm(uint4 (&norm)[kEights], int l) const {
        load_row(l + 1 == args.num_layers ? args.last_norm : layer(l + 1).input_norm, norm);
    }

    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kUnits; ++i) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), kWarps);
            }
            barrier_init(has_rows(), kWarps);
            barrier_init_fence();
        }
        if (threadIdx.x < 5) {
            // by quads of rows, or row blocks that are screened
            constexpr int kRows = FORM == kScreenedForm ? kScreenRows : kQuad;
            const int which = threadIdx.x, num_blocks = gridDim.x;
            const int own = FORM == kDenseForm ? args.N : args.layers->num_own;
            const int blocks = (own + kRows - 1) / kRows, shared = max(0, args.N - blocks * kRows);
            const int all = which == 0   ? (args.H + 2 * args.Hkv) * DIM / kQuad
                            : which == 1 ? K / kQuad
                            : which == 2 ? blocks
                            : which == 3 ? args.V / kQuad
                                         : shared / kQuad;
            at<Division>(kDivisions)[which] = {all / num_blocks, all % num_blocks};
            if (which == 4) at<Division>(kDivisions)[5] = {blocks * kRows, shared};
        }
        __syncthreads();
        if (threadIdx.x < kConsumers)
            consume();
        else if (threadIdx.x == kConsumers)
            produce<FORM>();
    }
};

}  // namespace

#define TWELL_STEP(name, DIM, FORM)                                                                \
    extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)                               \
        name(const Layer* layers, int num_layers, int N, int V, int H, int Hkv, const int* tokens, \
             const int* positions, const int* tables, const unsigned short* embeddings,            \
             const unsigned short* last_norm, const void* head, const float* head_scales,          \
             const unsigned short* cos, const unsigned short* sin, float eps, float scale,         \
             int is_silu, unsigned* words, unsigned* epoch, int* counts, float* logits,            \
             float* most, float* least, unsigned short* x, long long* stamps) {                    \
        extern __shared__ __align__(1024) char memory[];                                           \
        if (dynamic_smem_bytes() < Block::kBytes) __trap();                                        \
        const Args args = {                                                                        \
            layers,     num_layers, N,      V,           H,    Hkv,   tokens, positions, tables,   \
            embeddings, last_norm,  head,   head_scales, cos,  sin,   eps,    scale,     is_silu,  \
            words,      epoch,      counts, logits,      most, least, x,      stamps};             \
        Step<DIM, FORM>(args, memory).run();                                                       \
    }

TWELL_ENTRIES(TWELL_STEP)
