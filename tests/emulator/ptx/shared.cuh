#pragma once

namespace emulator {
template <class T>
T load_shared(unsigned from) {
    return load<T>(shared(from));
}
}  // namespace emulator

unsigned dynamic_smem_bytes();
inline unsigned smem_address(const void* pointer) { return __cvta_generic_to_shared(pointer); }
inline uint4 load_shared(unsigned from) { return emulator::load_shared<uint4>(from); }
inline void load_shared_if(bool wanted, unsigned from, uint4& v) {
    if (wanted) v = load_shared(from);
}
inline uint2 load_shared_pair(unsigned from) { return emulator::load_shared<uint2>(from); }
inline uint2 read_shared_pair(unsigned from) { return emulator::load_shared<uint2>(from); }
inline unsigned load_shared_word(unsigned from) { return emulator::load_shared<unsigned>(from); }
inline float load_shared_float(unsigned from) { return emulator::load_shared<float>(from); }
inline unsigned load_shared_half(unsigned from) {
    return emulator::load_shared<unsigned short>(from);
}
inline unsigned load_shared_byte(unsigned from) {
    return emulator::load_shared<unsigned char>(from);
}
inline void store_shared(unsigned to, const uint4& v) {
    emulator::store(emulator::shared(to), v);
}
inline void store_shared_floats(unsigned to, const float4& v) {
    emulator::store(emulator::shared(to), v);
}
inline void store_shared_float(unsigned to, float v) { emulator::store(emulator::shared(to), v); }
inline void store_shared_word(unsigned to, unsigned word) {
    emulator::store(emulator::shared(to), word);
}
inline void store_shared_half(unsigned to, unsigned v) {
    emulator::store(emulator::shared(to), static_cast<unsigned short>(v));
}
