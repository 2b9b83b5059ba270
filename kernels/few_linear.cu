// few_linear: y = x W^T + b (+ residual), [M, K] and [N, K] to [M, N], for 1 to 64 tokens
// (few.cuh).
//
// As torch does, the sum is rounded to bf16 before the residual is added. With y32 the sum goes
// there as it is, without a residual, and y is null: for logits, whose order rounding would blur.
//
// Launch: few_linear_1, _2, _4 or _8 for so many octets of tokens, _1_long or _2_long if x is too
// long to stay; 256 threads, at most as many blocks as there are row blocks of 16. Dynamic shared
// memory: kBytes and x_bytes(M, K) of few::Sizes.
#include "few.cuh"

namespace {

template <class SIZES>
__device__ __forceinline__ void linear(const unsigned short* x, const unsigned short* weight,
                                       const unsigned short* bias, const unsigned short* residual,
                                       int M, int N, int K, unsigned short* y, float* y32) {
    extern __shared__ uint4 memory[];
    if (dynamic_smem_bytes() < SIZES::kBytes + SIZES::x_bytes(M, K)) __trap();
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const int first_row = share.begin * few::kRows;
    const few::FirstRows rows = {weight + static_cast<long long>(first_row) * K,
                                 min(share.end * few::kRows, N) - first_row};
    const unsigned address = kept_address(memory);
    few::Product<SIZES, few::FirstRows> product(address, address + SIZES::kBytes, x, M, K, rows);
    product.begin();
    wait_for_previous();
    let_next_start();
    product.begin_x();
    product.run([&](int first, int num) {
        product.for_each(num, [&](int block, int row, int token) {
            const int n = first_row + (first + block) * few::kRows + row;
            if (n >= N || token >= M) return;
            float sum = product.sum(block, row, token);
            if (bias) sum += bf16_value(bias[n]);
            const long long at = static_cast<long long>(token) * N + n;
            if (y32) {
                y32[at] = sum;
                return;
            }
            if (residual) sum = rounded(sum) + load_written_bf16(residual + at);
            y[at] = static_cast<unsigned short>(bf16_bits(sum));
        });
    });
}

}  // namespace

#define TWELL_FEW_LINEAR(name, octets, stays, at_once, passes, stages, halves)               \
    extern "C" __global__ void __launch_bounds__(few::kThreads, 1)                           \
        few_linear_##name(const unsigned short* x, const unsigned short* weight,             \
                          const unsigned short* bias, const unsigned short* residual, int M, \
                          int N, int K, unsigned short* y, float* y32) {                     \
        linear<few::Sizes<octets, stays, at_once, passes, stages, halves>>(                  \
            x, weight, bias, residual, M, N, K, y, y32);                                     \
    }

#if TWELL_SHARED_KB >= 163
TWELL_FEW_LINEAR(1, 1, true, 1, 3, 5, 2)
TWELL_FEW_LINEAR(2, 2, true, 1, 3, 4, 2)
TWELL_FEW_LINEAR(1_long, 1, false, 1, 3, 5, 2)
TWELL_FEW_LINEAR(2_long, 2, false, 1, 3, 4, 2)
#else
TWELL_FEW_LINEAR(1, 1, true, 1, 3, 3, 2)
TWELL_FEW_LINEAR(2, 2, true, 1, 1, 2, 2)
TWELL_FEW_LINEAR(1_long, 1, false, 1, 3, 3, 2)
TWELL_FEW_LINEAR(2_long, 2, false, 1, 1, 2, 2)
#endif
#if TWELL_SHARED_KB >= 227
TWELL_FEW_LINEAR(4, 4, false, 1, 3, 3, 2)
TWELL_FEW_LINEAR(8, 8, false, 3, 1, 2, 1)
#else
TWELL_FEW_LINEAR(4, 4, false, 1, 1, 1, 2)
TWELL_FEW_LINEAR(8, 8, false, 1, 1, 1, 1)
#endif
