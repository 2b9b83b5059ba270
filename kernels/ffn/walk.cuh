// walk_gate: up, h and down of one token after the other, straight from the gate.
//
// A block has a token. First it makes a list of what fired. Then it goes through the list twice,
// kBatch neurons at a time: their rows of W_up for the dot products with x, and their rows of
// W_down, which h weighs, into y. Each row is asked for by whole lines of L2, once for each pair: 4
// K bytes a pair in all, over e4m3 2 K. So time goes by pairs, at what L2 gives; nothing is sorted
// or exchanged, and up to some 100000 pairs that is faster than plan, up, hidden and down. (L1 must
// keep what it loads: without, a third of the speed is lost.)
//
// A block's threads are `ways` times as many as a row wants, 16 bytes each: each way takes every
// ways-th batch. With few tokens, when there are not enough blocks to fill the chip, that brings
// more rows under way.
//
// Rows that are not finite or have more than `cap` pairs are heavy, and not walked.
// They are appended to heavy_rows, of which heavy_count (0 before) says how many there are, and
// their x to x_rows in the same order.
//
// Over e4m3, x is e4m3, too (quantise_rows.cu). Both become f16, then float32, exactly; scales come
// after the sums. h is rounded to bf16 in both.
//
// The order of a sum is that of the list, so bits do not depend on time; that of heavy rows may.
//
// Launch: a block a token, of `ways` times a multiple of 32 threads up to 512, no more than 1024 in
// all; K and N multiples of 8, K over e4m3 of 16. Dynamic shared memory, with `warps` those of a
// way: 4 cap (2 + warps) bytes, cap a multiple of kBatch and at least kBatch ways, and 4 ways K,
// over bf16 only with several ways. It may start before the previous kernel has ended
// (ptx/pdl.cuh).
#pragma once

#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"
#include "tile/fires.cuh"
#include "tile/halves.cuh"
#include "tile/warp.cuh"

namespace {

constexpr int kBatch = spec::WALK_BATCH;  // neurons of which rows are under way
constexpr int kMostWarps = spec::WALK_BLOCK / 32;
constexpr int kHeavy = -1;

// ---- the list

// The sum of `own` over the threads before, and in `total` over all; the same of `flag`, by or.
// Barriers stand in front of and behind what it keeps.
__device__ __forceinline__ int scan_block(int own, int& total, int& flag) {
    __shared__ int of_warps[kMostWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    const int upto = scan_warp(own, lane);
    if (lane == 31) of_warps[warp] = upto;
    flag = __syncthreads_or(flag);
    const int of_lane = lane < num_warps ? of_warps[lane] : 0, sums = scan_warp(of_lane, lane);
    total = __shfl_sync(~0u, sums, 31);
    const int before = __shfl_sync(~0u, sums - of_lane, warp);
    __syncthreads();
    return before + upto - own;
}

// A row of the gate. What is not finite makes it heavy.
struct Dense {
    const unsigned short* gate;
    int num_neurons;

    static constexpr int kChunks = 3;  // of 8 neurons, that a thread has at a time

    __device__ __forceinline__ int make_list(int cap, unsigned* list) const {
        int num = 0, heavy = 0;
#pragma unroll 1
        for (int base = 0; base < num_neurons; base += 8 * kChunks * blockDim.x) {
            unsigned words[4 * kChunks], odd = 0;
            unsigned fired = 0;  // bit i: low half of word i; bit 16 + i: high half
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const int first = base + 8 * (i * blockDim.x + threadIdx.x);
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (first < num_neurons) eight = *reinterpret_cast<const uint4*>(gate + first);
                words[4 * i] = eight.x, words[4 * i + 1] = eight.y;
                words[4 * i + 2] = eight.z, words[4 * i + 3] = eight.w;
            }
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                odd |= (words[i] & 0x7f807f80) + 0x00800080;  // the sign's bit: not finite
                fired |= fires_pair(words[i]) & 0x10001u << i;
            }
            heavy |= (odd & 0x80008000) != 0;
            int total, to = num + scan_block(__popc(fired), total, heavy);
            if (fired) {
#pragma unroll
                for (int i = 0; i < 8 * kChunks; ++i) {
                    if (!(fired >> (i / 2 + 16 * (i % 2)) & 1)) continue;
                    const int chunk = i / 8 * blockDim.x + threadIdx.x;
                    const unsigned bits = words[i / 2] >> 16 * (i % 2) << 16;
                    if (to < cap) list[to] = bits | (base + 8 * chunk + i % 8);
                    ++to;
                }
            }
            num += total;
        }
        __syncthreads();
        return heavy || num > cap ? kHeavy : num;
    }
};

