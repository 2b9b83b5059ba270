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

inline float f16_of(unsigned pair, int half) {
    return bits<_Float16>(static_cast<unsigned short>(pair >> 16 * half));
}

}  // namespace emulator

inline unsigned f16_pair(float low, float high) {
    return emulator::f16_bits(low) | emulator::f16_bits(high) << 16;
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
