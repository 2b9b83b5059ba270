// few_linear: y = x W^T + b (+ residual), [M, K] and [N, K] to [M, N], for 1 to 64 tokens (few.cuh).
//
// As torch does, the sum is rounded to bf16 before the residual is added.
//
// Launch: few_linear_1, _2, _4 or _8 for so many octets of tokens; 256 threads, at most as many
// blocks as there are row blocks of 16. Dynamic shared memory: few::ring_bytes + few::sums_bytes.
#include "few.cuh"

namespace {

template <int OCTETS, int AT_ONCE, int STAGES>
__device__ __forceinline__ void linear(const unsigned short* x, const unsigned short* weight,
                                       const unsigned short* bias, const unsigned short* residual,
                                       int M, int N, int K, unsigned short* y) {
    extern __shared__ uint4 memory[];
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const few::WeightRows rows = {weight, share.begin * few::kRows, N, K};
    few::Product<OCTETS, AT_ONCE, STAGES, few::WeightRows> product(memory, x, M, K, rows,
                                                                   share.end - share.begin);
    product.begin();
    wait_for_previous();
    let_next_start();
    product.run([&](int first, int num) {
        for (int i = threadIdx.x; i < num * few::kRows * M; i += few::kThreads) {
            const int row = i % few::kRows, token = i / few::kRows % M;
            const int block = i / few::kRows / M;
            const int n = rows.first + (first + block) * few::kRows + row;
            if (n >= N) continue;
            float sum = product.sum(block, row, token);
            if (bias) sum += bf16_value(bias[n]);
            const long long at = static_cast<long long>(token) * N + n;
            if (residual) sum = few::rounded(sum) + bf16_value(residual[at]);
            y[at] = static_cast<unsigned short>(bf16_bits(sum));
        }
    });
}

}  // namespace

#define TWELL_FEW_LINEAR(octets, at_once, stages)                                              \
    extern "C" __global__ void __launch_bounds__(few::kThreads, octets < 4 ? 2 : 1)            \
        few_linear_##octets(const unsigned short* x, const unsigned short* weight,             \
                            const unsigned short* bias, const unsigned short* residual, int M, \
                            int N, int K, unsigned short* y) {                                 \
        linear<octets, at_once, stages>(x, weight, bias, residual, M, N, K, y);                \
    }

TWELL_FEW_LINEAR(1, 3, 3)
TWELL_FEW_LINEAR(2, 3, 3)
TWELL_FEW_LINEAR(4, 3, 3)
TWELL_FEW_LINEAR(8, 3, 2)
