// refine: of rough logits those that may be the largest, computed anew by the bf16 head. So the
// largest of all is that of the bf16 head, and has the bits of few_linear's: sums go as there.
//
//   x       bf16 [K]: what the head multiplies
//   head    bf16 [V, K]
//   most    float32 [V]: what a logit of the bf16 head is at most; of NaN nothing is known
//   least   float32 [num_least]: what some of them are at least
//   logits  float32 [V]: rough ones, all of which are below the largest of `least`, but for those
//           that are computed here
//
// A block has as many rows as threads; most blocks find that none of theirs may be the largest.
//
// Launch: 256 threads, a block for each 256 rows. Dynamic shared memory: kBytes and x_bytes(1, K)
// of few::Sizes.
#include "spec.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "ptx/shared.cuh"
#include "tile/few_product.cuh"

namespace {

// The largest of `num` values, in all threads.
__device__ __forceinline__ float largest_of(const float* values, int num) {
    __shared__ float of_warps[few::kWarps];
    float largest = __int_as_float(0xff800000);
    for (int i = threadIdx.x; i < num; i += few::kThreads)
        largest = fmaxf(largest, __uint_as_float(load_written_word(values + i)));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < few::kWarps; ++warp) largest = fmaxf(largest, of_warps[warp]);
    return largest;
}

template <class SIZES>
__device__ __forceinline__ void refine_logits(const unsigned short* x, const unsigned short* head,
                                              const float* most, const float* least, int num_least,
                                              int V, int K, float* logits) {
    // a product's stages begin at multiples of 128, and other shared memory lies in front of them
    extern __shared__ __align__(128) uint4 memory[];
    __shared__ unsigned char list[few::kThreads];
    __shared__ int num_listed;
    if (dynamic_smem_bytes() < SIZES::kBytes + SIZES::x_bytes(1, K)) __trap();
    const int first = blockIdx.x * few::kThreads, row = first + threadIdx.x;
    if (threadIdx.x == 0) num_listed = 0;
    wait_for_previous();
    let_next_start();
    unsigned own = 0;
    load_written_word_if(row < V, most + row, own);
    const float known = largest_of(least, num_least);
    if (row < V && !(__uint_as_float(own) < known)) list[atomicAdd(&num_listed, 1)] = threadIdx.x;
    __syncthreads();
    if (num_listed == 0) return;

    const few::ListedRows<Bf16> rows = {head + static_cast<long long>(first) * K, num_listed,
                                        smem_address(list)};
    const unsigned address = opaque(smem_address(memory));
    few::Product<SIZES, few::ListedRows<Bf16>> product(address, address + SIZES::kBytes, x, 1, K,
                                                       rows);
    product.begin();
    product.begin_x();
    product.run([&](int first_block, int num) {
        product.for_each(num, [&](int block, int in_block, int token) {
            const int i = (first_block + block) * few::kRows + in_block;
            if (i < rows.num && token == 0)
                logits[first + list[i]] = product.sum(block, in_block, token);
        });
    });
}

}  // namespace

#define TWELL_REFINE(name, Weight, ...)                                                       \
    extern "C" __global__ void __launch_bounds__(few::kThreads)                               \
        name(const unsigned short* x, const unsigned short* head, const float* most,          \
             const float* least, int num_least, int V, int K, float* logits) {                \
        refine_logits<few::Sizes<Weight, __VA_ARGS__>>(x, head, most, least, num_least, V, K, \
                                                       logits);                               \
    }

TWELL_ENTRIES(TWELL_REFINE)
