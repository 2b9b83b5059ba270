#pragma once

#define EMULATOR_LOADS(NAME, KIND)                                                        \
    inline uint4 NAME(const void* from) { return emulator::load<uint4>(from, KIND); }     \
    inline void NAME##_if(bool wanted, const void* from, uint4& v) {                      \
        if (wanted) v = NAME(from);                                                       \
    }                                                                                     \
    inline uint2 NAME##_pair(const void* from) { return emulator::load<uint2>(from, KIND); } \
    inline unsigned NAME##_word(const void* from) {                                       \
        return emulator::load<unsigned>(from, KIND);                                      \
    }                                                                                     \
    inline void NAME##_word_if(bool wanted, const void* from, unsigned& v) {              \
        if (wanted) v = NAME##_word(from);                                                \
    }                                                                                     \
    inline unsigned NAME##_half(const void* from) {                                       \
        return emulator::load<unsigned short>(from, KIND);                                \
    }

EMULATOR_LOADS(load_constant, emulator::kConstant)
EMULATOR_LOADS(load_streamed, emulator::kConstant)
EMULATOR_LOADS(load_written, emulator::kWeak)
EMULATOR_LOADS(load_relaxed, emulator::kStrong)

#undef EMULATOR_LOADS

inline unsigned load_constant_or_leave(bool wanted, const unsigned* from) {
    return wanted ? load_constant_word(from) : 0xdeadbeef;
}

inline void load_floats_if(bool wanted, const float* from, float& a, float& b) {
    if (!wanted) return;
    const auto v = emulator::load<float2>(from);
    a = v.x, b = v.y;
}
inline void load_floats_if(bool wanted, const float* from, float (&v)[4]) {
    if (wanted) emulator::read(v, from, 16);
}

inline void store_pair(void* to, unsigned low, unsigned high) {
    emulator::store(to, uint2{low, high});
}
inline void store_if(unsigned wanted, int place, int limit, void* to, unsigned word) {
    if (wanted && place < limit) emulator::store(to, word);
}
inline void add_to(float* to, float value) {
    const auto before = emulator::load<float>(to, emulator::kStrong);
    emulator::store(to, before + value, emulator::kStrong);
}
inline void prefetch_into_l2(const void* from) { emulator::load<char>(from, emulator::kStrong); }
