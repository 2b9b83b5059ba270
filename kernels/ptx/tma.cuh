// The copy engine (TMA, from sm_90 on): copies into shared memory, counted at a barrier.
#pragma once

// A CUtensorMap as the driver encodes it, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// ---- a box of a 2-d map, first coordinate along the contiguous dimension

__device__ __forceinline__ void copy_box(unsigned target, const TensorMap* map, int column, int row,
                                         unsigned barrier) {
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

// ---- bytes that lie together

// An L2 policy for data that is read once: it is evicted first, before data and code that are read
// again.
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

// Into registers, past L1: 16 bytes, 8 or 4, or what was there.
__device__ __forceinline__ void load_passing_if(bool wanted, const void* from, uint4& v,
                                                unsigned long long policy) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0;"
        " @p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(static_cast<unsigned>(wanted)), "l"(policy));
}

__device__ __forceinline__ void load_passing_if(bool wanted, const void* from, uint2& v,
                                                unsigned long long policy) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %3, 0;"
        " @p ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %4;}"
        : "+r"(v.x), "+r"(v.y)
        : "l"(from), "r"(static_cast<unsigned>(wanted)), "l"(policy));
}

__device__ __forceinline__ void load_passing_if(bool wanted, const void* from, unsigned& v,
                                                unsigned long long policy) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0;"
        " @p ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %3;}"
        : "+r"(v)
        : "l"(from), "r"(static_cast<unsigned>(wanted)), "l"(policy));
}
