#pragma once

inline unsigned scale_and_add(unsigned a, unsigned b, unsigned c) { return a * b + c; }

template <class T>
inline T* offset_by(T* pointer, unsigned index, unsigned bytes) {
    const auto at = reinterpret_cast<uintptr_t>(pointer) + static_cast<uint64_t>(index) * bytes;
    return reinterpret_cast<T*>(at);
}

inline unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    unsigned bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned which = selector >> 4 * i, byte = both >> 8 * (which & 7) & 255;
        bytes |= (which & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return bytes;
}

inline float reciprocal_root(float value) { return 1.f / sqrtf(value); }
inline float reciprocal(float value) { return 1.f / value; }
inline float power_of_two(float exponent) { return exp2f(exponent); }
