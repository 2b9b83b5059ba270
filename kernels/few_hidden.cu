// few_hidden: the sparse hidden state of 1 to 64 tokens (few.cuh). The gate product is made whole;
// of what fires, and of nothing else, up follows at once, in the block that found it:
//
//     gate = x W_gate^T + b_gate        fires where above the threshold, or NaN
//     hidden[n, token] = gate * up where it fires, else 0     for each neuron n that fires for any
//
// hidden bf16 [N, 8 OCTETS]: rows of neurons that fired for no token are not written, nor what lies
// behind token M. fired, 16 bits for each row block of 16 neurons: those of the written rows.
// counts int32 [M], or null: raised by how many neurons fired for each token.
//
// A block goes through its neurons by up to 128: their gates, then up of those that fired, gathered
// by their list. Rows of W_down that will be wanted are on their way into L2 meanwhile.
//
// Launch: as few_linear; dynamic shared memory as there and 160 + 260 * 8 OCTETS bytes more.
#include "few.cuh"

namespace {

constexpr int kNeurons = 128;  // that a block has at hand
constexpr int kRowBlocks = kNeurons / few::kRows;
constexpr int kLine = 64;  // elements that a prefetch brings

// Rows of a weight by a list of them.
struct ListedRows {
    const unsigned short* weight;
    const unsigned char* list;
    int num, K;

    __device__ __forceinline__ const unsigned short* operator()(int block, int row) const {
        const int i = block * few::kRows + row;
        return i < num ? weight + static_cast<long long>(list[i]) * K : nullptr;
    }
};

// Of the neurons at hand: who fired, and the gates.
template <int TOKENS>
struct AtHand {
    unsigned fired[kRowBlocks];  // 16 bits each
    unsigned char list[kNeurons];
    int counts[TOKENS];
    unsigned short gates[kNeurons * TOKENS];  // 0 where nothing fired

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
            list[before + __popc(fired[own] & ((1u << bit) - 1))] =
                static_cast<unsigned char>(threadIdx.x);
        return num;
    }
};

