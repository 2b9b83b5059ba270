// few_linear: y = x W^T + b (+ residual), [M, K] and [N, K] to [M, N], for 1 to 64 tokens
// (tile/few_product.cuh).
//
// As torch does, the sum is rounded to bf16 before the residual is added. With y32 the sum goes
// there as it is, without a residual, and y is null: for logits, whose order rounding would blur.
//
// Launch: few_linear_1, _2, _4 or _8 for so many octets of tokens, _1_long or _2_long if x is too
// long to stay. _1_short has stages for blocks with few weights, and leaves memory to the kernel
// behind it; _1_ahead and _2_ahead have more, and bring more while the kernel in front runs.
// 256 threads, at most as many blocks as there are row blocks of 16. Dynamic shared memory: kBytes
// and x_bytes(M, K) of few::Sizes.
#include "ptx/compiler.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/few_product.cuh"

namespace {

// What is added to a thread's first sum: asked for before the product, or its latency would stand
// behind it.
template <class SIZES>
struct Addend {
    static constexpr int kTokens = few::kOctet * SIZES::kOctets;
    int block, token;  // of the thread's first sum
    float bias, residual;

    __device__ __forceinline__ Addend()
        : block(threadIdx.x / few::kRows / kTokens),
          token(threadIdx.x / few::kRows % kTokens),
          bias(0.f), residual(0.f) {}

    __device__ __forceinline__ bool is_of(int other_block, int other_token) const {
        return block == other_block && token == other_token;
    }
};

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
    const unsigned address = opaque(smem_address(memory));
    few::Product<SIZES, few::FirstRows> product(address, address + SIZES::kBytes, x, M, K, rows);
    product.begin();
    Addend<SIZES> early;
    const int early_n = first_row + early.block * few::kRows + threadIdx.x % few::kRows;
    const bool is_there = early_n < min(share.end * few::kRows, N) && early.token < M;
    if (bias && is_there) early.bias = bf16_value(bias[early_n]);
    wait_for_previous();
    let_next_start();
    product.begin_x();
    if (residual && is_there)
        early.residual =
            written_value(residual + static_cast<long long>(early.token) * N + early_n);
    product.run([&](int first, int num) {
        product.for_each(num, [&](int block, int row, int token) {
            const int n = first_row + (first + block) * few::kRows + row;
            if (n >= N || token >= M) return;
            float sum = product.sum(block, row, token);
            const bool is_early = early.is_of(first + block, token);
            if (bias) sum += is_early ? early.bias : bf16_value(bias[n]);
            const long long at = static_cast<long long>(token) * N + n;
            if (y32) {
                y32[at] = sum;
                return;
            }
            if (residual)
                sum = rounded(sum) + (is_early ? early.residual : written_value(residual + at));
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
TWELL_FEW_LINEAR(1_short, 1, true, 1, 3, 4, 2)
TWELL_FEW_LINEAR(1_ahead, 1, true, 1, 3, 7, 2)
TWELL_FEW_LINEAR(2_ahead, 2, true, 1, 3, 6, 2)
TWELL_FEW_LINEAR(4, 4, false, 1, 3, 3, 2)
TWELL_FEW_LINEAR(8, 8, false, 3, 1, 2, 1)
#else
TWELL_FEW_LINEAR(1_short, 1, true, 1, 3, 3, 2)
TWELL_FEW_LINEAR(1_ahead, 1, true, 1, 3, 3, 2)
TWELL_FEW_LINEAR(2_ahead, 2, true, 1, 1, 2, 2)
TWELL_FEW_LINEAR(4, 4, false, 1, 1, 1, 2)
TWELL_FEW_LINEAR(8, 8, false, 1, 1, 1, 1)
#endif
