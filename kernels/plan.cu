// plan: from the packed gate of a tile of tokens, the lists that `up`, `hidden` and `down` walk.
//
// A pair is a (token, neuron that fired). `up` wants all pairs of one neuron, `down` all pairs of
// few tokens: every pair is listed twice, and a link leads from down's list into the one of `up`.
// Rows that the sparse way does not suit go to heavy_rows instead, and have no pairs: a tile
// overflowed (count > S) or is not finite (NOT_FINITE in a count), or more than cap neurons fired.
//
// For down, each (group of 8 tokens, panel of columns), q = group * num_panels + panel:
//   num_rounds int32 [Q], rounds [Q, group_rounds] of 64 bytes, 16 slots each (twell_lists.cuh)
//   links uint32 [Q, group_rounds, 16]: of each slot, in the order in which they lie in a round,
//   the place of its pair in `pairs`; NO_LINK without one
//   There are ceil(pairs / 16) rounds. Slot s prefers columns of class s & 7: then the eight rows
//   that one ldmatrix phase reads lie in different banks. The i-th pair of a class (in the order of
//   rows, lanes, tiles, slots, never of time) takes place i of its class; pairs that find no more
//   places of their class take free ones of other classes, in order. The rest of the slots are
//   pads: PAD, token 0, the first column of the slot's class.
// For up, each tile of tokens:
//   pair_start int32 [tiles, NG + 1]
//   pairs uint32 [tiles, tile_tokens * cap] of token in tile | column << 16
//   The 8 neurons of group ng have the pairs pair_start[ng] to pair_start[ng + 1]. There, tokens
//   0-3 and 4-7 of their groups alternate while there are both; else the order is free and may
//   differ from run to run.
//
// group_rounds >= ceil(c / 2) for any c >= min(cap, panel_rows).
//
// A tile is planned by one block, `plan`, or by a cluster of eight, `plan_cluster`, each with an
// equal share of the tile's groups. Three phases with barriers between: count (each warp its
// groups), start (where the pairs of each neuron group begin, and those of this block: a prefix sum
// that each block makes for itself), place (each warp its groups). Count leaves the entries that it
// fetched on a stage in shared memory. Place first makes a map of which entry each slot takes and
// then goes by the slots, so that memory is written in order; groups that do not fit on the stage
// or in the map are fetched again, window by window, and go to their slots one by one.
//
// Launch: `plan`: a block a tile of tokens, of 512 threads, or of 1024 where a multiprocessor would
// have only one block. `plan_cluster`, from sm_90 on: 8 blocks a tile, of 512 threads.
// Dynamic shared memory, NG = ceil(N / 8), P panels, G = ceil(tile_tokens / 8 / blocks a tile):
//   least  12 * NG + (12 + 16 * P) * G + (40 * P + 1536) * warps + 256 bytes; plan_cluster:
//          16 * NG + (12 + 16 * P) * G + (40 * P + 3072) * warps + 256 bytes
//   stage  what there is beyond: 4 bytes a pair, 5 if P > 1; best if the pairs of a block fit
// Limits: N a multiple of 8 up to 65536 (NG 8192), S up to 256, panel_rows a multiple of 8 up to
// 8192, P up to 256, tile_tokens a multiple of 8 up to 1024. counts, entries and heavy_count (0)
// are those of `gate_pack` or `pack`; the order of entries within a tile does not matter.
#include "plan_tile.cuh"

