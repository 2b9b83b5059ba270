// A kernel that starts before the one it depends on has ended (programmatic dependent launch, from
// sm_90 on). Without the launch attribute, and before sm_90, both calls do nothing.
//
//     load what no kernel just before writes: weights, tables, old pages
//     wait_for_previous();     the previous kernel has ended, and what it wrote is seen
//     let_next_start();        the next one may do its own first part
//     read what the previous one wrote; write
//
// In this order the kernel before the previous one has ended when a kernel starts: so its first
// part may read all but what the previous kernel writes. Nothing is written before the wait: the
// previous kernel may still be reading it.
//
// Short kernels (norm, attend, few_down, few_walk) call let_next_start() first of all, so that the
// weights of what follows come while they run. The first part of a kernel that may follow one of
// them must read constants only: weights. `attend` and few_walk read more, old pages and x: they
// follow few_linear, behind whose wait all that came before has ended, or a kernel that did not
// start early.
#pragma once

#include "twell.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
__device__ __forceinline__ void wait_for_previous() {}
__device__ __forceinline__ void let_next_start() {}
#endif

// ---- what the previous kernel wrote: asked for where it stands, behind the wait, and of L2

__device__ __forceinline__ uint4 load_written(const void* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Into `v`, or nothing: a predicate, no branch.
__device__ __forceinline__ void load_written_if(bool wanted, const void* from, uint4& v) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
}

__device__ __forceinline__ uint2 load_written_pair(const unsigned short* from) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ unsigned load_written_word(const unsigned short* from) {
    unsigned v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ float load_written_bf16(const unsigned short* from) {
    unsigned short bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
    return bf16_value(bits);
}
