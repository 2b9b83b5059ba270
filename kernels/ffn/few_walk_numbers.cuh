// What few_walk computes with: its two products by mma, in bf16 or in f16, as its kind of weights
// becomes (tile/weights.cuh). Of each mma a part is wanted. Even so it takes a fraction of the
// instructions that unpacking and adding up would, and the first run of a kernel through its code
// costs time by their number (0.1 us for a hundred).
//
//     dot products with x      rows: a quad's columns; columns: a quad's x; wanted: the diagonal
//     sums of h times rows     rows: columns of y; columns: which lane's; k: pairs of that lane
//
// (Of a warp, lane = 4 g + t: g is the quad, t the lane in it, as in ptx/mma.cuh.) Both kinds have
//
//     Input              the thread's columns of x: `load` asks for them, `settle` makes them what
//                        `find_dots` takes
//     find_dots          to lane t = g / 2 of each quad, of each pair: the sum over the quad's
//                        columns
//     Sums               of columns of y. `add` adds kBatch pairs, of which lanes 8 i have h of
//                        pairs 2 i and 2 i + 1 in bf16. At the end the lane has fours of columns,
//                        from `first_column` on
#pragma once

#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/compiler.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "tile/halves.cuh"
#include "tile/weights.cuh"

namespace few_walk {

constexpr int kBatch = spec::FEW_WALK_BATCH;  // pairs of which rows are under way, of a way

using Rows = uint4[kBatch];

// of a block, at most: the fewer bits a weight has, the fewer threads has a row
template <class Weight>
constexpr int kWays = spec::FEW_WALK_WAYS * Weight::kEights;

// Of kinds of weights that have them, else null.
struct Scales {
    const float *neurons, *columns;  // of rows of W_up, of columns of y

    __device__ __forceinline__ float of_neuron(unsigned neuron) const {
        return __uint_as_float(load_constant_word(neurons + neuron));
    }
    // Of four, from column `first` on.
    __device__ __forceinline__ uint4 of_columns(int first) const {
        return load_constant(columns + first);
    }
};

template <class Weight, bool IN_F16 = Weight::kInF16>
struct Numbers {
    static_assert(Weight::kEights == 1, "a thread has eight columns");
    using Input = uint4;

    __device__ __forceinline__ static Input load(const unsigned short* from) {
        return load_written(from);
    }
    __device__ __forceinline__ static void settle(Input&) {}

    __device__ __forceinline__ static void find_dots(const Rows& up, const Input& x,
                                                     float (&dots)[kBatch]) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            // rows g of `a` have words 0 and 2, rows g + 8 words 1 and 3
            float a[4] = {}, b[4] = {};
            multiply_add(a, up[i].x, up[i].y, up[i].z, up[i].w, x.x, x.z);
            multiply_add(b, up[i].x, up[i].y, up[i].z, up[i].w, x.y, x.w);
            dots[i] = g % 2 ? a[1] + b[3] : a[0] + b[2];
        }
    }

    class Sums {
      public:
        __device__ __forceinline__ void add(const Rows& down, unsigned hidden) {
            const bool is_own = threadIdx.x % 4 == threadIdx.x / 4 % 4;
            unsigned h[kBatch / 2];
#pragma unroll
            for (int i = 0; i < kBatch / 2; ++i) {
                h[i] = __shfl_sync(~0u, hidden, 8 * i);
                if (!is_own) h[i] = 0;
            }
#pragma unroll
            for (int i = 0; i < kBatch; i += 4) {
                const uint4 &a = down[i], &b = down[i + 1], &c = down[i + 2], &d = down[i + 3];
                add_pairs(y_[0], a.x, b.x, c.x, d.x, h[i / 2], h[i / 2 + 1]);
                add_pairs(y_[1], a.y, b.y, c.y, d.y, h[i / 2], h[i / 2 + 1]);
                add_pairs(y_[2], a.z, b.z, c.z, d.z, h[i / 2], h[i / 2 + 1]);
                add_pairs(y_[3], a.w, b.w, c.w, d.w, h[i / 2], h[i / 2 + 1]);
            }
        }

        // Each lane of a quad sends an eight that it has.
        __device__ __forceinline__ static int first_column(int thread) {
            const int t = threadIdx.x % 4;
            return 8 * (thread / 4 * 4 + t % 2 * 2 + t / 2);
        }
        __device__ __forceinline__ float4 four(int i) const {
            const int t = threadIdx.x % 4;
            i *= 2;
            return make_float4(t / 2 ? y_[i][1] : y_[i][0], t / 2 ? y_[i][3] : y_[i][2],
                               t / 2 ? y_[i + 1][1] : y_[i + 1][0],
                               t / 2 ? y_[i + 1][3] : y_[i + 1][2]);
        }

      private:
        // Two columns of four pairs.
        __device__ __forceinline__ static void add_pairs(float (&y)[4], unsigned a, unsigned b,
                                                         unsigned c, unsigned d, unsigned h,
                                                         unsigned more) {
            multiply_add(y, permute_bytes(a, b, 0x5410), permute_bytes(a, b, 0x7632),
                         permute_bytes(c, d, 0x5410), permute_bytes(c, d, 0x7632), h, more);
        }

        // y_[i][0] and [2]: columns 2 i and 2 i + 1 of the eight of lane 2 t of the quad (t = 2: 0,
        // t = 3: 2), [1] and [3]: of the one behind it
        float y_[4][4] = {};
    };
};

