// few_hidden: the sparse hidden state of 1 to 64 tokens (tile/few_product.cuh). The gate product is
// made whole; of what fires, and of nothing else, up follows at once, in the block that found it:
//
//     gate = x W_gate^T + b_gate        fires where above 0, or NaN
//     hidden[n, token] = gate * up where it fires, else 0     for each neuron n that fires for any
//
// hidden bf16 [N, 8 OCTETS]: rows of neurons that fired for no token are not written, nor what lies
// behind token M. fired, 16 bits for each row block of 16 neurons: those of the written rows.
// counts int32 [M], or null: raised by how many neurons fired for each token. gate_scale and
// up_scale are float32 [N], of the rows of these weights, or null if their kind has none
// (tile/weights.cuh).
//
// A block goes through its neurons by up to 128: their gates, then up of those that fired, gathered
// by their list. Rows of W_down that will be wanted are on their way into L2 meanwhile.
//
// Launch: as few_linear; dynamic shared memory as there and 160 + 260 * 8 OCTETS bytes more.
#include "spec.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/few_product.cuh"
#include "tile/fires.cuh"
#include "tile/warp.cuh"
#include "tile/weights.cuh"

namespace {

constexpr int kNeurons = 128;  // that a block has at hand
constexpr int kRowBlocks = kNeurons / few::kRows;
template <class Weight>
constexpr int kLineOf = 1024 / Weight::kBits;  // weights that a prefetch brings
constexpr int kWarpRows = 16;  // fired neurons, at most, of which a warp takes one at a time

// Of the neurons at hand: who fired, and the gates.
template <int TOKENS>
struct alignas(16) AtHand {
    unsigned fired[kRowBlocks];  // 16 bits each
    unsigned char list[kNeurons];
    int counts[TOKENS];
    unsigned short gates[kNeurons * TOKENS];  // 0 where nothing fired

    // All are listed, none has fired yet.
    __device__ __forceinline__ void begin() {
        if (threadIdx.x < kRowBlocks) fired[threadIdx.x] = 0;
        if (threadIdx.x < kNeurons) list[threadIdx.x] = threadIdx.x;
    }

    // The list of all that fired; how many.
    __device__ __forceinline__ int make_list() {
        int before = 0, num = 0;
        const int own = threadIdx.x / few::kRows, bit = threadIdx.x % few::kRows;
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
            if (i < own) before += __popc(fired[i]);
            num += __popc(fired[i]);
        }
        if (threadIdx.x < kNeurons && fired[own] >> bit & 1)
            list[before + num_set_below(fired[own], bit)] = static_cast<unsigned char>(threadIdx.x);
        return num;
    }
};

// Rows of a weight that will be wanted soon.
template <class Weight>
__device__ __forceinline__ void fetch_into_l2(const typename Weight::Memory* weight,
                                              const unsigned char* list, int num, int K) {
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < num; i += few::kWarps)
#pragma unroll 1
        for (int at = threadIdx.x % 32 * kLineOf<Weight>; at < K; at += 32 * kLineOf<Weight>)
            prefetch_into_l2(Weight::at(weight, static_cast<long long>(list[i]) * K + at));
}

// x . row of one token, by a warp: 64 weights a lane under way at once.
template <class Weight>
__device__ __forceinline__ float dot_of_warp(const unsigned short* x,
                                             const typename Weight::Memory* row, int K) {
    constexpr int kEach = Weight::kEach, kLoads = 64 / kEach, kWarp = 32 * kEach;
    float sum = 0;
#pragma unroll 1
    for (int first = threadIdx.x % 32 * kEach; first < K; first += kWarp * kLoads) {
        const auto* from = Weight::at(row, first);
        uint4 weights[kLoads] = {}, values[kLoads][kEach / 8] = {};
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            load_streamed_if(first + kWarp * i < K, Weight::at(from, kWarp * i), weights[i]);
#pragma unroll
            for (int j = 0; j < kEach; j += 8)
                if (first + kWarp * i < K)
                    values[i][j / 8] = load_written(x + first + kWarp * i + j);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            float a[kEach], b[8];
            Weight::unpack(weights[i], a);
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                if (j % 8 == 0) unpack(values[i][j / 8], b);
                sum += a[j] * b[j % 8];
            }
        }
    }
    return sum_over_lanes(sum);
}

