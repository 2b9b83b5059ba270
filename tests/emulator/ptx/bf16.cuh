#pragma once

namespace emulator {

inline unsigned bf16_rounded(float value) {
    const unsigned all = __float_as_uint(value);
    return value != value ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
}
inline float bf16_of(unsigned pair, int half) { return __uint_as_float(pair >> 16 * half << 16); }

}  // namespace emulator

inline unsigned bf16_pair(float low, float high) {
    return emulator::bf16_rounded(low) | emulator::bf16_rounded(high) << 16;
}

inline unsigned multiply_pairs(unsigned a, unsigned b) {
    using emulator::bf16_of;
    return bf16_pair(bf16_of(a, 0) * bf16_of(b, 0), bf16_of(a, 1) * bf16_of(b, 1));
}

inline unsigned add_pairs(unsigned a, unsigned b) {
    using emulator::bf16_of;
    return bf16_pair(bf16_of(a, 0) + bf16_of(b, 0), bf16_of(a, 1) + bf16_of(b, 1));
}

inline unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    const auto half = [&](int i) {
        using emulator::bf16_of;
        return static_cast<float>(double{bf16_of(a, i)} * bf16_of(b, i) + bf16_of(c, i));
    };
    return bf16_pair(half(0), half(1));
}

inline unsigned greater_or_nan_pair(unsigned a, unsigned b) {
    const auto half = [&](int i) {
        return emulator::bf16_of(a, i) <= emulator::bf16_of(b, i) ? 0u : 0xffffu << 16 * i;
    };
    return half(0) | half(1);
}
