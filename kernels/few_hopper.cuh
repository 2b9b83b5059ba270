// What few_hidden_hopper is built of beside hopper.cuh, cluster.cuh and wgmma.cuh: shared memory by
// its address, of this block and of the others of its cluster; the shapes of its products.
#pragma once

#include "hopper.cuh"
#include "wgmma.cuh"

// ---- shared memory

__device__ __forceinline__ void store_shared_byte(unsigned to, unsigned byte) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(byte) : "memory");
}

__device__ __forceinline__ void store_shared_pair(unsigned to, unsigned low, unsigned high) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void add_shared_word(unsigned to, unsigned word) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// All threads of a warpgroup.
__device__ __forceinline__ void group_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---- of block `rank`, in the place of this block's `own`

__device__ __forceinline__ float4 load_four_of_block(unsigned own, unsigned rank) {
    float4 v;
    asm volatile(
        "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
        " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(own), "r"(rank)
        : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_pair_of_block(unsigned own, unsigned rank) {
    uint2 v;
    asm volatile(
        "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %2, %3;"
        " ld.shared::cluster.v2.u32 {%0, %1}, [remote];}"
        : "=r"(v.x), "=r"(v.y)
        : "r"(own), "r"(rank)
        : "memory");
    return v;
}

__device__ __forceinline__ void or_in_block(unsigned own, unsigned rank, unsigned bits) {
    asm volatile(
        "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " red.relaxed.cluster.shared::cluster.or.b32 [remote], %2;}" ::"r"(own),
        "r"(rank), "r"(bits)
        : "memory");
}

// ---- products of a warpgroup, both operands along (wgmma.cuh)

// d += rows[64, 16] columns[104, 16]^T
__device__ __forceinline__ void wgmma_64x104x16(float (&d)[52], unsigned long long rows,
                                                unsigned long long columns) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.eq.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n104k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51},"
        " %52, %53, add, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51])
        : "l"(rows), "l"(columns));
}

// d += rows[64, 16] columns[32, 16]^T
__device__ __forceinline__ void wgmma_64x32x16(float (&d)[16], unsigned long long rows,
                                                unsigned long long columns) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.eq.b32 add, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
        " %16, %17, add, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15])
        : "l"(rows), "l"(columns));
}
