// The products of `step_rows` (step_rows.cuh): weights and caches through the ring, and what a warp
// makes of weights.
//
// K is cut among the eight warps, a slice of 256 columns each. x of a slice is the a of 16 mma, and
// stays in registers from the time it is there until the sums are: so shared memory is read for
// weights only. Of eight rows of a weight a lane has eight chunks of 16 bytes of row g, each of
// which is its b of two mma; which columns these are for the tensor cores does not matter, as long
// as x has the same.
#pragma once

#include "decode/step_rows_block.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barriers.cuh"
#include "ptx/bf16.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/bf16.cuh"
#include "tile/eights.cuh"

namespace {

// Where the warp that brings is: units of the ring.
struct Ring {
    int to, watched, num;     // that come next, of which it is not known that they have come
    int flying;               // KB of those
    unsigned refill, landed;  // parities
    unsigned long long sizes;  // KB of each unit, a byte each
};

struct Products : Block {
    using Block::Block;

    // ---- the warp that brings

    __device__ __forceinline__ void watch(Ring& ring) const {
        barrier_wait(full(ring.watched), ring.landed);
        ring.flying -= static_cast<int>(ring.sizes >> 8 * ring.watched & 255);
        if (++ring.watched == kUnits) ring.watched = 0, ring.landed ^= 1;
        --ring.num;
    }

    // A unit, of each lane so many bytes to a place in it; `total` of them. Not before so few are on
    // their way that these make `most` KB: a cache's last units are small, or empty.
    __device__ __forceinline__ void bring(Ring& ring, const unsigned short* from, unsigned to,
                                          unsigned num_bytes, unsigned total, int most,
                                          unsigned long long policy) const {
        if (ring.to % 2 == 0) barrier_wait(empty(ring.to / 2), ring.refill);
        const int size = (total + 1023) / 1024, at = 8 * ring.to;
        while (ring.num == kUnits || ring.flying + size > most) watch(ring);
        ++ring.num, ring.flying += size;
        ring.sizes = (ring.sizes & ~(255ull << at)) | static_cast<unsigned long long>(size) << at;
        __syncwarp();  // all have watched: an empty unit is over at once
        if (threadIdx.x % 32 == 0) barrier_expect_bytes(full(ring.to), total);
        __syncwarp();
        if (num_bytes)
            copy_bulk(memory + kRing + ring.to * kUnitBytes + to, from, num_bytes, full(ring.to),
                      policy);
        if (++ring.to == kUnits) ring.to = 0, ring.refill ^= 1;
    }

    // The block's rows of a weight.
    __device__ __forceinline__ void bring_rows(Ring& ring, const unsigned short* weight,
                                               const Share& own,
                                               unsigned long long policy) const {
        const int lane = threadIdx.x % 32;
        weight += (8ll * own.first + lane) * K;
#pragma unroll 1
        for (int i = 0; i < 2 * own.num; ++i, weight += kUnitRows * K)
            bring(ring, weight, lane * kPitch, lane < kUnitRows ? 2 * K : 0, kUnitRows * 2 * K,
                  kMostFlying, policy);
    }

    // ---- the warps that compute

    // The next place of the ring has come, or is no longer needed.
    __device__ __forceinline__ void await_place() const {
        barrier_wait(full(2 * place), parity);
        barrier_wait(full(2 * place + 1), parity);
    }
    __device__ __forceinline__ void leave_place() {
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty(place));
        if (++place == kPlaces) place = 0, parity ^= 1;
    }

    __device__ __forceinline__ void take(Octet& octet) {
        const unsigned from = memory + kRing + (8 * place + lane() / 4) * kPitch +
                              warp() * (2 * K / kWarps) + lane() % 4 * 16;
        await_place();
#pragma unroll
        for (int j = 0; j < 8; ++j) octet[j] = load_shared(from + 64 * j);
        leave_place();
    }

