// A launch, and what of the GPU is more than its threads: mbarriers, copies, clusters. Each thread
// is a stack of its own; one runs at a time, and gives way where it must wait. Their order is random,
// by a seed. judge.h says what is judged.
#include <dlfcn.h>
#include <link.h>

#include <random>

#include "judge.h"
#include "ptx/barriers.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copies.cuh"
#include "ptx/handover.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"

// Dynamic shared memory, by all names that sources have for it.
extern "C" {
alignas(1024) thread_local char memory[emulator::kMostDynamic];
}
asm(".globl planes, staged, slabs, dynamic_memory, _ZN12_GLOBAL__N_16memoryE\n"
    ".set planes, memory\n.set staged, memory\n.set slabs, memory\n.set dynamic_memory, memory\n"
    ".set _ZN12_GLOBAL__N_16memoryE, memory");

namespace emulator {

// ---- mbarriers, the copy engine, clusters

Block& block_of_cluster(unsigned rank) {
    return thread->block[static_cast<int>(rank) - static_cast<int>(cluster_rank())];
}

Mbarrier& mbarrier_at(Block& block, unsigned at) {
    const auto found = block.mbarriers.find(at);
    if (found == block.mbarriers.end()) fail("no such mbarrier yet");
    return found->second;
}

void settle(Mbarrier& mbarrier) {
    ++progress;
    if (mbarrier.missing || mbarrier.bytes) return;
    ++mbarrier.phase, mbarrier.missing = mbarrier.expected, mbarrier.over = mbarrier.joined;
}

void start_copy(Copy copy) {
    Mbarrier& mbarrier = mbarrier_at(*copy.block, copy.mbarrier);
    if (!mbarrier.fenced) fail("a copy to an mbarrier without a fence behind its beginning");
    if (copy.to % 16 || copy.num_bytes % 16) fail("a copy that is not aligned");
    if (copy.to + copy.num_bytes > dynamic_at + dynamic_bytes) fail("no such shared memory");
    if (copy.block == thread->block)
        write_cells(*copy.block, copy.to, copy.num_bytes, mbarrier.clock, kUnderWay, kEngine);
    else if (!mbarrier.told || !thread->met_cluster)
        fail("a store to a block of the cluster that may not have begun");
    copies.push_back(copy);
}

void land(const Copy& copy) {
    Mbarrier& mbarrier = copy.block->mbarriers[copy.mbarrier];
    std::memcpy(copy.block->memory.get() + copy.to, copy.from ? copy.from : &copy.kept,
                copy.num_bytes);
    const unsigned when = ++mbarrier.joined[mbarrier.clock];
    each_word(copy.to, copy.num_bytes, [&](size_t i, uint8_t) {
        Cell& cell = copy.block->cells[i];
        cell.writer = mbarrier.clock, cell.written = when, cell.written_bytes = 15;
    });
    mbarrier.bytes -= copy.num_bytes;
    settle(mbarrier);
}

void make_seen(Clock& by) {
    join(by, thread->clock);
    ++thread->now();
}

void wait_for_copies(int pending) {
    auto& list = thread->copies;
    const auto ended = [&](const Pending& copy) { return copy.group + pending < thread->group; };
    for (auto& copy : list) {
        if (!ended(copy)) continue;
        char* to = thread->block->memory.get() + copy.to;
        copy.from ? std::memcpy(to, copy.from, 16) : std::memset(to, 0, 16);
        settle_cells(*thread->block, copy.to, 16, thread->now());
    }
    list.erase(std::remove_if(list.begin(), list.end(), ended), list.end());
}

// ---- a launch

void find_image() {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&find_image), &info);
    dl_iterate_phdr(
        [](dl_phdr_info* found, size_t, void* base) {
            if (reinterpret_cast<void*>(found->dlpi_addr) != base) return 0;
            image_begin = found->dlpi_addr;
            for (int i = 0; i < found->dlpi_phnum; ++i) {
                const auto& part = found->dlpi_phdr[i];
                if (part.p_type == PT_LOAD)
                    image_end = found->dlpi_addr + part.p_vaddr + part.p_memsz;
                if (part.p_type == PT_TLS) tls_bytes = (part.p_memsz + 1023) / 1024 * 1024;
            }
            return 1;
        },
        info.dli_fbase);
}