template <class SIZES>
__device__ constexpr unsigned needed_bytes(int M, int, int K) {
    return SIZES::kBytes + sizeof(AtHand<few::kOctet * SIZES::kOctets>) + SIZES::x_bytes(M, K);
}

// What a launch is given, and what a block does with it.
template <class SIZES>
struct Hidden {
    static constexpr int kTokens = few::kOctet * SIZES::kOctets;
    using Weight = typename SIZES::Weight;
    using Memory = typename Weight::Memory;
    using Rows = few::ListedRows<Weight>;
    using Hand = AtHand<kTokens>;

    const unsigned short* x;
    const Memory *w_gate, *w_up, *w_down;
    const unsigned short *b_gate, *b_up;
    int M, N, K;
    unsigned short *hidden, *fired;
    int* counts;
    const float *gate_scale, *up_scale;

    __device__ __forceinline__ void run() const {
        extern __shared__ uint4 memory[];
        if (dynamic_smem_bytes() < needed_bytes<SIZES>(M, N, K)) __trap();
        Hand& hand = *reinterpret_cast<Hand*>(reinterpret_cast<char*>(memory) + SIZES::kBytes);
        const few::Share share((N + few::kRows - 1) / few::kRows);
        if (threadIdx.x < kTokens) hand.counts[threadIdx.x] = 0;
        const unsigned address = opaque(smem_address(memory));
#pragma unroll 1
        for (int begin = share.begin; begin < share.end; begin += kRowBlocks)
            take(hand, address, begin, min(kRowBlocks, share.end - begin), begin == share.begin);
        finish(hand);
    }

  private:
    // Of gate or of up, and from which neuron on.
    struct Side {
        const unsigned short* bias;
        const float* scale;
        int first_neuron;
    };

    // Of the neurons of row blocks from `begin` on the gates of all; then, by the same code, up of
    // those that fired.
    __device__ __forceinline__ void take(Hand& hand, unsigned address, int begin, int num_blocks,
                                         bool are_first) const {
        const int first_neuron = begin * few::kRows;
        const long long start = static_cast<long long>(first_neuron) * K;
        hand.begin();
        __syncthreads();
        Rows rows = {Weight::at(w_gate, start), min(num_blocks * few::kRows, N - first_neuron),
                     smem_address(hand.list)};
#pragma unroll 1
        for (int is_up = 0; is_up < 2; ++is_up) {
            const Side of = {is_up ? b_up : b_gate, is_up ? up_scale : gate_scale, first_neuron};
            // of one token, and few neurons, a warp takes a row: that saves two exchanges
            if (SIZES::kOctets == 1 && is_up && M == 1 && rows.num <= kWarpRows) {
                multiply_by_warps(hand, rows, of);
                break;
            }
            multiply(hand, address, rows, of, is_up, !is_up && are_first);
            if (is_up) break;
            rows.weight = Weight::at(w_up, start), rows.num = hand.make_list();
            if (threadIdx.x < num_blocks)
                fired[begin + threadIdx.x] = static_cast<unsigned short>(hand.fired[threadIdx.x]);
            __syncthreads();
        }
        __syncthreads();
    }

    // Up of the list's neurons, of one token, a warp a row.
    __device__ __forceinline__ void multiply_by_warps(const Hand& hand, const Rows& rows,
                                                      const Side& of) const {
        fetch_down(hand, rows, of.first_neuron);
        for (int i = threadIdx.x / 32; i < rows.num; i += few::kWarps) {
            const int n = hand.list[i];
            const auto* row = Weight::at(rows.weight, static_cast<long long>(n) * K);
            float up = dot_of_warp<Weight>(x, row, K);
            up = Weight::scaled(up, of.scale, of.first_neuron + n);
            if (of.bias) up += bf16_value(of.bias[of.first_neuron + n]);
            if (threadIdx.x % 32 == 0)
                hidden[static_cast<long long>(of.first_neuron + n) * kTokens] =
                    static_cast<unsigned short>(
                        bf16_bits(bf16_value(hand.gates[n * kTokens]) * rounded(up)));
        }
    }