    // The warp's part of eight rows' sums for all tokens, to the sums of octet `i`.
    __device__ __forceinline__ void multiply(const Slice& x, const Octet& octet, int i) const {
        float c[4][4] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            multiply_add(c[j % 2 * 2], x[j][0].x, x[j][1].x, x[j][0].y, x[j][1].y, octet[j].x,
                         octet[j].y);
            multiply_add(c[j % 2 * 2 + 1], x[j][0].z, x[j][1].z, x[j][0].w, x[j][1].w, octet[j].z,
                         octet[j].w);
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) c[0][r] = (c[0][r] + c[1][r]) + (c[2][r] + c[3][r]);
        float2* to = at<float2>(kSums + i * kSumBytes) + warp() * 64 + lane();
        to[0] = make_float2(c[0][0], c[0][1]);
        to[32] = make_float2(c[0][2], c[0][3]);
    }

    // Of the octet with the warp's number: of token lane / 2 the first or the last four rows.
    __device__ __forceinline__ float4 sum_of_octet() const {
        const float4* from = at<float4>(kSums + warp() * kSumBytes) + lane();
        float4 v[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float4 a = from[w * 64], b = from[w * 64 + 32];
            v[w] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
        }
        return make_float4((v[0].x + v[1].x) + (v[2].x + v[3].x),
                           (v[0].y + v[1].y) + (v[2].y + v[3].y),
                           (v[0].z + v[1].z) + (v[2].z + v[3].z),
                           (v[0].w + v[1].w) + (v[2].w + v[3].w));
    }

    __device__ __forceinline__ static void add_bias(float4& v, const unsigned short* bias, int at) {
        if (!bias) return;
        v.x += bf16_value(bias[at]), v.y += bf16_value(bias[at + 1]);
        v.z += bf16_value(bias[at + 2]), v.w += bf16_value(bias[at + 3]);
    }

    // ---- x

    __device__ __forceinline__ void embed(Slice& x) const {
        const int g = lane() / 4, t = lane() % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = g + 8 * i;
            const bool is_there = token < args.num_tokens;
            const long long row = is_there ? args.tokens[token] : 0;
            const unsigned short* from =
                args.embeddings + row * K + warp() * (K / kWarps) + 8 * t;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                x[j][i] = four_times(0);
                load_streamed_if(is_there, from + 32 * j, x[j][i]);
            }
        }
    }

    // Tokens that are not there are zeros.
    __device__ __forceinline__ void await_x(Slice& x, const unsigned* from) const {
        const int g = lane() / 4, t = lane() % 4;
        uint4(&v)[16] = reinterpret_cast<uint4(&)[16]>(x);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = four_times(g + i % 2 * 8 < args.num_tokens ? ~0u : 0);
        from += place_in_row(g, warp() * (K / kWarps)) + t * 4;
        await_all(v, [&](int i) { return from + i / 2 * (kTokens * 16) + i % 2 * 128; });
    }

    __device__ __forceinline__ uint4 norm_weights(const unsigned short* row) const {
        uint4 v;
        load_streamed_if(true, row + 8 * thread(), v);
        return v;
    }

    // x times the weights, `norm` being those of the eight of columns with the thread's number; and
    // sums of squares. The root comes behind the products: they do not wait for it.
    __device__ __forceinline__ void normalise_x(Slice& x, const uint4& norm) {
        const int g = lane() / 4, t = lane() % 4;
        uint4* weights = at<uint4>(kNormWeights) + warp() * 32;
        weights[lane()] = norm;
        norms_at ^= 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float v[8];
                unpack(x[j][i], v);
                sum += sum_of_squares(v);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) norms_of(g + 8 * i)[warp()] = sum;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint4 weight = weights[4 * j + t];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                x[j][i] = make_uint4(
                    multiply_pairs(x[j][i].x, weight.x), multiply_pairs(x[j][i].y, weight.y),
                    multiply_pairs(x[j][i].z, weight.z), multiply_pairs(x[j][i].w, weight.w));
        }
    }

    __device__ __forceinline__ float* norms_of(int token) const {
        return at<float>(kNorms) + (norms_at * kTokens + token) * kWarps;
    }

    // Sums over x that was normalised.
    __device__ __forceinline__ float4 normalised_sum(int token) const {
        const float4 sum = sum_of_octet();
        const float root = reciprocal_root(sum_of_warps(norms_of(token)) * (1.f / K) + args.eps);
        return make_float4(sum.x * root, sum.y * root, sum.z * root, sum.w * root);
    }
};

}  // namespace
