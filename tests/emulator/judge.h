// The judge of what threads read and write.
//
// Sources are compiled with -fsanitize=thread, so each access of theirs calls a function here; the
// functions of ptx/ call `read` and `write`. All of them keep to happens-before, with a clock for
// each thread of a block, one for each mbarrier, as if its copies were a thread's, and one for the
// kernel in front:
//
// - Shared memory: what a thread reads or writes over must come before by barriers, __syncwarp, or
//   phases of an mbarrier. What a copy brings is not there before its wait.
// - Global memory: other blocks see a weak store behind fence_gpu or a release only. Words that
//   both sides take for relaxed or atomic are always seen. Constant loads must find nothing that this
//   kernel writes.
// - What the kernel in front writes is not there before wait_for_previous; nor may one write.
// - The copy engine does not write over what threads wrote: ptx/ has no fence for that.
// - Another block of the cluster is stored to after a barrier of the cluster that follows the fence
//   behind its mbarriers' beginning. It is read from behind a barrier that releases what it wrote,
//   and neither writes over that nor ends before the next barrier.
// - Addresses lie in memory that the launch was given. Shared memory begins as NaN.
//
// Of the readers of a word it keeps the last two, and of global memory none.
#pragma once

#include "threads.h"

#include "ptx/bf16.cuh"
#include "ptx/halves.cuh"

