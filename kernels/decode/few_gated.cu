// few_gated: relu(x W_gate^T + b_gate) * (x W_up^T + b_up) for 1 to 64 tokens
// (tile/few_product.cuh): the dense form, both products in one kernel. With is_silu SiLU stands in
// the place of ReLU; nothing is counted then.
//
// Row blocks are those of gate and up by turns. Each of both is rounded to bf16, as in torch.
// hidden is [M, N]; counts int32 [M], or null, and the scales: as in few_hidden.
//
// Launch: as few_linear; dynamic shared memory as there and 32 OCTETS bytes more.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/few_product.cuh"
#include "tile/fires.cuh"
#include "tile/silu.cuh"

namespace {

// `num` neurons: 16 rows of gate, 16 of up, and so on. The weight of up lies `apart` behind gate's.
template <class Weight>
struct GatedRows {
    using Memory = typename Weight::Memory;
    const Memory* weight;
    int num;
    long long apart;

    __device__ __forceinline__ static int neuron(int i) { return i / 32 * 16 + i % 16; }
    __device__ __forceinline__ int num_blocks() const { return (num + 15) / 16 * 2; }
    __device__ __forceinline__ bool has(int i) const { return neuron(i) < num; }

    __device__ __forceinline__ const void* row(const Memory* from, int i,
                                               unsigned row_bytes) const {
        return offset_by(from + (i / 16 % 2 ? apart : 0), neuron(i), row_bytes);
    }
};

template <class SIZES>
__device__ constexpr unsigned needed_bytes(int M, int, int K) {
    return SIZES::kBytes + 4 * few::kOctet * SIZES::kOctets + SIZES::x_bytes(M, K);
}

template <class SIZES>
__device__ __forceinline__ void gated(const unsigned short* x,
                                      const typename SIZES::Weight::Memory* w_gate,
                                      const typename SIZES::Weight::Memory* w_up,
                                      const unsigned short* b_gate, const unsigned short* b_up,
                                      int M, int N, int K, unsigned short* hidden, int* counts,
                                      const float* gate_scale, const float* up_scale, int is_silu) {
    static_assert(SIZES::kAtOnce % 2 == 0, "gate and up of a row are in one pass");
    constexpr int kTokens = few::kOctet * SIZES::kOctets;
    extern __shared__ uint4 memory[];
    if (dynamic_smem_bytes() < needed_bytes<SIZES>(M, N, K)) __trap();
    int* fired = reinterpret_cast<int*>(reinterpret_cast<char*>(memory) + SIZES::kBytes);
    if (threadIdx.x < kTokens) fired[threadIdx.x] = 0;  // a barrier follows, in the product
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const int first_row = share.begin * few::kRows;
    using Weight = typename SIZES::Weight;
    using Rows = GatedRows<Weight>;
    const Rows rows = {Weight::at(w_gate, static_cast<long long>(first_row) * K),
                       min(share.end * few::kRows, N) - first_row, w_up - w_gate};
    const unsigned address = opaque(smem_address(memory));
    few::Product<SIZES, Rows> product(address, address + SIZES::kBytes + 4 * kTokens, x, M, K,
                                      rows);
    product.begin();
    wait_for_previous();
    let_next_start();
    product.begin_x();
    product.settle_x();
    product.run([&](int first, int num) {
        product.for_each(num / 2, [&](int block, int row, int token) {
            const int n = first_row + (first / 2 + block) * few::kRows + row;
            if (n >= N || token >= M) return;
            float gate = product.sum(2 * block, row, token);
            float up = product.sum(2 * block + 1, row, token);
            gate = Weight::scaled(gate, gate_scale, n), up = Weight::scaled(up, up_scale, n);
            if (b_gate) gate += bf16_value(b_gate[n]);
            if (b_up) up += bf16_value(b_up[n]);
            gate = rounded(gate);
            const float h = is_silu ? silu_of(gate) : keep_fired(gate);
            if (h != 0.f && counts) atomicAdd(&fired[token], 1);
            hidden[static_cast<long long>(token) * N + n] =
                static_cast<unsigned short>(bf16_bits(h * rounded(up)));
        });
    });
    if (counts && static_cast<int>(threadIdx.x) < M && fired[threadIdx.x])
        atomicAdd(counts + threadIdx.x, fired[threadIdx.x]);
}

}  // namespace

#define TWELL_FEW_GATED(name, Weight, ...)                                                        \
    extern "C" __global__ void __launch_bounds__(few::kThreads, 1)                                \
        name(const unsigned short* x, const Weight::Memory* w_gate, const Weight::Memory* w_up,   \
             const unsigned short* b_gate, const unsigned short* b_up, int M, int N, int K,       \
             unsigned short* hidden, int* counts, const float* gate_scale, const float* up_scale, \
             int is_silu) {                                                                       \
        gated<few::Sizes<Weight, __VA_ARGS__>>(x, w_gate, w_up, b_gate, b_up, M, N, K, hidden,    \
                                               counts, gate_scale, up_scale, is_silu);            \
    }

TWELL_ENTRIES(TWELL_FEW_GATED)
