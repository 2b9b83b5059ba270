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
    few::WeightRows gate, up;

    __device__ __forceinline__ const unsigned short* operator()(int block, int row) const {
        return block % 2 ? up(block / 2, row) : gate(block / 2, row);
    }
};

template <int OCTETS, int AT_ONCE, int STAGES>
__device__ __forceinline__ void gated(const unsigned short* x, const unsigned short* w_gate,
                                      const unsigned short* w_up, const unsigned short* b_gate,
                                      const unsigned short* b_up, float threshold, int M, int N,
                                      int K, unsigned short* hidden) {
    static_assert(AT_ONCE % 2 == 0, "gate and up of a row are in one pass");
    extern __shared__ uint4 memory[];
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const int first_row = share.begin * few::kRows;
    const GatedRows rows = {{w_gate, first_row, N, K}, {w_up, first_row, N, K}};
    few::Product<OCTETS, AT_ONCE, STAGES, GatedRows> product(memory, x, M, K, rows,
                                                             2 * (share.end - share.begin));
    product.begin();
    wait_for_previous();
    let_next_start();
    product.run([&](int first, int num) {
        for (int i = threadIdx.x; i < num / 2 * few::kRows * M; i += few::kThreads) {
            const int row = i % few::kRows, token = i / few::kRows % M;
            const int block = i / few::kRows / M;
            const int n = first_row + (first / 2 + block) * few::kRows + row;
            if (n >= N) continue;
            float gate = product.sum(2 * block, row, token);
            float up = product.sum(2 * block + 1, row, token);
            if (b_gate) gate += bf16_value(b_gate[n]), up += bf16_value(b_up[n]);
            gate = few::rounded(gate);
            const float h = gate <= threshold ? 0.f : gate;  // NaN stays
            hidden[static_cast<long long>(token) * N + n] =
                static_cast<unsigned short>(bf16_bits(h * few::rounded(up)));
        }
    });
}

}  // namespace

#define TWELL_FEW_GATED(octets, at_once, stages)                                                  \
    extern "C" __global__ void __launch_bounds__(few::kThreads, octets < 4 ? 2 : 1)               \
        few_gated_##octets(const unsigned short* x, const unsigned short* w_gate,                 \
                           const unsigned short* w_up, const unsigned short* b_gate,              \
                           const unsigned short* b_up, float threshold, int M, int N, int K,      \
                           unsigned short* hidden) {                                              \
        gated<octets, at_once, stages>(x, w_gate, w_up, b_gate, b_up, threshold, M, N, K, hidden); \
    }

TWELL_FEW_GATED(1, 4, 2)
TWELL_FEW_GATED(2, 4, 2)
TWELL_FEW_GATED(4, 4, 2)
TWELL_FEW_GATED(8, 2, 2)
