// Clusters, and what kernels/ffn/few_walk.cuh does by inline assembly, for a CPU. The blocks of a cluster
// lie side by side.
#pragma once

#include "instructions.h"

namespace emulator {

struct Meeting {  // of some threads: how many have come, how many times all have
    int arrived = 0;
    unsigned turn = 0;
    void come(int num) {
        if (++arrived == num) arrived = 0, ++turn;
    }
};

inline unsigned cluster_size;
inline std::map<Block*, Meeting> cluster_meetings;
inline std::map<Thread*, unsigned> cluster_turns;  // that threads wait for the end of

inline Block* block_of_cluster(unsigned rank) {
    return thread->block - thread->block_index.x % cluster_size + rank;
}

}  // namespace emulator

inline unsigned cluster_rank() { return blockIdx.x % emulator::cluster_size; }
inline void cluster_arrive_relaxed() {
    auto& meeting = emulator::cluster_meetings[emulator::block_of_cluster(0)];
    emulator::cluster_turns[emulator::thread] = meeting.turn;
    meeting.come(blockDim.x * emulator::cluster_size);
}
inline void cluster_wait() {
    auto& meeting = emulator::cluster_meetings[emulator::block_of_cluster(0)];
    while (meeting.turn == emulator::cluster_turns[emulator::thread]) emulator::give_way();
}
// The upper 12 bits of an address are 1 + the rank of its block.
inline unsigned address_in_block(unsigned own, unsigned rank) { return own | (rank + 1) << 20; }
inline void store_cluster_async(unsigned to, unsigned barrier, const float4& v) {
    const unsigned own = to & 0xfffff, rank = (to >> 20) - 1;
    own_shared(own, 16);  // all blocks have as much
    if (to >> 20 != barrier >> 20) emulator::fail("a barrier of another block");
    emulator::Block* other = emulator::block_of_cluster(rank);
    if (!other->mbarriers.count(barrier & 0xfffff)) emulator::fail("the other block is not there yet");
    emulator::copies.push_back({other, own, new float4(v), 16, barrier & 0xfffff});  // whose memory
}  // the test can spare

// ---- the rest of few_walk

inline void wait_for_previous() {}
inline void let_next_start() {}
template <class T>
inline T* offset_by(T* pointer, unsigned index, unsigned bytes) {
    return pointer + static_cast<uint64_t>(index) * bytes / sizeof(T);
}
inline uint4 load_written(const void* from) { return read_as<uint4>(from); }
inline void load_written_if(bool wanted, const void* from, uint4& v) {
    if (wanted) v = read_as<uint4>(from);
}
inline uint2 load_written_pair(const unsigned short* from) { return read_as<uint2>(from); }
inline uint4 load_constant(const unsigned short* from) { return read_as<uint4>(from); }
inline void store_shared_float(unsigned to, float v) { std::memcpy(own_shared(to, 4), &v, 4); }
inline void store_shared_word(unsigned to, unsigned v) { std::memcpy(own_shared(to, 4), &v, 4); }
inline void store_shared_floats(unsigned to, const float4& v) {
    std::memcpy(own_shared(to, 16), &v, 16);
}
inline float load_shared_float(unsigned from) { return read_as<float>(own_shared(from, 4)); }
inline unsigned load_shared_word(unsigned from) { return read_as<unsigned>(own_shared(from, 4)); }
inline void store_pair(void* to, unsigned low, unsigned high) {
    const uint2 both = {low, high};
    std::memcpy(to, &both, 8);
}
inline int __ffs(unsigned value) { return __builtin_ffs(value); }
