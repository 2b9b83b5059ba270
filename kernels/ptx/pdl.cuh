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
// start early. Between few_linear and `attend` there may be short kernels (store_keys, norms of q
// and k): none starts before few_linear's wait, and `attend` reads early only pages that they do
// not write.
#pragma once

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
