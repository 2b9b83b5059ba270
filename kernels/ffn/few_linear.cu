// few_linear: y = x W^T + b (+ residual), [M, K] and [N, K] to [M, N], for 1 to 64 tokens
// (tile/few_product.cuh).
//
// As torch does, the sum is rounded to bf16 before the residual is added. With y32 the sum goes
// there as it is, without a residual, and y is null: for logits, whose order rounding would blur.
// scale is float32 [N], of the rows of W, or null if its kind has none (tile/weights.cuh).
//
// Launch: few_linear_1, _2, _4 or _8 for so many octets of tokens, _1_long or _2_long if x is too
// long to stay. _1_short has stages for blocks with few weights, and leaves memory to the kernel
// behind it; _1_ahead and _2_ahead have more, and bring more while the kernel in front runs.
// 256 threads, at most as many blocks as there are row blocks of 16. Dynamic shared memory: kBytes
// and x_bytes(M, K) of few::Sizes.
#include "spec.cuh"
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
        : block(threadIdx.x / few::kRows / kTokens), token(threadIdx.x / few::kRows % kTokens),
          bias(0.f), residual(0.f) {}

    __device__ __forceinline__ bool is_of(int other_block, int other_token) const {
        return block == other_block && token == other_token;
    }
};

template <class SIZES>
__device__ constexpr unsigned needed_bytes(int M, int, int K) {
    return SIZES::kBytes + SIZES::x_bytes(M, K);
}

template <class SIZES>
__device__ __forceinline__ void linear(const unsigned short* x,
                                       const typename SIZES::Weight::Memory* weight,
                                       const unsigned short* bias, const unsigned short* residual,
                                       int M, int N, int K, unsigned short* y, float* y32,
                                       const float* scale) {
    extern __shared__ uint4 memory[];
    if (dynamic_smem_bytes() < needed_bytes<SIZES>(M, N, K)) __trap();
    const few::Share share((N + few::kRows - 1) / few::kRows);
    const int first_row = share.begin * few::kRows;
    using Weight = typename SIZES::Weight;
    using Rows = few::FirstRows<Weight>;
    const Rows rows = {Weight::at(weight, static_cast<long long>(first_row) * K),
                       min(share.end * few::kRows, N) - first_row};
    const unsigned address = opaque(smem_address(memory));
    few::Product<SIZES, Rows> product(address, address + SIZES::kBytes, x, M, K, rows);
    product.begin();
    Addend<SIZES> early;
    const int early_n = first_row + early.block * few::kRows + threadIdx.x % few::kRows;
    const bool is_there = early_n < min(share.end * few::kRows, N) && early.token < M;
    if (bias && is_there) early.bias = bf16_value(bias[early_n]);
    wait_for_previous();
    let_next_start();
    product.begin_x();
    product.settle_x();
    if (residual && is_there)
        early.residual =
            written_value(residual + static_cast<long long>(early.token) * N + early_n);
    product.run([&](int first, int num) {
        product.for_each(num, [&](int block, int row, int token) {
            const int n = first_row + (first + block) * few::kRows + row;
            if (n >= N || token >= M) return;
            float sum = Weight::scaled(product.sum(block, row, token), scale, n);
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

#define TWELL_FEW_LINEAR(name, Weight, ...)                                                      \
    extern "C" __global__ void __launch_bounds__(few::kThreads, 1)                               \
        name(const unsigned short* x, const Weight::Memory* weight, const unsigned short* bias,  \
             const unsigned short* residual, int M, int N, int K, unsigned short* y, float* y32, \
             const float* scale) {                                                               \
        linear<few::Sizes<Weight, __VA_ARGS__>>(x, weight, bias, residual, M, N, K, y, y32,      \
                                                scale);                                          \
    }

TWELL_ENTRIES(TWELL_FEW_LINEAR)
