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

// Arrives at the barrier of the same offset in block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_in_cluster(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// To the place of `own` in the shared memory of block `rank`, whose `barrier` counts the bytes.
__device__ __forceinline__ void send_to_block(unsigned own, unsigned barrier, unsigned rank,
                                              const float4& v) {
    asm volatile(
        "{.reg .u32 to, done; mapa.shared::cluster.u32 to, %0, %2;"
        " mapa.shared::cluster.u32 done, %1, %2;"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [to], {%3, %4, %5, %6}, [done];}" ::"r"(own),
        "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
        : "memory");
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
