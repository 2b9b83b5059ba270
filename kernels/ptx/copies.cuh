// Copies of 16 bytes from global to shared memory that run on while the thread does something else.
#pragma once

__device__ __forceinline__ void copy_async(unsigned smem_to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_if(bool wanted, unsigned smem_to, const void* from) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(
            smem_to),
        "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
}

// Zeros if not wanted; `from` is not looked at then.
__device__ __forceinline__ void copy_async_or_zero(bool wanted, unsigned smem_to,
                                                   const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_to), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the newest PENDING groups of this thread's copies are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