// ---- what x and the weights are

struct Scales {
    const float2* tokens;  // scale, and what the walk does not want (quantise_rows.cu)
    const float *neurons, *columns;  // of W_up, of W_down
};

struct Bf16 : Scales {  // which are none
    using Number = unsigned short;
    static constexpr bool kScaled = false;

    __device__ __forceinline__ static void unpack_eight(const uint4& bytes, int,
                                                        float (&values)[8]) {
        unpack(bytes, values);
    }
};

struct E4m3 : Scales {
    using Number = unsigned char;
    static constexpr bool kScaled = true;

    __device__ __forceinline__ static void unpack_eight(const uint4& bytes, int eight,
                                                        float (&values)[8]) {
        unpack_f16(eight ? e4m3_as_f16(bytes.z, bytes.w) : e4m3_as_f16(bytes.x, bytes.y), values);
    }
    __device__ __forceinline__ float scaled(float up, unsigned neuron) const {
        return up * tokens[blockIdx.x].x * __ldg(neurons + neuron);
    }
    // Columns `first` and the one behind it.
    __device__ __forceinline__ void scale_columns(float& low, float& high, int first) const {
        const float2 two = __ldg(reinterpret_cast<const float2*>(columns + first));
        low *= two.x, high *= two.y;
    }
};

// ---- the walk

