// The last phase of `plan`: a warp places the pairs of eight rows into the rounds of `down` and
// into the list of `up`. See plan.cu.
#pragma once
#include "ffn/plan_tile.cuh"
#include "tile/lists.cuh"
#include "tile/warp.cuh"

namespace {

// Rounds of each panel of the group; returns their sum.
template <bool ONE_PANEL>
__device__ __forceinline__ int lay_rounds(const Job& job, const Shared& shared, int group, int q,
                                          int num_entries, int lane) {
    if (ONE_PANEL) {
        const int rounds = (num_entries + ROUND - 1) / ROUND;
        if (lane == 0) job.num_rounds[q] = rounds;
        return rounds;
    }
    int total = 0;
#pragma unroll 1
    for (int first = 0; first < job.num_panels; first += 32) {
        const int panel = first + lane;
        int rounds = 0;
        if (panel < job.num_panels) {
            const unsigned short* counts =
                shared.class_counts + (group * job.num_panels + panel) * CLASSES;
            int pairs = 0;
#pragma unroll
            for (int c = 0; c < CLASSES; ++c) pairs += counts[c];
            rounds = (pairs + ROUND - 1) / ROUND;
            job.num_rounds[q + panel] = rounds;
        }
        const int end = scan_warp(rounds, lane);
        if (panel < job.num_panels) {
            shared.panel_rounds[panel] = rounds;
            shared.panel_first[panel] = total + end - rounds;
        }
        total += __shfl_sync(~0u, end, 31);
    }
    return total;
}

// A group on its way into the lists.
struct Placing {
    int group, num_entries;
    int total_rounds;  // of all panels
    Entries window;    // where its entries are, or come
    uint4* records;    // of the group's rounds
    uint4* links;
};

// Rounds of a panel of the group, and the first of them counted through the panels.
template <bool ONE_PANEL>
__device__ __forceinline__ int2 panel_rounds(const Shared& shared, const Placing& to, int panel) {
    if (ONE_PANEL) return make_int2(to.total_rounds, 0);
    return make_int2(shared.panel_rounds[panel], shared.panel_first[panel]);
}

// Lanes whose entry has this class and panel, of the lanes with an entry.
__device__ __forceinline__ unsigned lanes_alike(bool filled, unsigned bank_class, unsigned panel,
                                                int num_panels) {
    unsigned alike = __ballot_sync(~0u, filled);
#pragma unroll
    for (int bit = 1; bit < CLASSES; bit *= 2) {
        const unsigned set = __ballot_sync(~0u, (bank_class & bit) != 0);
        alike &= bank_class & bit ? set : ~set;
    }
#pragma unroll 1
    for (int bit = 1; bit < num_panels; bit *= 2) {
        const unsigned set = __ballot_sync(~0u, (panel & bit) != 0);
        alike &= panel & bit ? set : ~set;
    }
    return alike;
}

// The slots that the pairs of a group take, one after the other: with one panel, the lane whose
// number is a class knows that class.
template <bool ONE_PANEL>
struct Slots {
    int places;      // of each class
    int taken;       // pairs of the lane's class so far
    int spilled;     // pairs without place of the classes before
    int free_end;    // free places of the classes up to the lane's
    int free_shift;  // from a free place, counted through all classes, to its place in the class

    __device__ __forceinline__ Slots(const Shared& shared, const Placing& to, int lane) {
        if (!ONE_PANEL) return;
        places = 2 * to.total_rounds;
        taken = 0;
        const int count = lane < CLASSES ? shared.class_counts[to.group * CLASSES + lane] : places;
        const int over = max(0, count - places), free = max(0, places - count);
        const int over_end = scan_warp(over, lane);
        free_end = scan_warp(free, lane);
        spilled = over_end - over;
        free_shift = count - (free_end - free);
    }

    // Of up to 32 pairs, a lane each. All lanes take part.
    __device__ __forceinline__ int next(const Job& job, const Shared& shared, const Placing& to,
                                        int lane, bool filled, unsigned bank_class,
                                        unsigned panel) {
        const unsigned lanes_below = (1u << lane) - 1;
        if (!ONE_PANEL) {
            const unsigned alike = lanes_alike(filled, bank_class, panel, job.num_panels);
            int* ranks = shared.class_ranks + panel * CLASSES + bank_class;
            const int rank = *ranks + __popc(alike & lanes_below);
            __syncwarp();
            if (filled && alike >> lane == 1) *ranks = rank + 1;  // the last lane of its kind
            __syncwarp();
            return filled ? slot_in_panel(shared, to, job.num_panels, bank_class, panel, rank) : 0;
        }
        const unsigned of_lane = lanes_of_class(filled, bank_class, lane);
        const unsigned alike = __shfl_sync(~0u, of_lane, bank_class);
        int rank = __shfl_sync(~0u, taken, bank_class) + __popc(alike & lanes_below);
        taken += __popc(of_lane);
        if (__any_sync(~0u, rank >= places)) {
            const int at = rank - places + __shfl_sync(~0u, spilled, bank_class);
            unsigned taker = 0;
#pragma unroll
            for (int c = 0; c < CLASSES - 1; ++c) taker += at >= __shfl_sync(~0u, free_end, c);
            const int shift = __shfl_sync(~0u, free_shift, taker);
            if (rank >= places) rank = at + shift, bank_class = taker;
        }
        return slot_of_class(bank_class, rank);
    }

