// few_gated: relu_t(x W_gate^T + b_gate) * (x W_up^T + b_up), [M, K] to [M, N], for 1 to 64 tokens
// (few.cuh): the dense form, both products in one kernel.
//
// Row blocks are those of gate and up by turns. Each of both is rounded to bf16, as in torch.
//
// Launch: as few_linear.
#include "few.cuh"

namespace {

// Row block 2 i is the i-th of gate, 2 i + 1 the i-th of up.
struct GatedRows {
    few::Rows gate, up;

    __device__ __forceinline__ const unsigned short* operator()(int block, int row) const {
        return block % 2 ? up(block / 2, row) : gate(block / 2, row);
    }
};

template <class SIZES>
__device__ __forceinline__ void gated(const unsigned short* x, const unsigned short* w_gate,
                                      const unsigned short* w_up, const unsigned short* b_gate,
                                      const unsigned short* b_up, float threshold, int M, int N,
                                      int K, unsigned short* hidden) {
    static_assert(SIZES::kAtOnce % 2 == 0, "gate and up of a row are in one pass");
    extern __shared__ uint4 memory[];
    if (dynamic_smem_bytes() < SIZES::kBytes) __trap();
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const int first_row = share.begin * few::kRows;
    const long long start = static_cast<long long>(first_row) * K;
    const GatedRows rows = {{w_gate + start, nullptr, N - first_row, K},
                            {w_up + start, nullptr, N - first_row, K}};
    few::Product<SIZES, GatedRows> product(memory, x, M, K, rows,
                                                             2 * (share.end - share.begin));
    product.begin();
    wait_for_previous();
    let_next_start();
    product.run([&](int first, int num) {
        product.for_each(num / 2, [&](int block, int row, int token) {
            const int n = first_row + (first / 2 + block) * few::kRows + row;
            if (n >= N || token >= M) return;
            float gate = product.sum(2 * block, row, token);
            float up = product.sum(2 * block + 1, row, token);
            if (b_gate) gate += bf16_value(b_gate[n]);
            if (b_up) up += bf16_value(b_up[n]);
            gate = few::rounded(gate);
            const float h = gate <= threshold ? 0.f : gate;  // NaN stays
            hidden[static_cast<long long>(token) * N + n] =
                static_cast<unsigned short>(bf16_bits(h * few::rounded(up)));
        });
    });
}

}  // namespace

#define TWELL_FEW_GATED(octets, at_once, passes, stages, halves)                                                  \
    extern "C" __global__ void __launch_bounds__(few::kThreads, 1)               \
        few_gated_##octets(const unsigned short* x, const unsigned short* w_gate,                 \
                           const unsigned short* w_up, const unsigned short* b_gate,              \
                           const unsigned short* b_up, float threshold, int M, int N, int K,      \
                           unsigned short* hidden) {                                              \
        gated<few::Sizes<octets, at_once, passes, stages, halves>>(x, w_gate, w_up, b_gate, b_up, threshold, M, N, K, hidden); \
    }

TWELL_FEW_GATED(1, 2, 2, 3, 2)
TWELL_FEW_GATED(2, 2, 2, 3, 2)
TWELL_FEW_GATED(4, 4, 1, 1, 2)
TWELL_FEW_GATED(8, 2, 1, 2, 1)
