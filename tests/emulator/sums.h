// What the kernels of the training pass and `down` do by inline assembly, for a CPU, and blocks that
// run one after the other.
#pragma once

#include "gpu.h"

#define __shared__ static  // of the one block that runs
#define __global__ static
#define __launch_bounds__(...)
#undef blockIdx
#undef gridDim

struct int2 {
    int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline Dim the_block, the_grid;
#define blockIdx the_block
#define gridDim the_grid

// Whether all blocks came to their end.
template <class Body>
bool each_block(int columns, int rows, int num_threads, size_t shared_bytes, const Body& body) {
    the_grid = {static_cast<unsigned>(columns), static_cast<unsigned>(rows), 1};
    for (unsigned y = 0; y < the_grid.y; ++y)
        for (unsigned x = 0; x < the_grid.x; ++x) {
            the_block = {x, y, 0};
            const size_t whole = (shared_bytes + 15) / 16 * 16;
            if (!emulator::run(1, num_threads, whole, 1 + x + 7 * y, body)) return false;
        }
    return true;
}

inline unsigned atomicOr(unsigned* to, unsigned bits) {
    const unsigned before = *to;
    *to |= bits;
    return before;
}

// ---- arithmetic, memory, tensor cores

inline unsigned dynamic_smem_bytes() { return emulator::thread->block->bytes(); }
inline unsigned scale_and_add(unsigned a, unsigned b, unsigned c) { return a * b + c; }
template <class T>
inline T* offset_by(T* pointer, unsigned index, unsigned bytes) {
    const auto at = reinterpret_cast<uintptr_t>(pointer) + static_cast<uint64_t>(index) * bytes;
    return reinterpret_cast<T*>(at);
}
inline unsigned load_shared_half(unsigned from) {
    return read_as<unsigned short>(own_shared(from, 2));
}
inline uint2 load_shared_pair(unsigned from) { return read_as<uint2>(own_shared(from, 8)); }
inline void copy_async(unsigned to, const void* from) { std::memcpy(own_shared(to, 16), from, 16); }
inline void commit_copies() {}
template <int PENDING>
inline void wait_for_copies() {}
inline void load_constant_word_if(bool wanted, const unsigned* from, unsigned& word) {
    if (wanted) word = *from;
}
inline unsigned load_constant_or_leave(bool wanted, const unsigned* from) {
    return wanted ? *from : 0xdeadbeef;
}
inline void load_floats_if(bool wanted, const float* from, float& a, float& b) {
    if (wanted) a = from[0], b = from[1];
}
inline void load_floats_if(bool wanted, const float* from, float (&v)[4]) {
    if (wanted) std::copy(from, from + 4, v);
}
inline void store_pair(void* to, unsigned low, unsigned high) {
    const unsigned both[2] = {low, high};
    if (reinterpret_cast<uintptr_t>(to) % 8) emulator::fail("a store that is not aligned");
    std::memcpy(to, both, 8);
}

// ---- sums of rows

inline unsigned load_shared_word(unsigned from) { return read_as<unsigned>(own_shared(from, 4)); }
inline void load_transposed(unsigned (&m)[4], unsigned row, int num) {
    const uint64_t own = row;
    auto all = emulator::exchange(&own, 1);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < num; ++i) {
        m[i] = 0;
        for (int j = 0; j < 2; ++j) {
            const char* from = own_shared(all[8 * i + 2 * t + j][0], 16);
            m[i] |= read_as<unsigned short>(from + 2 * g) << 16 * j;
        }
    }
}
inline void load_matrices_transposed(unsigned (&m)[4], unsigned row) { load_transposed(m, row, 4); }
inline void load_two_matrices_transposed(unsigned (&m)[4], unsigned row) {
    load_transposed(m, row, 2);
}
inline void multiply_add_upper(float (&sums)[4], unsigned low, unsigned high, unsigned octet0,
                               unsigned octet1) {
    const uint64_t own[4] = {low, high, octet0, octet1};
    auto all = emulator::exchange(own, 4);
    const auto product = [](uint64_t a, uint64_t b) {
        const auto half = [](uint64_t word, int i) {
            return __uint_as_float(static_cast<unsigned>(word >> 16 * i) << 16);
        };
        return half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1);
    };
    for (int i = 0; i < 2; ++i)
        for (int t = 0; t < 4; ++t) {
            const uint64_t* a = all[emulator::lane() / 4 * 4 + t];
            const uint64_t* b = all[(emulator::lane() % 4 * 2 + i) * 4 + t];
            sums[i] += product(a[0], b[2]) + product(a[1], b[3]);
        }
    sums[2] = sums[3] = __uint_as_float(0x7fc00000);  // anything
}
