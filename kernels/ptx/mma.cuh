// The warp's product on tensor cores, 16 x 8 x 16, and its operands from shared memory. Of a warp,
// lane = 4 g + t in what follows: g = 0 .. 7 is called the quad, t = 0 .. 3 the thread in it.
#pragma once

// Four 8 x 8 matrices of 16 bits, transposed: lane i gives the address of row i % 8 of matrix i / 8
// and gets of each matrix column g, rows 2t and 2t + 1. For memory that does not change any more:
// the compiler may move this.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
        : "r"(smem_row));
}

// Two of them, into m[0] and m[1]: lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_two_matrices_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
        : "=r"(m[0]), "=r"(m[1])
        : "r"(smem_row));
}

// Four of memory that changes: all lanes have read when this returns.
__device__ __forceinline__ void read_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(smem_row)
                 : "memory");
}

// sums [16, 8] += a [16, 16] b [16, 8], bf16 in and fp32 out. A lane holds, two to a register:
//   a   (row g, columns 2t ..), (row g + 8, 2t ..), (row g, 2t + 8 ..), (row g + 8, 2t + 8 ..)
//   b   (rows 2t .., column g), (rows 2t + 8 .., column g)
//   sums (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1,
                                             unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of f16.
__device__ __forceinline__ void multiply_add_f16(float (&sums)[4], unsigned a0, unsigned a1,
                                                 unsigned a2, unsigned a3, unsigned b0,
                                                 unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// multiply_add where of a only rows 0 - 7 are wanted: sums[0] and sums[1]. Of its other rows a
// register holds anything, so the other two sums are anything.
__device__ __forceinline__ void multiply_add_upper(float (&sums)[4], unsigned a0, unsigned a2,
                                                   unsigned b0, unsigned b1) {
    asm("{.reg .b32 any0, any1;"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, any0, %5, any1}, {%6, %7}, {%0, %1, %2, %3};}"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a2), "r"(b0), "r"(b1));
}

// The same of bytes with a sign, of whole numbers: sums [16, 8] += a [16, 32] b [32, 8]. A lane
// holds four to a register:
//   a   (row g, columns 4t ..), (row g + 8, 4t ..), (row g, 4t + 16 ..), (row g + 8, 4t + 16 ..)
//   b   (rows 4t .., column g), (rows 4t + 16 .., column g)
__device__ __forceinline__ void multiply_add_bytes(int (&sums)[4], unsigned a0, unsigned a1,
                                                   unsigned a2, unsigned a3, unsigned b0,
                                                   unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
