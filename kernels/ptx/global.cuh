// Global memory. Loads come in families, one for each way through the caches. Of a family, NAME
// loads 16 bytes, NAME_pair 8, NAME_word 4 and NAME_half 2; NAME_if and NAME_word_if load into `v`,
// or leave it as it is: a predicate, no branch.
#pragma once

#define TWELL_LOADS(NAME, HOW, ...)                                                              \
    __device__ __forceinline__ uint4 NAME(const void* from) {                                    \
        uint4 v;                                                                                 \
        asm volatile("ld." HOW ".v4.u32 {%0, %1, %2, %3}, [%4];"                                 \
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                \
                     : "l"(from)__VA_ARGS__);                                                    \
        return v;                                                                                \
    }                                                                                            \
    __device__ __forceinline__ void NAME##_if(bool wanted, const void* from, uint4& v) {         \
        asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld." HOW                           \
                     ".v4.u32 {%0, %1, %2, %3}, [%4];}"                                          \
                     : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)                                \
                     : "l"(from), "r"(static_cast<unsigned>(wanted))__VA_ARGS__);                \
    }                                                                                            \
    __device__ __forceinline__ uint2 NAME##_pair(const void* from) {                             \
        uint2 v;                                                                                 \
        asm volatile("ld." HOW ".v2.u32 {%0, %1}, [%2];"                                         \
                     : "=r"(v.x), "=r"(v.y)                                                      \
                     : "l"(from)__VA_ARGS__);                                                    \
        return v;                                                                                \
    }                                                                                            \
    __device__ __forceinline__ unsigned NAME##_word(const void* from) {                          \
        unsigned v;                                                                              \
        asm volatile("ld." HOW ".u32 %0, [%1];" : "=r"(v) : "l"(from)__VA_ARGS__);               \
        return v;                                                                                \
    }                                                                                            \
    __device__ __forceinline__ void NAME##_word_if(bool wanted, const void* from, unsigned& v) { \
        asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld." HOW ".u32 %0, [%1];}"         \
                     : "+r"(v)                                                                   \
                     : "l"(from), "r"(static_cast<unsigned>(wanted))__VA_ARGS__);                \
    }                                                                                            \
    __device__ __forceinline__ unsigned NAME##_half(const void* from) {                          \
        unsigned short v;                                                                        \
        asm volatile("ld." HOW ".u16 %0, [%1];" : "=h"(v) : "l"(from)__VA_ARGS__);               \
        return v;                                                                                \
    }

// What nobody writes while the kernel runs. Streamed: no other warp here wants it, so L1 does not
// keep it.
TWELL_LOADS(load_constant, "global.nc")
TWELL_LOADS(load_streamed, "global.nc.L1::no_allocate")

// What the previous kernel wrote, behind the wait for it (pdl.cuh): loaded where the call stands,
// and from L2.
TWELL_LOADS(load_written, "global.cg", : "memory")

// What other blocks write while the kernel runs: no older than L2 has it, whole in each word.
TWELL_LOADS(load_relaxed, "relaxed.gpu.global", : "memory")

#undef TWELL_LOADS

// A word, or anything.
__device__ __forceinline__ unsigned load_constant_or_leave(bool wanted, const unsigned* from) {
    unsigned word;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1];}"
                 : "=r"(word)
                 : "l"(from), "r"(static_cast<unsigned>(wanted)));
    return word;
}

// Numbers that lie together, or what was there.
__device__ __forceinline__ void load_floats_if(bool wanted, const float* from, float& a, float& b) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.f32 {%0, %1}, [%2];}"
                 : "+f"(a), "+f"(b)
                 : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

__device__ __forceinline__ void load_floats_if(bool wanted, const float* from, float (&v)[4]) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];}"
                 : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
                 : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

__device__ __forceinline__ void store_pair(void* to, unsigned low, unsigned high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

// Where `wanted` is not zero and place < limit: with the comparisons in C++ gate_pack has 250
// instructions more.
__device__ __forceinline__ void store_if(unsigned wanted, int place, int limit, void* to,
                                         unsigned word) {
    asm volatile(
        "{\n"
        ".reg .pred fits, store;\n"
        "setp.lt.s32 fits, %1, %2;\n"
        "setp.ne.and.u32 store, %0, 0, fits;\n"
        "@store st.global.u32 [%3], %4;\n"
        "}" ::"r"(wanted),
        "r"(place), "r"(limit), "l"(to), "r"(word)
        : "memory");
}

__device__ __forceinline__ void add_to(float* to, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void prefetch_into_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
