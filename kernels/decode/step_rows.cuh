// The rows of neurons that are listed, in `step` (step.cuh): they go from memory into registers,
// for nobody knows of them early enough for the ring.
//
// Sums with x: a warp has two rows at a time, of each 256 bytes an mma, whose columns of b are x's
// four groups there (step_products.cuh). So its low half has the first row and its high half the
// second, and the next two are on their way meanwhile.
//
// Onto y: each warp has its slice of all rows, some rows on their way.
#pragma once

#include "decode/step_fired.cuh"
#include "ptx/barriers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/weights.cuh"

namespace {

struct Rows : Fired {
    using Fired::Fired;
    static constexpr int kRowBytes = Layers::kRowBytes, kEightBytes = Weight::bytes(8);
    static constexpr int kChunks = kRowBytes / 256;           // of 16 bytes, of a lane, of two rows
    static constexpr int kMostFlight = 16 / Weight::kEights;  // as there are registers
    static constexpr int kFlight = kChunks > kMostFlight ? kChunks / 2 : kChunks;
    static constexpr int kRowFlight = kEights > 1 ? 6 : 12;
    using Eight = Weight::Eight;

    __device__ __forceinline__ static const char* row_at(const void* weight, int neuron) {
        return static_cast<const char*>(weight) + static_cast<long long>(neuron) * kRowBytes;
    }

    // of(i) is where row i of `num` begins; use(i, sum) is called by one thread.
    template <class Of, class Use>
    __device__ __forceinline__ void sum_rows(int num, const Of& of, const Use& use) const {
        const int lane = thread() % 32, high = lane / 16;
        const unsigned long long policy = passing_by();
        const auto begin = [&](int pair) {
            return of(min(2 * pair + high, num - 1)) + lane % 16 * 16;
        };
        int pair = thread() / 32;
        if (2 * pair >= num) return;
        const char* from = begin(pair);
        uint4 chunks[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            chunks[i] = make_uint4(0, 0, 0, 0);
            load_passing_if(true, from + 256 * i, chunks[i], policy);
        }
#pragma unroll 1
        for (; 2 * pair < num; pair += kWarps) {
            const bool more = 2 * (pair + kWarps) < num;
            const char* next = more ? begin(pair + kWarps) : from;
            float sum = 0.f, parts[2][4] = {};
#pragma unroll 1
            for (int i = 0; i < kChunks; i += kFlight) {
                const bool is_last = i + kFlight == kChunks;
                from = is_last ? next : from + 256 * kFlight;
#pragma unroll
                for (int j = 0; j < kFlight; ++j) {
                    add_chunk(sum, parts, i + j, j % 2, chunks[j]);
                    load_passing_if(more || !is_last, from + 256 * j, chunks[j], policy);
                }
            }
            if constexpr (!Weight::kInF16)
                sum = (parts[0][0] + parts[0][3]) + (parts[1][0] + parts[1][3]);
            if (lane % 4 != lane / 4 % 4) sum = 0.f;
            sum += __shfl_xor_sync(~0u, sum, 5);
            sum += __shfl_xor_sync(~0u, sum, 10);
            if (lane % 16 == 0 && 2 * pair + high < num) use(2 * pair + high, sum);
        }
    }

    // y += hidden[i] times the row of W_down of the list's neuron i. All warps know of hidden when
    // they have met; they ask for rows before, and do `meanwhile`.
    template <class Meanwhile>
    __device__ __forceinline__ void add_rows(float (&y)[kEights][8], const Layer& layer,
                                             const int* list, const float* hidden, int num,
                                             const Meanwhile& meanwhile) const {
        const unsigned long long policy = passing_by();
        Eight rows[kRowFlight][kEights];
        const auto fetch = [&](Eight(&row)[kEights], int i) {
            const bool is_there = i < num;
            const int neuron = is_there ? list[i] : 0;
            const char* from = row_at(layer.down, neuron) + kEightBytes * eight_of(0);
#pragma unroll
            for (int e = 0; e < kEights; ++e)
                load_passing_if(is_there && has_eight(e), from + 32 * kEightBytes * e, row[e],
                                policy);
        };
#pragma unroll
        for (int j = 0; j < kRowFlight; ++j) {
#pragma unroll
            for (int e = 0; e < kEights; ++e) rows[j][e] = {};
            fetch(rows[j], j);
        }
        meanwhile();
        sync_consumers();
#pragma unroll 1
        for (int first = 0; first < num; first += kRowFlight) {
#pragma unroll
            for (int j = 0; j < kRowFlight; ++j) {
                if (first + j >= num) break;
                const float h = hidden[first + j];
#pragma unroll
                for (int e = 0; e < kEights; ++e) add_eight(y[e], rows[j][e], h);
                fetch(rows[j], first + j + kRowFlight);
            }
        }
        __syncwarp();
        if (thread() % 32 == 0) barrier_arrive(has_rows());
    }

    // y += h times eight weights of a row.
    __device__ __forceinline__ static void add_eight(float (&y)[8], const Eight& eight, float h) {
        float w[8];
        Weight::unpack_eight(eight, w);
#pragma unroll
        for (int c = 0; c < 8; ++c) y[c] += h * w[c];
    }

  private:
    // Chunk `i` of two rows; in f16 the sum is whole, for x has a power in each slice.
    __device__ __forceinline__ void add_chunk(float& sum, float (&parts)[2][4], int i, int in,
                                              const uint4& chunk) const {
        const int lane = thread() % 32, column = lane / 4;
        const unsigned x = group_of_x(i, column / 2) + lane % 4 * (kXGroup / 4) + column % 2 * 8;
        float all[4] = {};
#pragma unroll
        for (int part = 0; part < Weight::kEights; ++part) {
            const uint2 b = read_shared_pair(x + 16 * part);
            const uint4 a = operands_of<Weight, Weight::kInF16>(chunk, part);
            multiply_add_either<Weight::kInF16>(Weight::kInF16 ? all : parts[in], a.x, a.y, a.z,
                                                a.w, b.x, b.y);
        }
        if constexpr (Weight::kInF16)
            sum += opaque(all[0] + all[3]) * at<float>(kBacks)[(4 * i + column % 4) / kSliceGroups];
    }

    // Groups of 64 bytes of a row; bytes of x beside one.
    static constexpr int kSliceGroups = Layers::kSliceBytes / 64, kXGroup = 64 * Weight::kEights;

    // Where x beside group `in_chunk` of the four of a chunk lies.
    __device__ __forceinline__ unsigned group_of_x(int chunk, int in_chunk) const {
        if constexpr (!Layers::kIsOdd)
            return memory + kDealt + chunk * (4 * kXGroup) + in_chunk * kXGroup;
        const int group = 4 * chunk + in_chunk;
        const int slice = group / kSliceGroups, in = group % kSliceGroups;
        const int behind = Layers::kIsOdd && slice % 2 ? kXGroup : 0;
        return memory + kDealt + slice * Layers::kXBytes + behind + in * kXGroup;
    }
};

}  // namespace