using Kernel = void(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                    uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                    uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                    uint64_t, uint64_t, float, float, float, float);
Kernel* kernel;
const uint64_t* words;  // integers and pointers of any size and numbers lie apart from each other
const float* numbers;

void begin_thread() {
    const auto* w = words;
    const auto* f = numbers;
    kernel(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
           w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23], w[24], w[25],
           f[0], f[1], f[2], f[3]);
    thread->done = thread->block->has_ended = true, ++progress;
    while (true) give_way();
}

// Opaque to its callers: the compiler takes it that an address like this never changes.
[[gnu::noipa]] char* dynamic_memory_of_thread() { return ::memory; }

// Blocks `first` on, to their end.
void run(unsigned first, std::mt19937& random) {
    const unsigned num_threads = threads_of_block.x, num = blocks.size() * num_threads;
    std::vector<Thread> threads(num);
    const std::unique_ptr<void, void (*)(void*)> stacks{std::aligned_alloc(kStack, kStack * num),
                                                        std::free};
    const auto stack = reinterpret_cast<uintptr_t>(stacks.get());
    copies.clear(), clusters.clear();
    for (unsigned i = 0; i < num; ++i) {
        // each at another place of its pages: else few of them lie in the cache together
        void** top = reinterpret_cast<void**>(stack + kStack * (i + 1) - 192 * (i % 32)) - 2;
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&begin_thread);
        for (int j = 0; j < 6; ++j) *--top = nullptr;
        const unsigned block = first + i / num_threads;
        Thread& own = threads[i];
        own.stack = top, own.index = {i % num_threads, 0, 0}, own.number = i % num_threads;
        own.block_index = {block % grid.x, block / grid.x, 0};
        own.block = &blocks[i / num_threads];
        own.clock.assign(num_threads + kMbarriers + 1, 0);
        own.now() = 1;
    }
    std::vector<int> order(num / 32);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    long before = -1;
    for (int pass = 0, idle = 0; idle < 100; ++pass) {
        if (pass % 16 == 0) std::shuffle(order.begin(), order.end(), random);
        for (int warp : order) {
            if (random() % 4 == 0) continue;
            for (int i = 0; i < kTurns * 32 && failure.empty(); ++i) {
                thread = &threads[warp * 32 + i % 32];
                if (thread->awaited && *thread->awaited == thread->awaited_not) continue;
                thread->awaited = nullptr;
                if (!thread->done) switch_stack(&scheduler, thread->stack);
            }
        }
        thread = nullptr;
        if (!failure.empty()) return;
        for (size_t i = 0; i < copies.size();) {
            if (random() % 3) {
                ++i;
                continue;
            }
            const Copy copy = copies[i];
            copies[i] = copies.back(), copies.pop_back();
            land(copy);
        }
        if (std::all_of(threads.begin(), threads.end(), [](auto& t) { return t.done; })) {
            if (!copies.empty()) failure = "a copy is under way when its block has ended";
            return;
        }
        idle = progress == before ? idle + 1 : 0, before = progress;
    }
    failure = "some threads wait forever";
}

}  // namespace emulator

using namespace emulator;