  private:
    __device__ __forceinline__ static int slot_in_panel(const Shared& shared, const Placing& to,
                                                        int num_panels, int bank_class,
                                                        unsigned panel, int rank) {
        const int places = 2 * shared.panel_rounds[panel];
        if (rank < places) return slot_of_class(bank_class, rank);
        const unsigned short* counts =
            shared.class_counts + (to.group * num_panels + panel) * CLASSES;
        int spilled = rank - places;
#pragma unroll 1
        for (int c = 0; c < bank_class; ++c) spilled += max(0, counts[c] - places);
#pragma unroll 1
        for (int c = 0; c < CLASSES; ++c) {
            const int free = max(0, places - counts[c]);
            if (spilled < free) return slot_of_class(c, counts[c] + spilled);
            spilled -= free;
        }
        __trap();  // there are 8 * places >= pairs
        return 0;
    }
};

// Puts a pair into the list of `up`; its link.
__device__ __forceinline__ unsigned list_pair(const Job& job, const Shared& shared, int token,
                                              unsigned column) {
    const int neuron_group = column / NEURONS, shift = (token & 4) * 4;
    const unsigned before = atomicAdd(&shared.ranks[neuron_group], 1u << shift);
    const int rank = static_cast<int>(before >> shift & 0xffff);
    const int2 start = shared.neuron_start[neuron_group];
    const int at = start.x + rank + (rank < start.y ? rank + (shift != 0) : start.y);
    job.pairs[job.first_pair + at] = token | column << 16;
    return job.first_pair + at;
}

constexpr unsigned kPads = PAD | PAD << 16, kNoEntry = 0xffff;

// Codes of two pads: a lane always writes the same record of a round.
__device__ __forceinline__ unsigned pad_codes(int lane) {
    const unsigned first_class = lane % ROUND_RECORDS * 2;
    return first_class | (first_class + 1) << 16;
}

// First the map, then slot by slot.
template <bool ONE_PANEL>
__device__ __forceinline__ void place_by_map(const Job& job, const Shared& shared,
                                             const Placing& to, int lane) {
    unsigned short* map = reinterpret_cast<unsigned short*>(shared.map);
#pragma unroll 1
    for (int i = lane; i < to.total_rounds * 2; i += 32)
        reinterpret_cast<uint4*>(map)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    __syncwarp();
    Slots<ONE_PANEL> slots(shared, to, lane);
#pragma unroll 1
    for (int first = 0; first < to.num_entries; first += 32) {
        const int i = first + lane;
        const bool filled = i < to.num_entries;
        const unsigned word = filled ? to.window.words[i] : 0;
        const unsigned panel = !ONE_PANEL && filled ? to.window.panels[i] : 0;
        const int slot = slots.next(job, shared, to, lane, filled, word % CLASSES, panel);
        if (filled) map[panel_rounds<ONE_PANEL>(shared, to, panel).y * ROUND + slot] = i;
    }
    __syncwarp();

    const int first_token = job.token_in_tile + to.group * GROUP;
    const unsigned codes = pad_codes(lane);
#pragma unroll 1
    for (int panel = 0; panel < job.num_panels; ++panel) {
        const int2 rounds = panel_rounds<ONE_PANEL>(shared, to, panel);
        const uint2* ids_of = reinterpret_cast<const uint2*>(map) + rounds.y * ROUND_RECORDS;
        const int slice = panel * job.group_rounds * ROUND_RECORDS;
#pragma unroll 1
        for (int i = lane; i < rounds.x * ROUND_RECORDS; i += 32) {
            const uint2 both = ids_of[i];
            unsigned words[4], links[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned id = (j < 2 ? both.x : both.y) >> (j % 2 * 16) & 0xffff;
                words[j] = kPads << 16 | (codes >> (j % 2 * 16) & 0xffff);
                links[j] = NO_LINK;
                if (id != kNoEntry) {
                    const unsigned word = to.window.words[id];
                    const int token = first_token + (word >> COLUMN_BITS & (GROUP - 1));
                    links[j] = list_pair(job, shared, token,
                                         panel * job.panel_rows + (word & COLUMN_MASK));
                    words[j] = word;
                }
            }
            to.records[slice + i] = make_uint4(
                words[0] >> 16 | (words[1] & 0xffff0000), words[2] >> 16 | (words[3] & 0xffff0000),
                (words[0] & 0xffff) | words[1] << 16, (words[2] & 0xffff) | words[3] << 16);
            to.links[slice + i] = make_uint4(links[0], links[1], links[2], links[3]);
        }
    }
}

// Pads everywhere, and over them pair by pair.
template <bool ONE_PANEL>
__device__ __forceinline__ void place_one_by_one(const Job& job, const Shared& shared,
                                                 const Placing& to, const GroupState& state,
                                                 int lane) {
    const unsigned codes = pad_codes(lane);
    const uint4 pads = make_uint4(kPads, kPads, codes, codes);
#pragma unroll 1
    for (int panel = 0; panel < job.num_panels; ++panel) {
        const int slice = panel * job.group_rounds * ROUND_RECORDS;
        const int num_records = panel_rounds<ONE_PANEL>(shared, to, panel).x * ROUND_RECORDS;
#pragma unroll 1
        for (int i = lane; i < num_records; i += 32) {
            to.records[slice + i] = pads;
            to.links[slice + i] = make_uint4(NO_LINK, NO_LINK, NO_LINK, NO_LINK);
        }
    }
    __syncwarp();
    const bool staged = state.staged_at >= 0;
    int share = 0, end = 0;
    if (!staged) {
        bool unfit;
        share = count_tiles(job, to.group, lane, unfit);
        if (state.heavy_lanes >> lane & 1) share = 0;
        end = scan_warp(share, lane);
    }
    unsigned short* halves = reinterpret_cast<unsigned short*>(to.records);
    unsigned* links = reinterpret_cast<unsigned*>(to.links);
    const int first_token = job.token_in_tile + to.group * GROUP;
    Slots<ONE_PANEL> slots(shared, to, lane);
    const int size = staged ? to.num_entries : kWindow;
#pragma unroll 1
    for (int start = 0; start < to.num_entries; start += size) {
        const int stop = min(start + size, to.num_entries);
        if (!staged) {
            locate_entries(job, to.group, lane, end - share, share, start, stop, to.window.words);
            __syncwarp();
            fetch_entries<ONE_PANEL, 4>(job, to.group, lane, to.window, stop - start,
                                        [](unsigned, unsigned, unsigned) {});
            __syncwarp();
        }
#pragma unroll 1
        for (int first = 0; first < stop - start; first += 32) {
            const int i = first + lane;
            const bool filled = i < stop - start;
            const unsigned word = filled ? to.window.words[i] : 0;
            const unsigned panel = !ONE_PANEL && filled ? to.window.panels[i] : 0;
            int slot = slots.next(job, shared, to, lane, filled, word % CLASSES, panel);
            if (filled) {
                slot += panel * job.group_rounds * ROUND;
                const int token = first_token + (word >> COLUMN_BITS & (GROUP - 1));
                halves[value_of_slot(slot)] = word >> 16;
                halves[value_of_slot(slot) + CODE_HALVES] = word & 0xffff;
                links[slot] =
                    list_pair(job, shared, token, panel * job.panel_rows + (word & COLUMN_MASK));
            }
        }
        __syncwarp();
    }
}

template <bool ONE_PANEL>
__device__ __forceinline__ void place_group(const Job& job, const Shared& shared, int group,
                                            int lane) {
    const GroupState state = shared.groups[group];
    const int q = (job.first_token / GROUP + group) * job.num_panels;
    const int total_rounds = lay_rounds<ONE_PANEL>(job, shared, group, q, state.num_entries, lane);
    if (!ONE_PANEL) {
#pragma unroll 1
        for (int i = lane; i < job.num_panels * CLASSES; i += 32) shared.class_ranks[i] = 0;
    }
    __syncwarp();
    const bool staged = state.staged_at >= 0;
    const long long first_record = static_cast<long long>(q) * job.group_rounds * ROUND_RECORDS;
    const Placing to{group,
                     state.num_entries,
                     total_rounds,
                     staged ? on_stage(shared, state.staged_at) : in_map(shared),
                     settle(job.rounds + first_record),
                     settle(job.links + first_record)};
    if (staged && total_rounds <= kMapRounds)
        place_by_map<ONE_PANEL>(job, shared, to, lane);
    else
        place_one_by_one<ONE_PANEL>(job, shared, to, state, lane);
    __syncwarp();
}

}  // namespace