// Weights become f16, exactly. So do x and h, times powers of two (tile/halves.cuh): that of x is
// of a quad's columns, whose sum is one of its own; that of h is of the largest so far. No half of
// an mma is thrown away as in bf16. For the dots rows g have one pair, rows g + 8 the next. For y
// a word has two columns side by side of one row: columns of b choose the lane and the one of both.
template <class Weight>
struct Numbers<Weight, true> {
    struct Input {
        uint4 of[Weight::kEights];
        float back;  // what sums with them are multiplied by
    };

    __device__ __forceinline__ static Input load(const unsigned short* from) {
        Input x;
#pragma unroll
        for (int part = 0; part < Weight::kEights; ++part)
            x.of[part] = load_written(from + 8 * part);
        x.back = 0.f;
        return x;
    }
    __device__ __forceinline__ static void settle(Input& x) {
        unsigned most = 0;
#pragma unroll
        for (int part = 0; part < Weight::kEights; ++part) most = most_of(x.of[part], most);
        most = max(most & 0xffff, most >> 16);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        most = max(most, __shfl_xor_sync(~0u, most, 2));
        const unsigned power = power_for_f16(most), pair = power << 7 | power << 23;
#pragma unroll
        for (int part = 0; part < Weight::kEights; ++part) x.of[part] = scaled(x.of[part], pair);
        x.back = power_back(power);
    }

    __device__ __forceinline__ static void find_dots(const Rows& up, const Input& x,
                                                     float (&dots)[kBatch]) {
        const bool is_odd = threadIdx.x / 4 % 2;
#pragma unroll
        for (int i = 0; i < kBatch; i += 2) {
            float both[4] = {};
#pragma unroll
            for (int part = 0; part < Weight::kEights; ++part)
                add_dots(both, Weight::as_f16(up[i], part), Weight::as_f16(up[i + 1], part),
                         x.of[part]);
            dots[i] = x.back * (is_odd ? both[1] : both[0]);
            dots[i + 1] = x.back * (is_odd ? both[3] : both[2]);
        }
    }

    class Sums {
      public:
        __device__ __forceinline__ void add(const Rows& down, unsigned hidden) {
            make_room(hidden);
            hidden = scaled_f16(hidden, power_ << 7 | power_ << 23);
            // column g of b is of lane g / 2, there of the values g % 2 of its words
            const int lane = opaque(threadIdx.x % 32), g = lane / 4;  // made here: else it spills
            const bool is_own = lane % 4 == g / 2;
            const unsigned first = !is_own ? 0x4444 : g % 2 ? 0x1044 : 0x4410;
            const unsigned second = !is_own ? 0x4444 : g % 2 ? 0x3244 : 0x4432;
#pragma unroll
            for (int i = 0; i < kBatch; i += 2) {
                const unsigned both = __shfl_sync(~0u, hidden, 4 * i);
                const unsigned h = permute_bytes(both, 0, first);
                const unsigned more = permute_bytes(both, 0, second);
#pragma unroll
                for (int part = 0; part < Weight::kEights; ++part)
                    add_eight(y_[2 * part], y_[2 * part + 1], Weight::as_f16(down[i], part),
                              Weight::as_f16(down[i + 1], part), h, more);
            }
        }

        __device__ __forceinline__ static int first_column(int thread) {
            return Weight::kEach * thread;
        }
        __device__ __forceinline__ float4 four(int i) const {
            const float back = power_back(power_);
            return make_float4(back * y_[i][0], back * y_[i][1], back * y_[i][2], back * y_[i][3]);
        }

      private:
        // Before pairs are added of which some h may be larger than all before.
        __device__ __forceinline__ void make_room(unsigned hidden) {
            unsigned most = hidden & 0x7fff7fff;
            most = max(most & 0xffff, most >> 16);
            most = max(most, __shfl_xor_sync(~0u, most, 8));
            most = max(most, __shfl_xor_sync(~0u, most, 16));
            const unsigned power = min(power_, power_for_f16(most));
            const int exponent = max(127 + static_cast<int>(power) - static_cast<int>(power_), 0);
            const float change = __uint_as_float(static_cast<unsigned>(exponent) << 23);
#pragma unroll
            for (int i = 0; i < kFours; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) y_[i][j] *= change;
            power_ = power;
        }

        // Eight columns of two pairs: rows g of the mma have two columns, rows g + 8 the next two.
        __device__ __forceinline__ static void add_eight(float (&y)[4], float (&next)[4],
                                                         const uint4& a, const uint4& b, unsigned h,
                                                         unsigned more) {
            multiply_add_f16(y, a.x, a.y, b.x, b.y, h, more);
            multiply_add_f16(next, a.z, a.w, b.z, b.w, h, more);
        }

        static constexpr int kFours = Weight::kEach / 4;
        float y_[kFours][4] = {};  // the thread's columns 4 i + j, times the power of two
        unsigned power_ = 253;     // by its exponent: the largest (power_for_f16)
    };

  private:
    __device__ __forceinline__ static uint4 scaled(const uint4& v, unsigned pair) {
        return make_uint4(scaled_f16(v.x, pair), scaled_f16(v.y, pair), scaled_f16(v.z, pair),
                          scaled_f16(v.w, pair));
    }
    __device__ __forceinline__ static void add_dots(float (&sums)[4], const uint4& a,
                                                    const uint4& b, const uint4& x) {
        multiply_add_f16(sums, a.x, b.x, a.y, b.y, x.x, x.y);
        multiply_add_f16(sums, a.z, b.z, a.w, b.w, x.z, x.w);
    }
};

}  // namespace few_walk