namespace {

// ---- first phase: count

__device__ __forceinline__ void prefetch_counts(const Job& job) {
    const char* counts = reinterpret_cast<const char*>(job.counts);
    const int num_bytes = job.num_tokens * job.num_tiles * 4;
#pragma unroll 1
    for (int at = threadIdx.x * 128; at < num_bytes; at += blockDim.x * 128)
        prefetch_into_l2(counts + at);
}

__device__ __forceinline__ void clear(const Job& job, const Shared& shared) {
#pragma unroll 1
    for (int i = threadIdx.x; i < job.num_neuron_groups(); i += blockDim.x) shared.counted[i] = 0;
    if (threadIdx.x == 0) *shared.num_staged = 0;
}

__device__ __forceinline__ void list_heavy_rows(const Job& job, int group, int lane, bool heavy) {
    const unsigned rows = __ballot_sync(~0u, heavy && lane % 4 == 0);
    if (rows == 0) return;
    int first = 0;
    if (lane == 0) first = atomicAdd(job.heavy_count, __popc(rows));
    first = __shfl_sync(~0u, first, 0);
    if (rows >> lane & 1) {
        const int rank = __popc(rows & ((1u << lane) - 1));
        job.heavy_rows[first + rank] = job.first_token + group * GROUP + lane / 4;
    }
}

// Of up to 32 pairs, a lane each: the lanes whose pair is of the class that the lane has as its
// number. All lanes take part.
__device__ __forceinline__ unsigned lanes_of_class(bool filled, unsigned bank_class, int lane) {
    unsigned lanes = __ballot_sync(~0u, filled);
#pragma unroll
    for (int bit = 1; bit < CLASSES; bit *= 2)
        lanes &= __ballot_sync(~0u, (bank_class & bit) != 0) ^ (lane & bit ? 0 : ~0u);
    return lanes;
}

template <bool ONE_PANEL>
__device__ __forceinline__ void count_group(const Job& job, const Shared& shared, int group,
                                            int lane) {
    // which rows are heavy
    bool unfit;
    int share = count_tiles(job, group, lane, unfit);
    int nnz = share + __shfl_xor_sync(~0u, share, 1);
    nnz += __shfl_xor_sync(~0u, nnz, 2);
    const unsigned unfit_lanes = __ballot_sync(~0u, unfit);
    const bool heavy = (unfit_lanes >> (lane & 28) & 15) != 0 || nnz > job.cap;
    const unsigned heavy_lanes = __ballot_sync(~0u, heavy);
    list_heavy_rows(job, group, lane, heavy);
    if (heavy) share = 0;

    // where the entries go
    const int end = scan_warp(share, lane);
    const int num_entries = __shfl_sync(~0u, end, 31);
    const int staged_at = reserve_stage(shared, num_entries, lane);
    if (lane == 0) shared.groups[group] = {num_entries, staged_at, heavy_lanes};
    const int classes = job.num_panels * CLASSES;
    if (!ONE_PANEL) {
#pragma unroll 1
        for (int i = lane; i < classes; i += 32) shared.class_ranks[i] = 0;
    }

    // pairs of each neuron group and of each class
    const Entries window = staged_at >= 0 ? on_stage(shared, staged_at) : in_map(shared);
    const int size = staged_at >= 0 ? num_entries : kWindow;
    int of_class = 0;  // of the lane's number
#pragma unroll 1
    for (int start = 0; start < num_entries; start += size) {
        const int stop = min(start + size, num_entries);
        locate_entries(job, group, lane, end - share, share, start, stop, window.words);
        __syncwarp();
        fetch_entries<ONE_PANEL, 8>(
            job, group, lane, window, stop - start,
            [&](unsigned column, unsigned row, unsigned panel) {
                atomicAdd(&shared.counted[column / NEURONS], row < 4 ? 1u : 0x10000u);
                if (!ONE_PANEL)
                    atomicAdd(&shared.class_ranks[panel * CLASSES + column % CLASSES], 1);
            });
        __syncwarp();
        if (ONE_PANEL) {
#pragma unroll 2
            for (int i = lane; i - lane < stop - start; i += 32) {
                const bool filled = i < stop - start;
                const unsigned word = filled ? window.words[i] : 0;
                of_class += __popc(lanes_of_class(filled, word % CLASSES, lane));
            }
            __syncwarp();
        }
    }
    if (ONE_PANEL) {
        if (lane < CLASSES) shared.class_counts[group * CLASSES + lane] = of_class;
    } else {
#pragma unroll 1
        for (int i = lane; i < classes; i += 32)
            shared.class_counts[group * classes + i] = shared.class_ranks[i];
    }
}

// ---- second phase: start

// The first pair of each neuron group, and the ranks with which this block begins there. Each warp
// has a run of neuron groups. Ends after the last look into other blocks.
template <int PARTS>
__device__ __forceinline__ void start_neuron_groups(const Job& job, const Shared& shared, int part,
                                                    int warp, int lane, int* pair_start) {
    const int num = job.num_neuron_groups();
    const int num_threads = blockDim.x;
    const int run = (num + num_threads - 1) / num_threads * 32;
    const int stop = min((warp + 1) * run, num);
    int sum = 0;
#pragma unroll 1
    for (int i = warp * run + lane; i < stop; i += 32) {
        unsigned pairs = 0, below = 0;
        if (PARTS == 1) {
            pairs = shared.counted[i];
        } else {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const unsigned counted = load_of_block(shared.counted + i, p);
                pairs += counted;
                below += p < part ? counted : 0;
            }
        }
        shared.neuron_start[i].x = pairs;
        shared.ranks[i] = below;
        sum += (pairs & 0xffff) + (pairs >> 16);
    }
    sum = scan_warp(sum, lane);
    if (lane == 31) shared.warp_sums[warp] = sum;
    __syncthreads();
    if (PARTS > 1) cluster_arrive();

