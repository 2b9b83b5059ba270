// expand_quads: the weight of a linear layer in bf16, out of codes of 4 bits that lie by quads, as
// `step` reads them (step_codes.cuh).
// expand_neurons: that of W_down, whose codes lie by neurons (step_codes_down.cuh), as does what it
// becomes.
//
//   codes   by quads [rows / 4][2 columns + 8 columns / group]: the codes of four rows, then their
//           scales; by neurons [rows][columns / 2]. Block b, 64 columns, of a row lies in place
//           b ^ row % 4, by neurons b ^ row / 4 % 4
//   scales  bf16 [rows / group][columns], by neurons
//   weight  bf16 [rows][columns]: a code times its scale, rounded to nearest
//
// What bounds it is memory: half a byte of codes comes for two that go.
//
// Launch: 256 threads, a block for each 1024 eights of columns. Columns a multiple of 256.
#include "ptx/global.cuh"
#include "tile/eights.cuh"

namespace {

constexpr int kThreads = 256, kEights = 4;  // of a thread

// Calls do_eight(row, column) for each eight of a thread, by its first column.
template <class Do>
__device__ __forceinline__ void for_each_eight(int num_rows, int columns, Do&& do_eight) {
    const unsigned num = columns / 8, first = blockIdx.x * kEights * kThreads + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
        const unsigned eight = first + i * kThreads, row = eight / num;
        if (row < static_cast<unsigned>(num_rows))
            do_eight(static_cast<int>(row), static_cast<int>(8 * (eight % num)));
    }
}

// Where the codes of a column lie in a row, in bytes.
__device__ __forceinline__ int place_of(int column, int turn) {
    return 32 * (column / 64 ^ turn) + column % 64 / 2;
}

// Times `scales`; of two columns the even one is in the upper half of a byte.
__device__ __forceinline__ uint4 scaled(unsigned word, const float (&scales)[8]) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int code = static_cast<int>(word << (24 - 8 * (i / 2) + 4 * (i % 2))) >> 28;
        values[i] = static_cast<float>(code) * scales[i];
    }
    return pack(values);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_quads(const unsigned char* codes, int num_rows, int columns, int group,
                 unsigned short* weight) {
    const int row_bytes = columns / 2, num_scales = columns / group;
    for_each_eight(num_rows, columns, [&](int row, int column) {
        const int own = row % 4;
        const unsigned char* quad = codes + row / 4 * (4LL * row_bytes + 8 * num_scales);
        const unsigned word = load_streamed_word(quad + own * row_bytes + place_of(column, own));
        const int place = own * num_scales + column / group;
        const float scale = bf16_value(load_constant_half(quad + 4 * row_bytes + 2 * place));
        const float scales[8] = {scale, scale, scale, scale, scale, scale, scale, scale};
        uint4* to = reinterpret_cast<uint4*>(weight + static_cast<long long>(row) * columns);
        to[column / 8] = scaled(word, scales);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_neurons(const unsigned char* codes, const unsigned short* scales, int num_rows,
                   int columns, int group, unsigned short* weight) {
    for_each_eight(num_rows, columns, [&](int row, int column) {
        const unsigned char* own = codes + row * (columns / 2LL);
        const unsigned word = load_streamed_word(own + place_of(column, row / 4 % 4));
        float of_group[8];
        unpack(load_constant(scales + row / group * static_cast<long long>(columns) + column),
               of_group);
        uint4* to = reinterpret_cast<uint4*>(weight + static_cast<long long>(row) * columns);
        to[column / 8] = scaled(word, of_group);
    });
}
