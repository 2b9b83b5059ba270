// Barriers: those in shared memory (mbarrier) count arrivals and bytes; others, threads of a block.
//
// No scope is named on arrive and wait: what they order here are copies of the engine and reads of
// the tensor cores. With `.cluster` each would carry a fence over all of the chip's memory.
#pragma once

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(unsigned barrier, unsigned num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

// Until phase `parity` of it is over. The loop is in the assembly: the compiler would unroll less
// of what is around a loop of its own.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether it is; this may wait some time for it.
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

// ---- of threads

// Until `num_threads` of the block have come to barrier `which`, 1 to 15.
__device__ __forceinline__ void sync_some(int which, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(num_threads) : "memory");
}
