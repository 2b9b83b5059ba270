// The blocks of a cluster: who is who, waiting for each other, each other's shared memory. Before
// sm_90 there are no clusters: a block is alone in its own then.
#pragma once

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without the fence over all memory: nothing is handed over but that the block is there.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What lies in the place of `own` in the shared memory of block `rank`.
__device__ __forceinline__ unsigned load_of_block(const unsigned* own, unsigned rank) {
    unsigned value;
    asm volatile(
        "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
        " ld.shared::cluster.u32 %0, [remote];}"
        : "=r"(value)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(own))), "r"(rank)
        : "memory");
    return value;
}

// The same of a float, by its address in shared memory.
__device__ __forceinline__ float load_of_block(unsigned own, unsigned rank) {
    float value;
    asm volatile(
        "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %1, %2;"
        " ld.shared::cluster.f32 %0, [remote];}"
        : "=f"(value)
        : "r"(own), "r"(rank)
        : "memory");
    return value;
}
#else
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ unsigned load_of_block(const unsigned* own, unsigned) { return *own; }
__device__ __forceinline__ float load_of_block(unsigned own, unsigned) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(own) : "memory");
    return value;
}
#endif

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