    const int below = scan_warp(lane < warp ? shared.warp_sums[lane] : 0, lane);
    int first = __shfl_sync(~0u, below, 31);
#pragma unroll 1
    for (int start = warp * run; start < stop; start += 32) {
        const int i = start + lane;
        const unsigned pairs = i < stop ? shared.neuron_start[i].x : 0;
        const int low = pairs & 0xffff, high = pairs >> 16;
        const int end = scan_warp(low + high, lane);
        if (i < stop) {
            const int at = first + end - low - high;
            shared.neuron_start[i] = make_int2(at, min(low, high));
            if (part == 0) pair_start[i] = at;
        }
        first += __shfl_sync(~0u, end, 31);
    }
    if (part == 0 && warp == num_threads / 32 - 1 && lane == 0) pair_start[num] = first;
}

// ---- third phase: place

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
    int places;        // of each class
    int taken;         // pairs of the lane's class so far
    int spilled;       // pairs without place of the classes before
    int free_end;      // free places of the classes up to the lane's
    int free_shift;    // from a free place, counted through all classes, to its place in the class

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
                links[slot] = list_pair(job, shared, token,
                                        panel * job.panel_rows + (word & COLUMN_MASK));
            }
        }
        __syncwarp();
    }
}

template <class Layout, bool ONE_PANEL>
__device__ __forceinline__ void place_group(const Job& job, const Shared& shared, int group,
                                            int lane) {
    const GroupState state = shared.groups[group];
    const int q = (job.first_token / GROUP + group) * job.num_panels;
    const int total_rounds =
        lay_rounds<ONE_PANEL>(job, shared, group, q, state.num_entries, lane);
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
    if (staged && total_rounds <= Layout::MAP_ROUNDS)
        place_by_map<ONE_PANEL>(job, shared, to, lane);
    else
        place_one_by_one<ONE_PANEL>(job, shared, to, state, lane);
    __syncwarp();
}

template <class Layout, bool ONE_PANEL>
__device__ __forceinline__ void plan_part(Job job, unsigned char* memory, int num_groups, int part,
                                          int* pair_start) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    if (ONE_PANEL) job.num_panels = 1;
    const Shared shared =
        lay_out_shared<Layout>(memory, job.num_neuron_groups(), num_groups, job.num_panels);
    prefetch_counts(job);
    clear(job, shared);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        count_group<ONE_PANEL>(job, shared, group, lane);
    __syncthreads();
    if (Layout::PARTS > 1) {
        cluster_arrive();
        cluster_wait();
    }
    start_neuron_groups<Layout::PARTS>(job, shared, part, warp, lane, pair_start);
    __syncthreads();
