// A multiprocessor's clock.
#pragma once

__device__ __forceinline__ long long clock_now() {
    long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}
