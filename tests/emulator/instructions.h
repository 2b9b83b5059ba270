// What the functions of kernels/ptx do, for a CPU: those that `step` and few_walk use.
#pragma once

#include "gpu.h"

// ---- arithmetic, memory, tensor cores

inline unsigned dynamic_smem_bytes() { return emulator::thread->block->bytes(); }
inline uint4 load_shared(unsigned from) { return read_as<uint4>(own_shared(from, 16)); }
inline uint2 load_shared_pair(unsigned from) { return read_as<uint2>(own_shared(from, 8)); }
inline void prefetch_into_l2(const void* from) { read_as<char>(from); }
inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
    const uint64_t own[6] = {a0, a1, a2, a3, b0, b1};
    auto all = emulator::exchange(own, 6);
    const auto product = [](uint64_t a, uint64_t b) {
        const auto low = [](uint64_t word) { return __uint_as_float(word << 16); };
        const auto high = [](uint64_t word) { return __uint_as_float(word & 0xffff0000); };
        return low(a) * low(b) + high(a) * high(b);
    };
    for (int i = 0; i < 4; ++i)
        for (int t = 0; t < 4; ++t) {
            const uint64_t* a = all[emulator::lane() / 4 * 4 + t];
            const uint64_t* b = all[(emulator::lane() % 4 * 2 + i % 2) * 4 + t];
            sums[i] += product(a[i / 2], b[4]) + product(a[2 + i / 2], b[5]);
        }
}

// ---- loads, roots

inline void load_streamed_if(bool wanted, const void* from, uint4& v) {
    if (wanted) v = read_as<uint4>(from);
}
inline float reciprocal_root(float value) { return 1.f / std::sqrt(value); }
inline float reciprocal(float value) { return 1.f / value; }
inline float power_of_two(float exponent) { return std::exp2(exponent); }

// ---- barriers

inline void barrier_init(unsigned barrier, unsigned arrivals) {
    const int num = arrivals;
    emulator::thread->block->mbarriers[barrier] = {num, num, 0, 0};
}
inline void barrier_init_fence() {}
inline void fence_for_engine() {}
inline void arrive(unsigned barrier, unsigned num_bytes) {
    auto& mbarrier = emulator::thread->block->mbarriers[barrier];
    mbarrier.bytes += num_bytes;
    if (--mbarrier.missing < 0) emulator::fail("too many arrive");
    mbarrier.settle();
}
inline void barrier_expect_bytes(unsigned barrier, unsigned num_bytes) {
    arrive(barrier, num_bytes);
}
inline bool is_over(unsigned barrier, unsigned parity) {
    return (emulator::thread->block->mbarriers[barrier].phase & 1) != parity;
}
inline void barrier_wait(unsigned barrier, unsigned parity) {
    while (!is_over(barrier, parity)) emulator::give_way();
}

// ---- words, copies

inline uint4 load_relaxed(const unsigned* from) {
    emulator::give_way();
    return read_as<uint4>(from);
}
inline void load_relaxed_longs(const void* from, unsigned long long& low, unsigned long long& high) {
    emulator::give_way();
    std::memcpy(&low, from, 8), std::memcpy(&high, static_cast<const char*>(from) + 8, 8);
}
inline void store_relaxed_word(unsigned* to, unsigned word) { *to = word; }
inline void store_relaxed_pair(unsigned* to, unsigned low, unsigned high) { to[0] = low, to[1] = high; }
inline void store_relaxed(unsigned* to, const uint4& v) { std::memcpy(to, &v, 16); }
inline void store_relaxed_longs(void* to, unsigned long long low, unsigned long long high) {
    const unsigned long long both[2] = {low, high};
    std::memcpy(to, both, 16);
}
inline void fence_gpu() {}
inline void barrier_arrive(unsigned barrier) { arrive(barrier, 0); }
inline bool barrier_is_over(unsigned barrier, unsigned parity) { return is_over(barrier, parity); }
inline unsigned long long passing_by() { return 0; }
inline void copy_bulk(unsigned to, const void* from, unsigned num_bytes, unsigned barrier,
                      unsigned long long) {
    own_shared(to, 16);
    emulator::copies.push_back({emulator::thread->block, to, from, num_bytes, barrier});
}
inline void sync_some(int which, int num_threads) {
    emulator::wait_for_block(which, num_threads);
}
template <class Combine>
inline unsigned two_by_two(unsigned a, unsigned b, const Combine& combine) {
    const auto half = [&](int i) {
        return combine(__uint_as_float(a >> 16 * i << 16), __uint_as_float(b >> 16 * i << 16));
    };
    return bf16_pair(half(0), half(1));
}
inline unsigned multiply_pairs(unsigned a, unsigned b) {
    return two_by_two(a, b, [](float x, float y) { return x * y; });
}
inline unsigned add_pairs(unsigned a, unsigned b) {
    return two_by_two(a, b, [](float x, float y) { return x + y; });
}
