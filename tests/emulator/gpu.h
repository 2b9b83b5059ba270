// A GPU for the kernels on a CPU: what CUDA C++ has beside C++. It goes in front of each source,
// which g++ compiles as it is; ptx/ stands in for kernels/ptx, gpu.cpp launches, judge.h judges.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Declared here: to read <cmath> and <algorithm> takes a quarter of a second, for each source.
extern "C" {
float exp2f(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float nearbyintf(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
float logf(float) noexcept;
float log1pf(float) noexcept;
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // gpu.cpp says of which block
#define __CUDA_ARCH__ 900

struct Dim {
    unsigned x, y, z;
};
struct int2 {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

Dim thread_index(), block_index(), grid_size(), block_size();
int lane();
void give_way();
[[noreturn]] void fail(const char* what);

// What each of the 32 lanes brings, to all. Orders no memory.
void of_all_lanes(uint64_t own, uint64_t* all);
uint64_t of_lane(uint64_t own, int other);
void meet_in_warp();                     // and orders memory
void meet_in_block(int which, int num);  // of `num` threads, too

// `to` and `from`: any address, or one in shared memory.
enum Kind { kWeak, kStrong, kConstant };  // strong: as other blocks have it at this moment
void read(void* to, const void* from, int num_bytes, Kind kind = kWeak);
void write(void* to, const void* from, int num_bytes, Kind kind = kWeak);
void* shared(unsigned at);

template <class T>
T load(const void* from, Kind kind = kWeak) {
    if (kind == kStrong) give_way();
    T value;
    read(&value, from, sizeof value, kind);
    return value;
}
template <class T>
void store(void* to, const T& value, Kind kind = kWeak) {
    write(to, &value, sizeof value, kind);
}

template <class To, class From>
inline To bits(From value) {
    To same{};
    __builtin_memcpy(&same, &value, min(sizeof same, sizeof value));
    return same;
}
template <class T>
inline T from_lane(T value, int other) {
    return bits<T>(of_lane(bits<uint64_t>(value), other));
}
template <class T, class Combine>
inline T over_lanes(T value, const Combine& combine) {
    uint64_t all[32];
    of_all_lanes(bits<uint64_t>(value), all);
    for (int i = 0; i < 32; ++i)
        if (i != lane()) value = combine(value, bits<T>(all[i]));
    return value;
}

}  // namespace emulator

#define threadIdx emulator::thread_index()
#define blockIdx emulator::block_index()
#define gridDim emulator::grid_size()
#define blockDim emulator::block_size()

template <class T>
inline T __shfl_sync(unsigned, T value, int from, int width = 32) {
    return emulator::from_lane(value, emulator::lane() / width * width + (from & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::from_lane(value, emulator::lane() ^ mask);
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int distance) {
    const int from = emulator::lane() - distance;
    return emulator::from_lane(value, from < 0 ? emulator::lane() : from);
}
inline unsigned __ballot_sync(unsigned, bool value) {
    const unsigned own = static_cast<unsigned>(value) << emulator::lane();
    return emulator::over_lanes(own, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned all, bool value) { return __ballot_sync(all, value); }
template <class T>
inline T __reduce_max_sync(unsigned, T value) {
    return emulator::over_lanes(value, [](T a, T b) { return max(a, b); });
}
template <class T>
inline T __reduce_min_sync(unsigned, T value) {
    return emulator::over_lanes(value, [](T a, T b) { return min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
    return emulator::over_lanes(value, [](unsigned a, unsigned b) { return a | b; });
}
inline void __syncwarp() { emulator::meet_in_warp(); }
inline void __syncthreads() { emulator::meet_in_block(0, blockDim.x); }
[[noreturn]] inline void __trap() { emulator::fail("trap"); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}
inline int __ffs(unsigned value) { return __builtin_ffs(value); }
inline unsigned __float_as_uint(float value) { return emulator::bits<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bits<int>(value); }
inline float __uint_as_float(unsigned value) { return emulator::bits<float>(value); }
inline float __int_as_float(int value) { return emulator::bits<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }
template <class T>
inline T __ldg(const T* from) {
    return emulator::load<T>(from, emulator::kConstant);
}
template <class T>
inline T __ldcg(const T* from) {
    return emulator::load<T>(from);
}
template <class T>
inline void __stcg(T* to, T value) {
    emulator::store<T>(to, value);
}
inline int atomicAdd(int* to, int value) {
    const auto before = emulator::load<int>(to, emulator::kStrong);
    emulator::store<int>(to, before + value, emulator::kStrong);
    return before;
}
inline unsigned atomicOr(unsigned* to, unsigned bits) {
    const auto before = emulator::load<unsigned>(to, emulator::kStrong);
    emulator::store<unsigned>(to, before | bits, emulator::kStrong);
    return before;
}
inline unsigned long long atomicMax(unsigned long long* to, unsigned long long value) {
    const auto before = emulator::load<unsigned long long>(to, emulator::kStrong);
    emulator::store<unsigned long long>(to, max(before, value), emulator::kStrong);
    return before;
}
inline unsigned long long atomicExch(unsigned long long* to, unsigned long long value) {
    const auto before = emulator::load<unsigned long long>(to, emulator::kStrong);
    emulator::store<unsigned long long>(to, value, emulator::kStrong);
    return before;
}
size_t __cvta_generic_to_shared(const void* pointer);
