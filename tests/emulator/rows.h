// What `step_rows` does by kernels/ptx beside what `step` does, for a CPU.
#pragma once

#include "instructions.h"

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <int NUM>
inline void give_registers() {}
template <int NUM>
inline void take_registers() {}

inline void load_shared_if(bool wanted, unsigned from, uint4& v) {
    if (wanted) v = read_as<uint4>(own_shared(from, 16));
}

inline void load_relaxed_if(bool wanted, const unsigned* from, uint4& v) {
    if (wanted) v = load_relaxed(from);
}
inline void load_relaxed_word_if(bool wanted, const unsigned* from, unsigned& v) {
    emulator::give_way();
    if (wanted) v = *from;
}

inline void read_transposed(unsigned (&m)[4], unsigned row) {
    own_shared(row, 16);
    const uint64_t own = row;
    auto rows = emulator::exchange(&own, 1);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    unsigned found[4];
    for (int i = 0; i < 4; ++i) {
        const auto value = [&](int r) -> unsigned {
            return read_as<unsigned short>(own_shared(rows[8 * i + r][0], 16) + 2 * g);
        };
        found[i] = value(2 * t) | value(2 * t + 1) << 16;
    }
    __syncwarp();  // all have read
    for (int i = 0; i < 4; ++i) m[i] = found[i];
}
