// No instruction: a value that the compiler knows nothing of.
#pragma once

// The value, but the compiler forgets how it was made. So it keeps an address instead of making it
// at each use, and an offset to it is one instruction. So, too, it makes a number here, while what
// that is made of is alive; and what depends on the number where it is needed, and keeps nothing.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

__device__ __forceinline__ unsigned opaque(unsigned value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ float opaque(float value) {
    asm volatile("" : "+f"(value));
    return value;
}