#pragma unroll 1
    for (int group = warp; group < job.num_groups(); group += num_warps)
        place_group<Layout, ONE_PANEL>(job, shared, group, lane);
    if (Layout::PARTS > 1) {
        __syncwarp();
        cluster_wait();  // until no other block looks into this one
    }
}

using Alone = Layout<1, 48>;
using InCluster = Layout<8, 96>;

template <class Layout>
__device__ __forceinline__ void plan_tile(const int* counts, const int* entries, int M, int N,
                                          int S, int cap, int tile_tokens, int panel_rows,
                                          int num_panels, int group_rounds, int* num_rounds,
                                          uint4* rounds, uint4* links, int* pair_start,
                                          unsigned* pairs, int* heavy_rows, int* heavy_count,
                                          unsigned char* memory) {
    constexpr int PARTS = Layout::PARTS;
    const int part = PARTS == 1 ? 0 : cluster_rank(), tile = blockIdx.x / PARTS;
    const int num_groups = (tile_tokens / GROUP + PARTS - 1) / PARTS;
    const int tile_end = min((tile + 1) * tile_tokens, M);
    const int token_in_tile = min(part * num_groups * GROUP, tile_tokens);
    const int first_token = tile * tile_tokens + token_in_tile;
    const int num_tiles = (N + TILE - 1) / TILE;
    const long long first_cell = static_cast<long long>(first_token) * num_tiles;
    const Job job{counts + first_cell,
                  entries + first_cell * S,
                  first_token,
                  max(0, min(num_groups * GROUP, tile_end - first_token)),
                  token_in_tile,
                  N,
                  num_tiles,
                  S,
                  cap,
                  panel_rows,
                  num_panels,
                  group_rounds,
                  0xffffffffu / panel_rows + 1,
                  num_rounds,
                  rounds,
                  links,
                  pairs,
                  static_cast<unsigned>(tile) * tile_tokens * cap,
                  heavy_rows,
                  heavy_count};
    int* tile_start = pair_start + static_cast<long long>(tile) * (job.num_neuron_groups() + 1);
    if (num_panels == 1)
        plan_part<Layout, true>(job, memory, num_groups, part, tile_start);
    else
        plan_part<Layout, false>(job, memory, num_groups, part, tile_start);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMaxThreads)
    plan(const int* counts, const int* entries, int M, int N, int S, int cap, int tile_tokens,
         int panel_rows, int num_panels, int group_rounds, int* num_rounds, uint4* rounds,
         uint4* links, int* pair_start, unsigned* pairs, int* heavy_rows, int* heavy_count) {
    extern __shared__ uint4 dynamic_memory[];
    plan_tile<Alone>(counts, entries, M, N, S, cap, tile_tokens, panel_rows, num_panels,
                     group_rounds, num_rounds, rounds, links, pair_start, pairs, heavy_rows,
                     heavy_count, reinterpret_cast<unsigned char*>(dynamic_memory));
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(kClusterThreads, 2)
    plan_cluster(const int* counts, const int* entries, int M, int N, int S, int cap,
                 int tile_tokens, int panel_rows, int num_panels, int group_rounds,
                 int* num_rounds, uint4* rounds, uint4* links, int* pair_start, unsigned* pairs,
                 int* heavy_rows, int* heavy_count) {
    extern __shared__ uint4 dynamic_memory[];
    plan_tile<InCluster>(counts, entries, M, N, S, cap, tile_tokens, panel_rows, num_panels,
                         group_rounds, num_rounds, rounds, links, pair_start, pairs, heavy_rows,
                         heavy_count, reinterpret_cast<unsigned char*>(dynamic_memory));
}
#endif
