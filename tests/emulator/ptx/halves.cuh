#pragma once

namespace emulator {

inline unsigned f16_bits(float value) { return bits<unsigned>(static_cast<_Float16>(value)) & 0xffff; }

inline float e4m3_value(unsigned byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = exponent == 15 && mantissa == 7 ? __builtin_nanf("")
                       : exponent ? (8.f + mantissa) * exp2f(exponent - 10)
                                  : mantissa * 0x1p-9f;
    return byte & 128 ? -size : size;
}

// To nearest, of two as near the even one; what is too large becomes the largest.
inline unsigned e4m3_rounded(float value) {
    if (value != value) return 0x7f;
    const float size = min(fabsf(value), 448.f);
    unsigned below = 0x7e;  // the codes lie in the order of their values
    while (e4m3_value(below) > size) --below;
    if (below < 0x7e) {
        const float down = size - e4m3_value(below), up = e4m3_value(below + 1) - size;
        if (up < down || (up == down && below % 2)) ++below;
    }
    return below | (__builtin_signbit(value) ? 128 : 0);
}

inline float f16_of(unsigned pair, int half) {
    return bits<_Float16>(static_cast<unsigned short>(pair >> 16 * half));
}

}  // namespace emulator

inline unsigned f16_pair(float low, float high) {
    return emulator::f16_bits(low) | emulator::f16_bits(high) << 16;
}

inline unsigned e4m3_two(float low, float high) {
    return emulator::e4m3_rounded(low) | emulator::e4m3_rounded(high) << 8;
}

inline uint4 e4m3_as_f16(unsigned low, unsigned high) {
    const auto two = [](unsigned word) {
        return f16_pair(emulator::e4m3_value(word & 255), emulator::e4m3_value(word >> 8 & 255));
    };
    return {two(low), two(low >> 16), two(high), two(high >> 16)};
}

inline void unpack_f16_pair(unsigned pair, float& low, float& high) {
    low = emulator::f16_of(pair, 0), high = emulator::f16_of(pair, 1);
}