template <int OCTETS, int AT_ONCE, int STAGES>
__device__ __forceinline__ void hidden_state(
    const unsigned short* x, const unsigned short* w_gate, const unsigned short* w_up,
    const unsigned short* w_down, const unsigned short* b_gate, const unsigned short* b_up,
    float threshold, int M, int N, int K, unsigned short* hidden, unsigned short* fired,
    int* counts) {
    constexpr int kTokens = few::kOctet * OCTETS;
    extern __shared__ uint4 memory[];
    AtHand<kTokens>& hand = *reinterpret_cast<AtHand<kTokens>*>(
        reinterpret_cast<char*>(memory) + few::ring_bytes(OCTETS, AT_ONCE, STAGES) +
        few::sums_bytes(OCTETS, AT_ONCE));
    const few::Share share((N + few::kRows - 1) / few::kRows);
    for (int i = threadIdx.x; i < kTokens; i += few::kThreads) hand.counts[i] = 0;

    for (int begin = share.begin; begin < share.end; begin += kRowBlocks) {
        const int num_blocks = min(kRowBlocks, share.end - begin);
        const int first_neuron = begin * few::kRows;
        if (threadIdx.x < kRowBlocks) hand.fired[threadIdx.x] = 0;

        // the gates
        const few::WeightRows gate_rows = {w_gate, first_neuron, N, K};
        few::Product<OCTETS, AT_ONCE, STAGES, few::WeightRows> gate(memory, x, M, K, gate_rows,
                                                                    num_blocks);
        gate.begin();
        if (begin == share.begin) wait_for_previous(), let_next_start();
        gate.run([&](int first, int num) {
            const int end = num * few::kRows * M;
            for (int i = threadIdx.x; i - threadIdx.x % 32 < end; i += few::kThreads) {
                const int row = i % few::kRows, token = i / few::kRows % M;
                const int block = i / few::kRows / M;
                const int n = first_neuron + (first + block) * few::kRows + row;
                unsigned bits = 0;
                if (i < end && n < N) {
                    float sum = gate.sum(block, row, token);
                    if (b_gate) sum += bf16_value(b_gate[n]);
                    bits = bf16_bits(sum);
                    if (bf16_value(bits) <= threshold) bits = 0;
                    hand.gates[((first + block) * few::kRows + row) * kTokens + token] =
                        static_cast<unsigned short>(bits);
                    if (bits && counts) atomicAdd(&hand.counts[token], 1);
                }
                // a row block's 16 rows are half of the warp
                const unsigned both = __ballot_sync(~0u, bits != 0);
                const unsigned half = threadIdx.x % 32 < 16 ? both & 0xffff : both >> 16;
                if (half && threadIdx.x % few::kRows == 0) atomicOr(&hand.fired[first + block], half);
            }
        });

        // up of those that fired
        const int num_fired = hand.make_list();
        if (threadIdx.x < num_blocks)
            fired[begin + threadIdx.x] = static_cast<unsigned short>(hand.fired[threadIdx.x]);
        __syncthreads();
        const ListedRows up_rows = {w_up + static_cast<long long>(first_neuron) * K, hand.list,
                                    num_fired, K};
        few::Product<OCTETS, AT_ONCE, STAGES, ListedRows> up(
            memory, x, M, K, up_rows, (num_fired + few::kRows - 1) / few::kRows);
        up.begin();
        for (int i = threadIdx.x / 32; i < num_fired; i += few::kWarps) {
            const unsigned short* row =
                w_down + static_cast<long long>(first_neuron + hand.list[i]) * K;
            for (int at = threadIdx.x % 32 * kLine; at < K; at += 32 * kLine)
                prefetch_into_l2(row + at);
        }
        up.run([&](int first, int num) {
            const int end = min(num * few::kRows, num_fired - first * few::kRows) * M;
            for (int i = threadIdx.x; i < num * few::kRows * M; i += few::kThreads) {
                const int row = i % few::kRows, token = i / few::kRows % M;
                const int block = i / few::kRows / M;
                const int place = (first + block) * few::kRows + row;
                if (end <= 0 || place >= num_fired) continue;
                const int n = hand.list[place];
                float sum = up.sum(block, row, token);
                if (b_up) sum += bf16_value(b_up[first_neuron + n]);
                const unsigned bits = hand.gates[n * kTokens + token];
                hidden[static_cast<long long>(first_neuron + n) * kTokens + token] =
                    bits ? static_cast<unsigned short>(
                               bf16_bits(bf16_value(bits) * few::rounded(sum)))
                         : 0;
            }
        });
        __syncthreads();
    }
    if (counts && static_cast<int>(threadIdx.x) < M) {
        const int own = hand.counts[threadIdx.x];
        if (own) atomicAdd(counts + threadIdx.x, own);
    }
}

}  // namespace

#define TWELL_FEW_HIDDEN(octets, at_once, stages)                                               \
    extern "C" __global__ void __launch_bounds__(few::kThreads, octets < 4 ? 2 : 1)             \
        few_hidden_##octets(                                                                    \
            const unsigned short* x, const unsigned short* w_gate, const unsigned short* w_up,  \
            const unsigned short* w_down, const unsigned short* b_gate,                         \
            const unsigned short* b_up, float threshold, int M, int N, int K,                   \
            unsigned short* hidden, unsigned short* fired, int* counts) {                       \
        hidden_state<octets, at_once, stages>(x, w_gate, w_up, w_down, b_gate, b_up, threshold, \
                                              M, N, K, hidden, fired, counts);                  \
    }

TWELL_FEW_HIDDEN(1, 3, 3)
TWELL_FEW_HIDDEN(2, 3, 3)
TWELL_FEW_HIDDEN(4, 3, 3)
TWELL_FEW_HIDDEN(8, 3, 2)
