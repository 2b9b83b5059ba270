#pragma once

void fence_gpu();
inline void store_relaxed(void* to, const uint4& v) { emulator::store(to, v, emulator::kStrong); }
inline void store_relaxed_pair(void* to, unsigned low, unsigned high) {
    emulator::store(to, uint2{low, high}, emulator::kStrong);
}
inline void store_relaxed_word(void* to, unsigned word) {
    emulator::store(to, word, emulator::kStrong);
}
inline void store_relaxed_longs(void* to, unsigned long long low, unsigned long long high) {
    const auto word = [](unsigned long long value, int i) { return unsigned(value >> 32 * i); };
    store_relaxed(to, {word(low, 0), word(low, 1), word(high, 0), word(high, 1)});
}
inline void load_relaxed_longs(const void* from, unsigned long long& low,
                               unsigned long long& high) {
    const auto v = emulator::load<uint4>(from, emulator::kStrong);
    low = v.x | uint64_t{v.y} << 32, high = v.z | uint64_t{v.w} << 32;
}
inline unsigned take_ticket(unsigned* tickets, unsigned count) {
    fence_gpu();
    const auto ticket = emulator::load<unsigned>(tickets, emulator::kStrong);
    store_relaxed_word(tickets, ticket >= count - 1 ? 0 : ticket + 1);
    return ticket;
}