    // The gates of the neurons at hand, or up of the list's. The product that `is_first` waits for
    // x.
    __device__ __forceinline__ void multiply(Hand& hand, unsigned address, const Rows& rows,
                                             const Side& of, int is_up, bool is_first) const {
        few::Product<SIZES, Rows> product(address, address + SIZES::kBytes + sizeof(Hand), x, M, K,
                                          rows);
        product.begin();
        if (is_up) fetch_down(hand, rows, of.first_neuron);
        if (is_first) {
            wait_for_previous();
            let_next_start();
            product.begin_x();
            product.settle_x();
        }
        product.run([&](int first, int num) {
            product.for_each(num, [&](int block, int row, int token) {
                const int place = (first + block) * few::kRows + row;
                const bool is_there = place < rows.num && token < M;
                const int n = is_up && is_there ? hand.list[place] : place;
                float sum = is_there ? product.sum(block, row, token) : 0.f;
                if (is_there) sum = Weight::scaled(sum, of.scale, of.first_neuron + n);
                if (of.bias && is_there) sum += bf16_value(of.bias[of.first_neuron + n]);
                const unsigned bits = is_there ? bf16_bits(sum) : 0;
                unsigned short& gate = hand.gates[n * kTokens + token];
                if (!is_up)
                    keep_gate(hand, gate, first + block, row, token, bits);
                else if (is_there)
                    keep_hidden(gate, of.first_neuron + n, token, bits);
            });
        });
    }

    // Rows of W_down of the list's neurons, which will be wanted soon.
    __device__ __forceinline__ void fetch_down(const Hand& hand, const Rows& rows,
                                               int first_neuron) const {
        const long long start = static_cast<long long>(first_neuron) * K;
        fetch_into_l2<Weight>(Weight::at(w_down, start), hand.list, rows.num, K);
    }

    // What of a gate's bits is kept, and that its neuron fired; by a half warp for the 16 rows.
    __device__ __forceinline__ void keep_gate(Hand& hand, unsigned short& gate, int row_block,
                                              int row, int token, unsigned bits) const {
        if (!fires(bf16_value(bits))) bits = 0;
        gate = static_cast<unsigned short>(bits);
        if (bits && counts) atomicAdd(&hand.counts[token], 1);
        const unsigned half_warp = 0xffffu << (threadIdx.x & 16);
        const unsigned all = __ballot_sync(half_warp, bits != 0) & half_warp;
        if (row == 0 && all) atomicOr(&hand.fired[row_block], all >> (threadIdx.x & 16));
    }

    __device__ __forceinline__ void keep_hidden(unsigned gate, int neuron, int token,
                                                unsigned up) const {
        const unsigned bits = gate ? bf16_bits(bf16_value(gate) * bf16_value(up)) : 0;
        hidden[static_cast<long long>(neuron) * kTokens + token] =
            static_cast<unsigned short>(bits);
    }

    // The half of a word of `fired` that no row block has; and the counts.
    __device__ __forceinline__ void finish(const Hand& hand) const {
        const int num_blocks = (N + few::kRows - 1) / few::kRows;
        if (blockIdx.x == 0 && num_blocks + threadIdx.x < (num_blocks + 1) / 2 * 2)
            fired[num_blocks + threadIdx.x] = 0;
        if (counts && static_cast<int>(threadIdx.x) < M) {
            const int own = hand.counts[threadIdx.x];
            if (own) atomicAdd(counts + threadIdx.x, own);
        }
    }
};

}  // namespace

#define TWELL_FEW_HIDDEN(name, Weight, ...)                                                        \
    extern "C" __global__ void __launch_bounds__(few::kThreads, 1)                                 \
        name(const unsigned short* x, const Weight::Memory* w_gate, const Weight::Memory* w_up,    \
             const Weight::Memory* w_down, const unsigned short* b_gate,                           \
             const unsigned short* b_up, int M, int N, int K, unsigned short* hidden,              \
             unsigned short* fired, int* counts, const float* gate_scale, const float* up_scale) { \
        Hidden<few::Sizes<Weight, __VA_ARGS__>>{                                                   \
            x, w_gate, w_up,   w_down, b_gate, b_up,       M,                                      \
            N, K,      hidden, fired,  counts, gate_scale, up_scale}                               \
            .run();                                                                                \
    }

TWELL_ENTRIES(TWELL_FEW_HIDDEN)