namespace emulator {

template <class Visit>
void each_word(uintptr_t at, size_t num_bytes, const Visit& visit) {
    for (uintptr_t word = at / 4; word <= (at + num_bytes - 1) / 4; ++word) {
        uint8_t mask = 15;
        if (word == at / 4) mask &= 15 << at % 4;
        if (word == (at + num_bytes - 1) / 4) mask &= 15 >> (3 - (at + num_bytes - 1) % 4);
        visit(word, mask);
    }
}

bool knows(const Clock& clock, int who, uint16_t other, unsigned when) {
    return when != kUnderWay && (other == who || clock[other] >= when);
}

// Nobody else has run since.
void settle_doubts() {
    const auto doubts = std::move(thread->doubts);
    thread->doubts.clear();
    for (auto& doubt : doubts)
        if (*doubt.at != doubt.before) fail(doubt.wrong);
}

bool knows_write(const Block& block, size_t i, bool all) {
    const Cell& cell = block.cells[i];
    const bool first = knows(thread->clock, thread->number, cell.writer, cell.written);
    if (first != all) return first;
    const auto found = block.again.find(i);
    if (found == block.again.end()) return first;
    const auto known = [&](const Write& write) {
        return knows(thread->clock, thread->number, write.writer, write.when);
    };
    const auto &begin = found->second.begin(), &end = found->second.end();
    return all ? std::all_of(begin, end, known) : std::any_of(begin, end, known);
}

void read_cells(Block& block, size_t at, size_t num_bytes, Kind kind) {
    const int who = thread->number;
    each_word(at, num_bytes, [&](size_t i, uint8_t mask) {
        Cell& cell = block.cells[i];
        if (kind == kStrong && (cell.strong || cell.writer == kNobody)) return;
        if (cell.writer != kNobody && cell.written_bytes & mask && !knows_write(block, i, false))
            fail("a race: reads shared memory that is being written");
        if (kind == kStrong) return;
        if (cell.reader[0] != who)
            cell.reader[1] = cell.reader[0], cell.read[1] = cell.read[0],
            cell.read_bytes[1] = cell.read_bytes[0], cell.read_bytes[0] = 0;
        else if (cell.read[0] != thread->now())
            cell.read_bytes[0] = 0;
        cell.reader[0] = who, cell.read[0] = thread->now(), cell.read_bytes[0] |= mask;
    });
}

// What is wrong with a write.
const char* race_of_write(const Block& block, size_t i, uint8_t mask, bool strong) {
    const Cell& cell = block.cells[i];
    if (cell.writer != kNobody && cell.written_bytes & mask && !(strong && cell.strong) &&
        !knows_write(block, i, true))
        return "a race: writes over shared memory that is being written";
    for (int j = 0; j < 2; ++j)
        if (cell.reader[j] != kNobody && cell.read_bytes[j] & mask &&
            !knows(thread->clock, thread->number, cell.reader[j], cell.read[j]))
            return "a race: writes over shared memory that is being read";
    const auto read = block.read_by_cluster.find(i);
    if (read != block.read_by_cluster.end() && thread->cluster_turn <= read->second)
        return "a race: writes over what another block of the cluster may still read";
    return nullptr;
}

enum By { kThread, kAsync, kEngine };

void write_cells(Block& block, size_t at, size_t num_bytes, uint16_t writer, unsigned when, By by,
                 Kind kind = kWeak) {
    each_word(at, num_bytes, [&](size_t i, uint8_t mask) {
        Cell& cell = block.cells[i];
        const bool over = cell.writer != kNobody && cell.written_bytes & mask;
        if (const char* wrong = race_of_write(block, i, mask, kind == kStrong)) {
            if (by != kThread || kind == kStrong || (over && cell.written == kUnderWay))
                fail(wrong);
            auto* word = reinterpret_cast<unsigned*>(block.memory.get()) + i;
            thread->doubts.push_back({word, *word, wrong});
            block.again[i].push_back({writer, when});
            return;
        }
        if (over && by == kEngine && cell.writer < threads_of_block.x)
            fail("a copy over what threads wrote");
        if (!block.again.empty()) block.again.erase(i);
        const bool same = cell.writer == writer && cell.written == when;
        cell.written_bytes = same || !over ? cell.written_bytes | mask : mask;
        cell.writer = writer, cell.written = when, cell.strong = kind == kStrong;
    });
}

void settle_cells(Block& block, size_t at, size_t num_bytes, unsigned when) {
    each_word(at, num_bytes, [&](size_t i, uint8_t) { block.cells[i].written = when; });
}

bool& page_of(uintptr_t at) { return page_written[at >> 12 & 0xffff]; }

const Range& range_of(uintptr_t at, size_t num_bytes) {
    static size_t last;
    const auto has = [&](const Range& range) {
        return at >= range.begin && at + num_bytes <= range.end;
    };
    for (size_t i = 0; i < ranges.size() && ranges[i].from_previous; ++i)  // parts of others
        if (has(ranges[i])) return ranges[i];
    if (last < ranges.size() && has(ranges[last])) return ranges[last];
    for (last = 0; last < ranges.size(); ++last)
        if (has(ranges[last])) return ranges[last];
    fail("no such memory");
}

bool after_previous() { return thread->clock.back(); }

void judge_global(uintptr_t at, size_t num_bytes, bool writes, Kind kind) {
    const Range& range = range_of(at, num_bytes);
    if ((writes ? overlaps : range.from_previous) && !after_previous())
        fail(writes ? "writes before the kernel in front has ended"
                    : "reads what the kernel in front may still write");
    if (!writes && !page_of(at) && !page_of(at + num_bytes - 1)) return;
    const auto judge = [&](const Written& last) {
        if (kind == kConstant) fail("reads what this kernel writes as if it were constant");
        if (last.strong && kind == kStrong) return;
        if (last.block == thread->block) {
            if (!knows(thread->clock, thread->number, last.writer, last.when))
                fail("a race: uses global memory that another thread writes");
        } else if (last.block->flushed[last.writer] < last.when) {
            fail("uses what another block has not made visible");
        }
    };
    each_word(at, num_bytes, [&](uintptr_t word, uint8_t mask) {
        const auto found = written.find(word);
        const bool over = found != written.end() && found->second.bytes & mask;
        if (over) judge(found->second);
        if (!writes) return;
        page_of(4 * word) = true;
        const uint8_t others = found == written.end() || over ? 0 : found->second.bytes;
        written[word] = {thread->block, thread->now(), static_cast<uint16_t>(thread->number),
                         static_cast<uint8_t>(others | mask), kind == kStrong};
    });
}

void judge(const void* pointer, size_t num_bytes, bool writes, Kind kind) {
    if (!thread) return;
    if (!thread->doubts.empty()) settle_doubts();
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    const auto stack = reinterpret_cast<uintptr_t>(&at) & -kStack;
    if (at - stack < kStack || at - image_begin < image_end - image_begin) return;
    const size_t offset = at - reinterpret_cast<uintptr_t>(thread->block->memory.get());
    if (offset >= tls_bytes) return judge_global(at, num_bytes, writes, kind);
    if (offset + num_bytes > dynamic_at + dynamic_bytes && offset < dynamic_at + kMostDynamic)
        fail("no such shared memory");
    if (writes)
        write_cells(*thread->block, offset, num_bytes, thread->number, thread->now(), kThread,
                    kind);
    else
        read_cells(*thread->block, offset, num_bytes, kind);
}

void check_aligned(const void* at, int num_bytes) {
    if (reinterpret_cast<uintptr_t>(at) % num_bytes) fail("an access that is not aligned");
}

void read(void* to, const void* from, int num_bytes, Kind kind) {
    check_aligned(from, num_bytes);
    judge(from, num_bytes, false, kind);
    std::memcpy(to, from, num_bytes);
}

void write(void* to, const void* from, int num_bytes, Kind kind) {
    check_aligned(to, num_bytes);
    judge(to, num_bytes, true, kind);
    std::memcpy(to, from, num_bytes);
    if (kind == kStrong) ++progress;
}

void* shared(unsigned at) {
    if (at >= tls_bytes) fail("no such shared memory");
    return thread->block->memory.get() + at;
}

void read_transposed(unsigned* m, unsigned smem_row, int num) {
    const uint64_t own = smem_row;
    if (lane() < 8 * num) judge(shared(smem_row), 16, false, kWeak), check_aligned(shared(own), 16);
    const Lanes& rows = exchange(&own, 1);
    const int g = lane() / 4, t = lane() % 4;
    unsigned found[4] = {};
    for (int i = 0; i < num; ++i)
        for (int j = 0; j < 2; ++j) {
            unsigned short value;
            std::memcpy(&value, static_cast<char*>(shared(rows[8 * i + 2 * t + j][0])) + 2 * g, 2);
            found[i] |= value << 16 * j;
        }
    meet_in_warp();  // all have read
    std::copy(found, found + num, m);
}

float bf16_value(unsigned bits) { return __uint_as_float(bits << 16); }

float f16_value(unsigned bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return value;
}

// Lanes bring their halves as floats, two a word.
template <float (*VALUE)(unsigned)>
void multiply_add_as(float* sums, const uint64_t (&own)[6]) {
    float values[6][2];
    for (int i = 0; i < 6; ++i)
        for (int j = 0; j < 2; ++j) values[i][j] = VALUE(own[i] >> 16 * j & 0xffff);
    uint64_t words[6];
    std::memcpy(words, values, sizeof words);
    const Lanes& all = exchange(words, 6);
    for (int t = 0; t < 4; ++t) {
        float a[6][2], b[2][6][2];
        std::memcpy(a, all[lane() / 4 * 4 + t], sizeof a);
        for (int j = 0; j < 2; ++j) std::memcpy(b[j], all[(lane() % 4 * 2 + j) * 4 + t], sizeof a);
        for (int i = 0; i < 4; ++i) {
            const auto pair = [&](int of_a, int of_b) {
                const auto &x = a[of_a], &y = b[i % 2][of_b];
                return x[0] * y[0] + x[1] * y[1];
            };
            sums[i] += pair(i / 2, 4) + pair(2 + i / 2, 5);
        }
    }
}

void multiply_add(float* sums, const uint64_t (&own)[6]) { multiply_add_as<bf16_value>(sums, own); }
void multiply_add_f16(float* sums, const uint64_t (&own)[6]) {
    multiply_add_as<f16_value>(sums, own);
}

// a0 to a3, b0, b1, four bytes each.
void multiply_add_bytes(int* sums, const uint64_t (&own)[6]) {
    const Lanes& all = exchange(own, 6);
    for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 4; ++i) {
            const auto& a = all[lane() / 4 * 4 + t];
            const auto& b = all[(lane() % 4 * 2 + i % 2) * 4 + t];
            for (int bits = 0; bits < 32; bits += 8) {
                const auto byte = [&](uint64_t word) { return static_cast<int8_t>(word >> bits); };
                sums[i] += byte(a[i / 2]) * byte(b[4]) + byte(a[2 + i / 2]) * byte(b[5]);
            }
        }
}

}  // namespace emulator
