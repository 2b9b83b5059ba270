// What blocks of one kernel hand each other in global memory; load_relaxed (global.cuh) reads it.
#pragma once

__device__ __forceinline__ void store_relaxed(void* to, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_pair(void* to, unsigned low, unsigned high) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high)
                 : "memory");
}

__device__ __forceinline__ void store_relaxed_word(void* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Two numbers of 64 bits, each of which is seen whole.
__device__ __forceinline__ void store_relaxed_longs(void* to, unsigned long long low,
                                                    unsigned long long high) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
                 : "memory");
}

__device__ __forceinline__ void load_relaxed_longs(const void* from, unsigned long long& low,
                                                   unsigned long long& high) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high)
                 : "l"(from)
                 : "memory");
}

// Which of `count` blocks this one is, by when it comes. The last one comes after all the others'
// writes, and finds the tickets as they were before the first.
__device__ __forceinline__ unsigned take_ticket(unsigned* tickets, unsigned count) {
    unsigned ticket;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(tickets), "r"(count - 1)
                 : "memory");
    return ticket;
}

// What this thread has written is seen before all that it writes from here on.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
