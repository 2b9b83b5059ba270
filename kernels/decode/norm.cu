// rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, for each row of x [B, K], bf16; rows of x and y
// lie `stride` apart, and y may be x.
// embed_norm: the same of rows of a table [., K], picked by int32 tokens [B], times `scale`, which
// go to x, too; it begins a step, and clears what the step counts.
// join_norms: of one row of such a table, by weights[0], and of one of `states` [., K], by
// weights[1]: to y [2, K]. `read` int32 [num_read], at most 32, has the positions of the states.
// The first just before `position` is taken, or the first of all, if there is none.
// add_norm: of z [B, K], added to x; the sum goes to `sum`, and its norm by `weight` to y, if there
// is a weight.
//
// Rounded as transformers' LlamaRMSNorm in bf16: x / sqrt(..), and once more after the weight. A
// row is a block, which has all of it under way at once and meets at one barrier a norm: with few
// rows latency is all that counts.
//
// Launch: a block a row, of ceil(K / 8) threads rounded up to warps, at most 1024. K a multiple of
// 8 up to 16384, and so is a stride.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "tile/eights.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kMaxWarps = spec::NORM_WARPS;
constexpr int kParts = spec::NORM_PARTS;  // eights of a thread

// The sum over the block of one value a thread; every thread gets it.
__device__ __forceinline__ float sum_over_block(float value, float* sums) {
    value = sum_over_lanes(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    const int num_warps = blockDim.x / 32;
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < num_warps; ++i) sum += sums[i];
    return sum;
}

// Calls do_eight(part, i) for each eight of a row that the thread has; i may lie behind the row.
template <class Do>
__device__ __forceinline__ void for_each_eight(Do&& do_eight) {
#pragma unroll
    for (int part = 0; part < kParts; ++part)
        do_eight(part, static_cast<int>(threadIdx.x + part * blockDim.x));
}

// What of a row's weights a thread needs; no kernel writes them.
struct Weights {
    uint4 eights[kParts];

    __device__ __forceinline__ Weights(const uint4* weight, int num) {
        for_each_eight([&](int part, int i) {
            eights[part] = make_uint4(0, 0, 0, 0);
            load_streamed_if(weight && i < num, weight + i, eights[part]);
        });
    }
};

// The thread's eights of one row of `num`, as numbers; 0 behind it.
struct Row {
    float values[kParts][8];
    int num;

    __device__ __forceinline__ Row(const uint4* x, int num) : num(num) {
        for_each_eight([&](int part, int i) {
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (i < num) eight = load_written(x + i);
            unpack(eight, values[part]);
        });
    }

    // Each number is what change(it, part, place) makes of it, rounded.
    template <class Change>
    __device__ __forceinline__ void change(Change&& changed) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                values[part][j] = rounded(changed(values[part][j], part, j));
    }

    // `sums`: shared, for this norm alone.
    __device__ __forceinline__ void normalise_by(const Weights& weights, float eps, float* sums) {
        float sum = 0.f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum += sum_of_squares(values[part]);
        const float share = 1.f / (8 * num);
        const float root = reciprocal_root(sum_over_block(sum, sums) * share + eps);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            normalise(values[part], root, weights.eights[part]);
    }

    __device__ __forceinline__ void store(uint4* y) const {
        for_each_eight([&](int part, int i) {
            if (i < num) y[i] = pack(values[part]);
        });
    }
};

// Of positions: the place of the first that is just before `position`, or 0. All lanes call it.
__device__ __forceinline__ int place_before(const int* read, int num, const int* position) {
    const int lane = threadIdx.x % 32;
    const unsigned found = __ballot_sync(~0u, lane < num && read[lane] == *position - 1);
    return found ? __ffs(found) - 1 : 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    rms_norm(const uint4* x, const uint4* weight, float eps, int K, int stride, uint4* y) {
    __shared__ float sums[kMaxWarps];
    let_next_start();
    const int num = K / 8;
    const long long start = static_cast<long long>(blockIdx.x) * (stride / 8);
    const Weights weights(weight, num);
    wait_for_previous();
    Row row(x + start, num);
    row.normalise_by(weights, eps, sums);
    row.store(y + start);
}

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    embed_norm(const int* tokens, const uint4* table, float scale, const uint4* weight, float eps,
               int K, int* counts, int num_counts, uint4* x, uint4* y) {
    __shared__ float sums[kMaxWarps];
    let_next_start();
    const int num = K / 8;
    const long long start = static_cast<long long>(blockIdx.x) * num;
    const Weights weights(weight, num);
    wait_for_previous();
    const long long token = tokens[blockIdx.x];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_counts; i += gridDim.x * blockDim.x)
        counts[i] = 0;
    Row row(table + token * num, num);
    row.change([&](float value, int, int) { return value * scale; });
    row.store(x + start);
    row.normalise_by(weights, eps, sums);
    row.store(y + start);
}

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    join_norms(const int* token, const uint4* table, const uint4* states, const int* read,
               int num_read, const int* position, const uint4* weights, float eps, int K,
               uint4* y) {
    __shared__ float sums[kMaxWarps];
    let_next_start();
    const int num = K / 8, which = blockIdx.x;
    const Weights own(weights + which * num, num);
    wait_for_previous();
    const long long place = which ? place_before(read, num_read, position) : *token;
    Row row((which ? states : table) + place * num, num);
    row.normalise_by(own, eps, sums);
    row.store(y + which * num);
}

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps)
    add_norm(const uint4* z, const uint4* weight_of_z, const uint4* x, const uint4* weight,
             float eps, int K, uint4* sum, uint4* y) {
    __shared__ float sums[2][kMaxWarps];
    let_next_start();
    const int num = K / 8;
    const long long start = static_cast<long long>(blockIdx.x) * num;
    const Weights weights_of_z(weight_of_z, num), weights(weight, num);
    wait_for_previous();
    Row row(z + start, num);
    const Row before(x + start, num);
    row.normalise_by(weights_of_z, eps, sums[0]);
    row.change([&](float value, int part, int j) { return value + before.values[part][j]; });
    row.store(sum + start);
    if (!weight) return;
    row.normalise_by(weights, eps, sums[1]);
    row.store(y + start);
}
