// A GPU for kernels of ours on a CPU: blocks that run at the same time, warps, barriers. Each thread
// is a stack of its own; one runs at a time, and gives way where it must wait. The order is random,
// by a seed. What kernels do by inline assembly is in instructions.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __CUDA_ARCH__ 900

struct Dim {
    unsigned x, y, z;
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
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kMostWarps = 16, kMostWords = 6;

struct Warp {
    int arrived = 0;
    unsigned turn = 0;
    uint64_t words[2][32][kMostWords];
};

struct Mbarrier {
    int missing, expected;
    long bytes;
    unsigned phase;
    void settle() {
        if (missing == 0 && bytes == 0) ++phase, missing = expected;
    }
};

struct Block {
    std::vector<uint4> shared;
    Warp warps[kMostWarps];
    std::map<unsigned, Mbarrier> mbarriers;
    int arrived[16] = {};
    unsigned turn[16] = {};
    char* memory() { return reinterpret_cast<char*>(shared.data()); }
    size_t bytes() { return shared.size() * sizeof(uint4); }
};

struct Thread {
    void* stack;
    Dim index, block_index;
    Block* block;
    bool done;
};

struct Copy {
    Block* block;
    unsigned to;
    const void* from;
    unsigned num_bytes, mbarrier;
};

inline Thread* thread;
inline Dim grid, block_dim;
inline void* scheduler;
inline std::vector<Copy> copies;

extern "C" void switch_stack(void** kept, void* to);
asm(R"(
.globl switch_stack
.type switch_stack, @function
switch_stack:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

inline void give_way() {
    Thread* own = thread;
    switch_stack(&own->stack, scheduler);
}

[[noreturn]] inline void fail(const char* what) {
    std::printf("%s: block %u, thread %u\n", what, thread->block_index.x, thread->index.x);
    std::fflush(stdout);
    std::_Exit(2);
}

inline int lane() { return thread->index.x % 32; }

// What each of the 32 lanes brings, to all.
inline uint64_t (*exchange(const uint64_t* own, int num))[kMostWords] {
    Warp& warp = thread->block->warps[thread->index.x / 32];
    const unsigned turn = warp.turn;
    std::copy(own, own + num, warp.words[turn & 1][lane()]);
    if (++warp.arrived == 32)
        warp.arrived = 0, ++warp.turn;
    else
        while (warp.turn == turn) give_way();
    return warp.words[turn & 1];
}

inline void wait_for_block(int which, int num) {
    Block& block = *thread->block;
    const unsigned turn = block.turn[which];
    if (++block.arrived[which] == num)
        block.arrived[which] = 0, ++block.turn[which];
    else
        while (block.turn[which] == turn) give_way();
}

template <class To, class From>
inline To bits(From value) {
    To same{};
    std::memcpy(&same, &value, std::min(sizeof same, sizeof value));
    return same;
}

template <class T>
inline T from_lane(T value, int other) {
    const uint64_t word = bits<uint64_t>(value);
    return bits<T>(exchange(&word, 1)[other][0]);
}

// Runs `body` in every thread; copies come in at random. Whether all came to their end.
template <class Body>
inline bool run(int num_blocks, int num_threads, size_t shared_bytes, unsigned seed,
                const Body& body) {
    constexpr size_t kStack = 16384;
    static const Body* the_body;
    the_body = &body;
    grid = {static_cast<unsigned>(num_blocks), 1, 1};
    block_dim = {static_cast<unsigned>(num_threads), 1, 1};
    const int num = num_blocks * num_threads, num_warps = num / 32;
    std::vector<Block> blocks(num_blocks);
    std::vector<Thread> threads(num);
    char* stacks = static_cast<char*>(std::aligned_alloc(4096, kStack * num));
    void (*const entry)() = [] {
        (*the_body)(thread->block->memory());
        thread->done = true;
        while (true) give_way();
    };
    for (auto& block : blocks) {  // what nobody wrote is NaN
        block.shared.assign(shared_bytes / 16, {~0u, ~0u, ~0u, ~0u});
    }
    std::vector<int> order(num_warps);
    for (int i = 0; i < num; ++i) {
        void** top = reinterpret_cast<void**>(stacks + kStack * (i + 1)) - 2;
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(entry);
        for (int j = 0; j < 6; ++j) *--top = nullptr;
        threads[i] = {top,
                      {static_cast<unsigned>(i % num_threads), 0, 0},
                      {static_cast<unsigned>(i / num_threads), 0, 0},
                      &blocks[i / num_threads],
                      false};
    }
    for (int i = 0; i < num_warps; ++i) order[i] = i;
    std::mt19937 random(seed);
    for (int pass = 0; pass < 30000; ++pass) {
        if (pass % 16 == 0) std::shuffle(order.begin(), order.end(), random);
        for (int warp : order) {
            if (random() % 4 == 0) continue;
            for (int i = 0; i < 4 * 32; ++i) {
                thread = &threads[warp * 32 + i % 32];
                if (!thread->done) switch_stack(&scheduler, thread->stack);
            }
        }
        for (size_t i = 0; i < copies.size();) {
            if (random() % 3) {
                ++i;
                continue;
            }
            const Copy copy = copies[i];
            copies[i] = copies.back(), copies.pop_back();
            std::memcpy(copy.block->memory() + copy.to, copy.from, copy.num_bytes);
            Mbarrier& mbarrier = copy.block->mbarriers[copy.mbarrier];
            mbarrier.bytes -= copy.num_bytes, mbarrier.settle();
        }
        if (std::all_of(threads.begin(), threads.end(), [](auto& t) { return t.done; })) {
            std::free(stacks);
            return copies.empty();
        }
    }
    return false;
}

}  // namespace emulator

#define threadIdx (emulator::thread->index)
#define blockIdx (emulator::thread->block_index)
#define gridDim emulator::grid
#define blockDim emulator::block_dim

template <class T>
inline T __shfl_sync(unsigned, T value, int from, int width = 32) {
    return emulator::from_lane(value, emulator::lane() / width * width + (from & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::from_lane(value, emulator::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t word = value;
    auto all = emulator::exchange(&word, 1);
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= static_cast<unsigned>(all[i][0]) << i;
    return found;
}
inline int __reduce_max_sync(unsigned, int value) {
    const uint64_t word = static_cast<int64_t>(value);
    auto all = emulator::exchange(&word, 1);
    int found = value;
    for (int i = 0; i < 32; ++i) found = std::max(found, static_cast<int>(all[i][0]));
    return found;
}
inline void __syncwarp() {
    const uint64_t word = 0;
    emulator::exchange(&word, 1);
}
inline void __syncthreads() { emulator::wait_for_block(0, blockDim.x); }
[[noreturn]] inline void __trap() { emulator::fail("trap"); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline unsigned __float_as_uint(float value) { return emulator::bits<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bits<int>(value); }
inline float __uint_as_float(unsigned value) { return emulator::bits<float>(value); }
inline float __int_as_float(int value) { return emulator::bits<float>(value); }
template <class T>
inline T __shfl_up_sync(unsigned, T value, int distance) {
    return emulator::from_lane(value, std::max(emulator::lane() - distance, 0));
}
template <class T>
inline T __ldg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcg(const T* from) {
    return *from;
}

// Shared memory at an address as kernels have it, and what lies anywhere.
inline char* own_shared(unsigned at, unsigned num_bytes) {
    if (at % num_bytes || at + num_bytes > emulator::thread->block->bytes())
        emulator::fail("no such shared memory");
    return emulator::thread->block->memory() + at;
}

template <class T>
inline T read_as(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// As kernels/ptx has them.
inline unsigned bf16_rounded(float value) {
    const unsigned all = __float_as_uint(value);
    return value != value ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
}
inline unsigned bf16_pair(float low, float high) {
    return bf16_rounded(low) | bf16_rounded(high) << 16;
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

inline int atomicAdd(int* to, int value) { return (*to += value) - value; }
inline size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const char*>(pointer) - emulator::thread->block->memory();
}
inline unsigned smem_address(const void* pointer) { return __cvta_generic_to_shared(pointer); }
template <class T>
inline T opaque(T value) {
    return value;
}
inline unsigned greater_or_nan_pair(unsigned a, unsigned b) {
    const auto half = [&](int shift) {
        const float low = __uint_as_float(a >> shift << 16), high = __uint_as_float(b >> shift << 16);
        return low <= high ? 0u : 0xffffu << shift;
    };
    return half(0) | half(16);
}
using std::max, std::min;