// Lane l gets the warp's sum of the (l / (32 / NUM))th.
template <int NUM>
__device__ __forceinline__ float add_up(float (&sums)[NUM]) {
    const int lane = threadIdx.x % 32;
    int distance = 16;
#pragma unroll
    for (int num = NUM / 2; num >= 1; num /= 2, distance /= 2)
        exchange_halves(sums, num, lane & distance, distance);
#pragma unroll
    for (; distance >= 1; distance /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
    return sums[0];
}

template <class Numbers>
struct Walk : Numbers {
    using Number = typename Numbers::Number;
    static constexpr int kBytes = sizeof(Number), kColumns = 16 / kBytes;  // of a row, a thread's

    const Number *x, *w_up, *w_down;
    const unsigned short *b_up, *b_down;
    unsigned short* y;
    int K, cap, ways;
    unsigned* list;
    float *hidden, *parts, *of_ways;  // of_ways: the sums of each (add_ways)
    int num, threads, way, thread;  // a way's threads; the thread in its way

    __device__ __forceinline__ void find_place(unsigned* memory) {
        threads = blockDim.x / ways, way = threadIdx.x / threads, thread = threadIdx.x % threads;
        list = memory, hidden = reinterpret_cast<float*>(list + cap), parts = hidden + cap;
        of_ways = parts + threads / 32 * cap;
    }

    __device__ __forceinline__ long long of_token() const {
        return static_cast<long long>(blockIdx.x) * K;
    }

    __device__ __forceinline__ void run() const {
        walk_up();
        uint4 rows[kBatch];
        load_batch(rows, w_down, kBatch * way, kColumns * thread);  // while h is made
        __syncthreads();
        find_hidden();
        __syncthreads();
        walk_down(rows);
    }

    // The thread's columns of `weight`, from `first` on, of the list's places `base` on; zeros
    // behind its end.
    __device__ __forceinline__ void load_batch(uint4 (&rows)[kBatch], const Number* weight,
                                               int base, int first) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            rows[i] = make_uint4(0, 0, 0, 0);
            load_constant_if(
                first < K && base + i < num,
                offset_by(weight + first, list[base + i] & 0xffff, kBytes * K), rows[i]);
        }
    }

    // Of each pair the parts of its dot product, a part a warp of the way: parts [warps, cap].
    __device__ __forceinline__ void walk_up() const {
        const int lane = threadIdx.x % 32;
        float* own = parts + thread / 32 * cap + lane / (32 / kBatch);
#pragma unroll 1
        for (int base = kBatch * way; base < num; base += kBatch * ways) {
            float sums[kBatch] = {};
#pragma unroll 1
            for (int first = kColumns * thread; first - lane * kColumns < K;
                 first += kColumns * threads) {
                uint4 rows[kBatch], own_x = make_uint4(0, 0, 0, 0);
                if (first < K) own_x = *reinterpret_cast<const uint4*>(x + of_token() + first);
                load_batch(rows, w_up, base, first);
#pragma unroll
                for (int eight = 0; eight < kColumns / 8; ++eight) {
                    float values[8];
                    this->unpack_eight(own_x, eight, values);
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) {
                        float w[8];
                        this->unpack_eight(rows[i], eight, w);
#pragma unroll
                        for (int j = 0; j < 8; ++j) sums[i] = fmaf(values[j], w[j], sums[i]);
                    }
                }
            }
            const float sum = add_up(sums);
            if (lane % (32 / kBatch) == 0) own[base] = sum;
        }
    }

    // h of each pair, and 0 behind the last up to a multiple of kBatch.
    __device__ __forceinline__ void find_hidden() const {
        const int end = (num + kBatch - 1) / kBatch * kBatch;
#pragma unroll 1
        for (int i = threadIdx.x; i < end; i += blockDim.x) {
            float up = 0;
            for (int warp = 0; warp < threads / 32; ++warp) up += parts[warp * cap + i];
            if constexpr (Numbers::kScaled)
                if (i < num) up = this->scaled(up, list[i] & 0xffff);
            if (b_up && i < num) up += bf16_value(b_up[list[i] & 0xffff]);
            const float gate = __uint_as_float(list[i] & 0xffff0000);
            hidden[i] = i < num ? rounded(gate * rounded(up)) : 0.f;
        }
    }

    // `rows` is the way's first batch of the first columns.
    __device__ __forceinline__ void walk_down(uint4 (&rows)[kBatch]) const {
#pragma unroll 1
        for (int first = kColumns * thread; first < K; first += kColumns * threads) {
            float sums[kColumns] = {};
#pragma unroll 1
            for (int base = kBatch * way; base < num; base += kBatch * ways) {
                if (base >= kBatch * ways || first >= kColumns * threads)
                    load_batch(rows, w_down, base, first);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const float h = hidden[base + i];
#pragma unroll
                    for (int eight = 0; eight < kColumns / 8; ++eight) {
                        float w[8];
                        this->unpack_eight(rows[i], eight, w);
#pragma unroll
                        for (int j = 0; j < 8; ++j)
                            sums[8 * eight + j] = fmaf(h, w[j], sums[8 * eight + j]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kColumns; i += 8) leave(sums + i, first + i);
        }
        if (Numbers::kScaled || ways > 1) add_ways();
    }

    // What the way has added up: as y if it is alone, or for `add_ways`. Beside rows that may still
    // be wanted, scales leave no registers for y.
    __device__ __forceinline__ void leave(float* sums, int first) const {
        if (!Numbers::kScaled && ways == 1) {
            store(sums, first);
        } else {
            float4* to = reinterpret_cast<float4*>(of_ways + way * K + first);
            to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
            to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
        }
    }

    __device__ __forceinline__ void add_ways() const {
        __syncthreads();
#pragma unroll 1
        for (int first = 2 * threadIdx.x; first < K; first += 2 * blockDim.x) {
            float low = 0, high = 0;
            for (int i = 0; i < ways; ++i) {
                const float2 two = *reinterpret_cast<const float2*>(of_ways + i * K + first);
                low += two.x, high += two.y;
            }
            if constexpr (Numbers::kScaled) this->scale_columns(low, high, first);
            if (b_down) low += bf16_value(b_down[first]), high += bf16_value(b_down[first + 1]);
            *reinterpret_cast<unsigned*>(y + of_token() + first) = bf16_pair(low, high);
        }
    }

    __device__ __forceinline__ void store(float* sums, int first) const {
        if (b_down) {
            float bias[8];
            unpack(*reinterpret_cast<const uint4*>(b_down + first), bias);
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i] += bias[i];
        }
        *reinterpret_cast<uint4*>(y + of_token() + first) =
            pack(*reinterpret_cast<float(*)[8]>(sums));
    }
};

// The row's place among the heavy ones, and a copy of the row.
template <class Number>
__device__ __forceinline__ void set_aside(const Number* x, int K, int* heavy_rows,
                                          int* heavy_count, Number* x_rows) {
    constexpr int kNumbers = 16 / sizeof(Number);
    __shared__ int place;
    if (threadIdx.x == 0) {
        place = atomicAdd(heavy_count, 1);
        heavy_rows[place] = blockIdx.x;
    }
    __syncthreads();
    uint4* to = reinterpret_cast<uint4*>(x_rows + static_cast<long long>(place) * K);
    for (int i = threadIdx.x; i < K / kNumbers; i += blockDim.x)
        to[i] = reinterpret_cast<const uint4*>(x)[i];
}

template <class Numbers, class Row>
__device__ __forceinline__ void walk_token(Walk<Numbers>& way, const Row& row, int* heavy_rows,
                                           int* heavy_count, typename Numbers::Number* x_rows) {
    way.num = row.make_list(way.cap, way.list);
    __syncthreads();
    if (way.num == kHeavy)
        set_aside(way.x + way.of_token(), way.K, heavy_rows, heavy_count, x_rows);
    else
        way.run();
}

}  // namespace
