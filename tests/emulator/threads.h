// The threads that run, their blocks, and how they wait for each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu.h"

namespace emulator {

constexpr size_t kMostDynamic = 227 << 10;  // bytes of shared memory
constexpr int kMostWords = 6, kMbarriers = 66;
constexpr size_t kStack = 32768;
constexpr int kTurns = 16;  // of a warp, while its stacks and clocks are in the cache
constexpr unsigned kUnderWay = ~0u;  // an epoch that nobody knows
constexpr uint16_t kNobody = 0xffff;

using Clock = std::vector<unsigned>;
using Lanes = uint64_t[32][kMostWords];

inline void join(Clock& into, const Clock& other) {
    if (into.empty()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Meeting {
    int arrived = 0, num = 0;
    unsigned turn = 0;
    Clock joined, over;
};

struct Warp {
    int arrived = 0;
    unsigned turn = 0;
    Lanes words[2];
    Meeting meeting;
};

struct Mbarrier {
    int missing, expected;
    long bytes;
    unsigned phase;
    int clock;  // whose copies are counted here
    int maker;  // the thread that began it
    bool fenced, told;  // to all threads, to the cluster
    Clock joined, over;
};

struct Cell {  // four bytes
    unsigned written = 0, read[2] = {};  // when
    uint16_t writer = kNobody, reader[2] = {kNobody, kNobody};
    uint8_t written_bytes = 0, read_bytes[2] = {};
    bool strong = false;  // by an atomic
};

struct Write {
    uint16_t writer;
    unsigned when;
};

struct Doubt {  // of a write that is no harm if it changes nothing
    unsigned* at;
    unsigned before;
    const char* wrong;
};

struct Block {
    std::unique_ptr<char, void (*)(void*)> memory{nullptr, std::free};
    std::vector<Cell> cells;
    std::unordered_map<size_t, std::vector<Write>> again;  // who else wrote the same into a cell
    std::vector<Warp> warps;
    std::map<unsigned, Mbarrier> mbarriers;
    Meeting meetings[16];
    Clock flushed;  // what other blocks see
    Clock releasing, released;  // to the cluster: before its next barrier, and by the last one
    std::map<size_t, unsigned> read_by_cluster;  // cells, behind which turn of its barrier
    bool has_ended = false;  // one of its threads
};

struct Pending {
    unsigned to;
    const void* from;  // or null: zeros
    int group;
};

struct Thread {
    void* stack = nullptr;
    Dim index, block_index;
    Block* block = nullptr;
    int number;
    bool done = false;
    Clock clock;
    std::vector<Pending> copies;
    std::vector<Doubt> doubts;
    const unsigned* awaited = nullptr;  // it need not run before this is no more
    unsigned awaited_not = 0;
    int group = 0;
    unsigned cluster_turn = 0;
    bool met_cluster = false;
    unsigned& now() { return clock[number]; }
};

struct Copy {
    Block* block;
    unsigned to;
    const void* from;
    unsigned num_bytes, mbarrier;
    uint4 kept;
};

struct Written {  // four bytes of global memory
    Block* block;
    unsigned when;
    uint16_t writer;
    uint8_t bytes;
    bool strong;
};

struct Range {
    uintptr_t begin, end;
    bool from_previous;
};

Thread* thread;
Dim grid, threads_of_block;
void* scheduler;
std::vector<Copy> copies;
std::vector<Block> blocks;
std::map<Block*, Meeting> clusters;
std::unordered_map<uintptr_t, Written> written;
bool page_written[1 << 16];
std::vector<Range> ranges;
std::string failure;
uintptr_t image_begin, image_end;
size_t tls_bytes, dynamic_at, dynamic_bytes;
unsigned cluster_size;
bool overlaps;
long progress;

void settle_doubts();

extern "C" void switch_stack(void** kept, void* to);
asm(R"(
.globl switch_stack
.hidden switch_stack
.type switch_stack, @function
switch_stack:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

void give_way() {
    settle_doubts();
    Thread* own = thread;
    switch_stack(&own->stack, scheduler);
}

void wait_while(const unsigned& word, unsigned value) {
    while (word == value) {
        thread->awaited = &word, thread->awaited_not = value;
        give_way();
    }
}

void fail(const char* what) {
    if (failure.empty()) {
        char where[100];
        std::snprintf(where, sizeof where, ": block %u, thread %u", thread->block_index.x,
                      thread->index.x);
        failure = what + std::string(where);
    }
    while (true) give_way();
}

Dim thread_index() { return thread->index; }
Dim block_index() { return thread->block_index; }
Dim grid_size() { return grid; }
Dim block_size() { return threads_of_block; }
int lane() { return thread->index.x % 32; }

// What each lane brings, until its thread gives way.
const Lanes& exchange(const uint64_t* own, int num) {
    Warp& warp = thread->block->warps[thread->index.x / 32];
    const unsigned turn = warp.turn;
    auto& words = warp.words[turn & 1];
    std::copy(own, own + num, words[lane()]);
    if (++warp.arrived == 32)
        warp.arrived = 0, ++warp.turn, ++progress;
    else
        wait_while(warp.turn, turn);
    return words;
}

void of_all_lanes(uint64_t own, uint64_t* all) {
    const Lanes& words = exchange(&own, 1);
    for (int i = 0; i < 32; ++i) all[i] = words[i][0];
}

uint64_t of_lane(uint64_t own, int other) {
    return exchange(&own, 1)[other][0];
}

void meet(Meeting& meeting, int num) {
    if (meeting.arrived && meeting.num != num) fail("a barrier of two numbers of threads");
    const unsigned turn = meeting.turn;
    meeting.num = num;
    join(meeting.joined, thread->clock);
    ++thread->now();
    if (++meeting.arrived == num) {
        meeting.arrived = 0, ++meeting.turn, ++progress;
        meeting.over = meeting.joined;
    } else {
        wait_while(meeting.turn, turn);
    }
    join(thread->clock, meeting.over);
}

void meet_in_warp() { meet(thread->block->warps[thread->index.x / 32].meeting, 32); }
void meet_in_block(int which, int num) { meet(thread->block->meetings[which], num); }

}  // namespace emulator
