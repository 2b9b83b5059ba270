// What `step` (step.cuh) is built of that is an instruction or two: words that say themselves
// whether they are there, barriers and bulk copies in shared memory, bf16 two by two.
//
// A word for other blocks holds a value and a tag, the number of its use. Who waits for it reads it
// until it has the tag: no fence, no flag beside it, and as fast as L2 is. Each word is written
// before each use anew, so its last tag is the one before.
#pragma once

#include "hopper.cuh"

// ---- words

__device__ __forceinline__ uint4 load_words(const unsigned* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Into `v`, or nothing: a predicate, no branch.
__device__ __forceinline__ void load_words_if(bool wanted, const unsigned* from, uint4& v) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0;"
        " @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
}

__device__ __forceinline__ void load_word_if(bool wanted, const unsigned* from, unsigned& v) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.u32 %0, [%1];}"
        : "+r"(v)
        : "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
}

__device__ __forceinline__ void store_word(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_two_words(unsigned* to, unsigned low, unsigned high) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high)
                 : "memory");
}

__device__ __forceinline__ void store_words(unsigned* to, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Two floats, each with a whole word of tag beside it: {low, tag, high, tag}.
__device__ __forceinline__ void store_floats(uint4* to, float low, float high, unsigned tag) {
    const unsigned long long above = static_cast<unsigned long long>(tag) << 32;
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to),
                 "l"(above | __float_as_uint(low)), "l"(above | __float_as_uint(high))
                 : "memory");
}

__device__ __forceinline__ uint4 load_floats(const uint4* from) {
    unsigned long long low, high;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high)
                 : "l"(from)
                 : "memory");
    return make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                      static_cast<unsigned>(high), static_cast<unsigned>(high >> 32));
}

// What this thread has written is seen before all that it writes from here on.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- shared memory

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_is_over(unsigned barrier, unsigned parity) {
    unsigned over;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return over;
}

// For what passes by once: it shall not drive out of L2 what comes again, code included.
__device__ __forceinline__ unsigned long long passing_by() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_bulk(unsigned smem_to, const void* from, unsigned num_bytes,
                                          unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(smem_to),
        "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The eight warps that compute.
__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// ---- bf16, two by two, each rounded

__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}

__device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
    unsigned sums;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    return sums;
}

// ---- the compiler

// The same, but what hangs on it is made where it is needed, not kept.
__device__ __forceinline__ int made_anew(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The same, but made here: put off, it would keep alive what it is made of.
__device__ __forceinline__ float made_here(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
