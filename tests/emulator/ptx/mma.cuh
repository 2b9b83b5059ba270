#pragma once

namespace emulator {

void multiply_add(float* sums, const uint64_t (&own)[6]);
void multiply_add_f16(float* sums, const uint64_t (&own)[6]);
void multiply_add_bytes(int* sums, const uint64_t (&own)[6]);
void read_transposed(unsigned* m, unsigned smem_row, int num);

}  // namespace emulator

inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
    emulator::multiply_add(sums, {a0, a1, a2, a3, b0, b1});
}

inline void multiply_add_f16(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                             unsigned b0, unsigned b1) {
    emulator::multiply_add_f16(sums, {a0, a1, a2, a3, b0, b1});
}

inline void multiply_add_upper(float (&sums)[4], unsigned a0, unsigned a2, unsigned b0,
                               unsigned b1) {
    multiply_add(sums, a0, 0, a2, 0, b0, b1);
    sums[2] = sums[3] = __uint_as_float(0x7fc00000);  // anything
}

inline void multiply_add_bytes(int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                               unsigned b0, unsigned b1) {
    emulator::multiply_add_bytes(sums, {a0, a1, a2, a3, b0, b1});
}

inline void load_matrices_transposed(unsigned (&m)[4], unsigned smem_row) {
    emulator::read_transposed(m, smem_row, 4);
}
inline void load_two_matrices_transposed(unsigned (&m)[4], unsigned smem_row) {
    emulator::read_transposed(m, smem_row, 2);
}
inline void read_transposed(unsigned (&m)[4], unsigned smem_row) {
    emulator::read_transposed(m, smem_row, 4);
}
