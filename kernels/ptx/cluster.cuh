// The blocks of a cluster: who is who, waiting for each other, each other's shared memory. Before
// sm_90 there are no clusters: a block is alone in its own then.
#pragma once

#include "ptx/shared.cuh"

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

// Where block `rank` has what lies at `own` in the shared memory of this one.
__device__ __forceinline__ unsigned address_in_block(unsigned own, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
    return address;
}

__device__ __forceinline__ unsigned load_cluster_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

__device__ __forceinline__ float load_cluster_float(unsigned from) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
    return v;
}

// To a block whose `barrier` counts the 16 bytes.
__device__ __forceinline__ void store_cluster_async(unsigned to, unsigned barrier,
                                                    const float4& v) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
        "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive_in_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#else
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ unsigned address_in_block(unsigned own, unsigned) { return own; }

__device__ __forceinline__ unsigned load_cluster_word(unsigned from) {
    return load_shared_word(from);
}

__device__ __forceinline__ float load_cluster_float(unsigned from) {
    return load_shared_float(from);
}
#endif