// Runs kernel `entry`, `at_once` blocks at the same time. `memory`: begin, bytes, and whether the
// kernel in front writes it, which may still run if there is such memory. What went wrong, or "".
extern "C" const char* launch(Kernel* entry, const uint64_t* entry_words,
                              const float* entry_numbers, unsigned columns,
                              unsigned rows, unsigned num_threads, unsigned bytes,
                              unsigned cluster, unsigned at_once, unsigned seed,
                              const uint64_t* given, int num_given) {
    find_image();
    kernel = entry, words = entry_words, numbers = entry_numbers;
    grid = {columns, rows, 1}, threads_of_block = {num_threads, 1, 1}, cluster_size = cluster;
    failure.clear(), written.clear(), ranges.clear();
    std::fill(std::begin(page_written), std::end(page_written), false);
    overlaps = false;
    for (int i = 0; i < num_given; ++i, given += 3) {
        ranges.push_back({given[0], given[0] + given[1], given[2] != 0});
        overlaps |= given[2] != 0;
    }
    std::mt19937 random(seed);
    std::vector<std::vector<Block>> ended;  // whose stores may be looked at
    dynamic_bytes = bytes;
    for (unsigned first = 0; first < columns * rows; first += at_once) {
        blocks = std::vector<Block>(std::min(at_once, columns * rows - first));
        for (auto& block : blocks) {
            block.memory.reset(static_cast<char*>(std::aligned_alloc(1024, tls_bytes)));
            Thread any;
            any.block = &block, thread = &any;
            dynamic_at = dynamic_memory_of_thread() - block.memory.get();
            thread = nullptr;
            const size_t used = dynamic_at + bytes;
            std::memset(block.memory.get(), 0xff, dynamic_at ? dynamic_at : 1);
            std::memset(block.memory.get() + dynamic_at, 0xff, bytes);
            const size_t behind = dynamic_at + kMostDynamic;
            if (tls_bytes > behind)
                std::memset(block.memory.get() + behind, 0xff, tls_bytes - behind);
            block.cells.resize(std::max(tls_bytes > behind ? tls_bytes : used, used) / 4 + 4);
            block.warps.resize(num_threads / 32);
            block.flushed.assign(num_threads + kMbarriers + 1, 0);
        }
        run(first, random);
        if (!failure.empty()) break;
        for (auto& block : blocks) block.memory.reset(), block.cells = {};
        ended.push_back(std::move(blocks));
    }
    thread = nullptr;
    return failure.c_str();
}

// What a kernel has as thread_local is its block's.
struct Place {
    unsigned long module, offset;
};
extern "C" __attribute__((visibility("hidden"))) void* __tls_get_addr(Place* place) {
    return thread->block->memory.get() + place->offset;
}

size_t __cvta_generic_to_shared(const void* pointer) {
    return static_cast<const char*>(pointer) - thread->block->memory.get();
}
unsigned dynamic_smem_bytes() { return dynamic_bytes; }

void wait_for_previous() { thread->clock.back() = 1; }
void fence_gpu() { make_seen(thread->block->flushed); }

void barrier_init(unsigned barrier, unsigned arrivals) {
    auto& all = thread->block->mbarriers;
    const int num = arrivals, clock = threads_of_block.x + all.size();
    if (all.size() == kMbarriers) fail("more mbarriers than the emulator has clocks for");
    emulator::store<uint64_t>(shared(barrier), 0);
    all[barrier] = {num,   num,   0, 0, clock, thread->number,
                    false, false, Clock(thread->clock.size()), {}};
}
void barrier_init_fence() {
    for (auto& [at, mbarrier] : thread->block->mbarriers) mbarrier.fenced = true;
}
void barrier_expect_bytes(unsigned barrier, unsigned num_bytes) {
    emulator::load<uint64_t>(shared(barrier));
    Mbarrier& mbarrier = mbarrier_at(*thread->block, barrier);
    make_seen(mbarrier.joined);
    mbarrier.bytes += num_bytes;
    if (--mbarrier.missing < 0) fail("too many arrive");
    settle(mbarrier);
}
bool barrier_is_over(unsigned barrier, unsigned parity) {
    emulator::load<uint64_t>(shared(barrier));
    Mbarrier& mbarrier = mbarrier_at(*thread->block, barrier);
    if ((mbarrier.phase & 1) == parity) return false;
    if (!mbarrier.over.empty()) join(thread->clock, mbarrier.over);
    return true;
}

void barrier_wait(unsigned barrier, unsigned parity) {
    while (!barrier_is_over(barrier, parity)) {
        const unsigned& phase = mbarrier_at(*thread->block, barrier).phase;
        wait_while(phase, phase);
    }
}

