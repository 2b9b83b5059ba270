// f16 values, two in a word, the first in the low half; and e4m3 values as f16, exactly.
#pragma once

// Rounded to nearest even.
__device__ __forceinline__ unsigned f16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The eight e4m3 values of two words, in order. From sm_89 on; before it nothing.
__device__ __forceinline__ uint4 e4m3_as_f16(unsigned low, unsigned high) {
    uint4 eight = {};
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(eight.x), "=r"(eight.y)
        : "r"(low));
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(eight.z), "=r"(eight.w)
        : "r"(high));
#endif
    return eight;
}

__device__ __forceinline__ void unpack_f16_pair(unsigned pair, float& low, float& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}
