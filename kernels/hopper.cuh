// What Hopper (sm_90a) adds: barriers in shared memory, the copy engine (TMA), also over a cluster
// of two blocks, and register budgets by warpgroup. Thin wrappers over PTX, no policy.
#pragma once

#include "cluster.cuh"
#include "twell.cuh"

// A CUtensorMap as the driver encodes it, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---- mbarrier
// No scope is named on arrive and wait: what they order here are copies of the engine and reads of
// the tensor cores. With `.cluster` each would carry a fence over all of the chip's memory.

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(unsigned barrier, unsigned num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
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

// What threads have written is what the copy engine and the tensor cores read from here on, and what
// the engine writes over.
__device__ __forceinline__ void fence_for_engine() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

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

// ---- copy engine: a box of a 2-d map, first coordinate along the contiguous dimension

__device__ __forceinline__ void copy_box(unsigned target, const TensorMap* map, int column,
                                         int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same box into the same offset of every block in `blocks`, each signalled at its own barrier.
__device__ __forceinline__ void copy_box_to_cluster(unsigned target, const TensorMap* map,
                                                    int column, int row, unsigned barrier,
                                                    unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}

// ---- registers

template <int NUM_REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

template <int NUM_REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}