void copy_bulk(unsigned smem_to, const void* from, unsigned num_bytes, unsigned barrier,
               unsigned long long) {
    judge(from, num_bytes, false, kWeak);
    start_copy({thread->block, smem_to, from, num_bytes, barrier, {}});
}

void copy_async_or_zero(bool wanted, unsigned smem_to, const void* from) {
    check_aligned(shared(smem_to), 16);
    if (smem_to + 16 > dynamic_at + dynamic_bytes) fail("no such shared memory");
    if (wanted) check_aligned(from, 16), judge(from, 16, false, kWeak);
    write_cells(*thread->block, smem_to, 16, thread->number, kUnderWay, kAsync);
    thread->copies.push_back({smem_to, wanted ? from : nullptr, thread->group});
}
void commit_copies() { ++thread->group; }

unsigned cluster_rank() { return thread->block_index.x % cluster_size; }
void cluster_arrive_relaxed() {
    for (auto& [at, mbarrier] : thread->block->mbarriers)
        if (mbarrier.maker == thread->number) mbarrier.told = mbarrier.fenced;
    Meeting& meeting = clusters[&block_of_cluster(0)];
    thread->cluster_turn = meeting.turn;
    if (++meeting.arrived < static_cast<int>(threads_of_block.x * cluster_size)) return;
    meeting.arrived = 0, ++meeting.turn, ++progress;
    for (unsigned rank = 0; rank < cluster_size; ++rank) {
        Block& block = block_of_cluster(rank);
        block.released = block.releasing;
    }
}
void cluster_arrive() {
    make_seen(thread->block->releasing);
    cluster_arrive_relaxed();
}
void cluster_wait() {
    wait_while(clusters[&block_of_cluster(0)].turn, thread->cluster_turn);
    thread->met_cluster = true;
    if (!thread->block->released.empty()) join(thread->clock, thread->block->released);
}
// The upper 12 bits of an address are 1 + the rank of its block.
unsigned address_in_block(unsigned own, unsigned rank) { return own | (rank + 1) << 20; }
void store_cluster_async(unsigned to, unsigned barrier, const float4& v) {
    if (to >> 20 != barrier >> 20) fail("a barrier of another block");
    Copy copy{&block_of_cluster((to >> 20) - 1), to & 0xfffff, nullptr, 16, barrier & 0xfffff, {}};
    std::memcpy(&copy.kept, &v, 16);
    start_copy(copy);
}

float load_cluster_float(unsigned from) {
    const unsigned rank = from >> 20, at = from & 0xfffff;
    if (!rank || rank > cluster_size || at % 4 || at + 4 > dynamic_at + dynamic_bytes)
        fail("no such shared memory in the cluster");
    Block& block = block_of_cluster(rank - 1);
    const Cell& cell = block.cells[at / 4];
    if (block.has_ended) fail("reads shared memory of a block that may have ended");
    if (!thread->met_cluster || block.released.empty() || cell.writer == kNobody ||
        cell.written == kUnderWay || block.released[cell.writer] < cell.written)
        fail("a race: reads what another block of the cluster may still write");
    block.read_by_cluster[at / 4] = thread->cluster_turn;
    float value;
    std::memcpy(&value, block.memory.get() + at, 4);
    return value;
}

// ---- what -fsanitize=thread calls

#define EMULATOR_ACCESS(NUM)                                                                       \
    void __tsan_read##NUM(void* at) { judge(at, NUM, false, kWeak); }                              \
    void __tsan_write##NUM(void* at) { judge(at, NUM, true, kWeak); }                              \
    void __tsan_unaligned_read##NUM(void* at) { judge(at, NUM, false, kWeak); }                    \
    void __tsan_unaligned_write##NUM(void* at) { judge(at, NUM, true, kWeak); }

extern "C" {
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
void __tsan_read_range(void* at, size_t num_bytes) { judge(at, num_bytes, false, kWeak); }
void __tsan_write_range(void* at, size_t num_bytes) { judge(at, num_bytes, true, kWeak); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
