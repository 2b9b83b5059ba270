// grad_lists: the lists of the backward pass (grad_lists.cuh), out of those of the forward pass.
//
//   list_neurons   fours of neurons, panels of tokens: out of `pairs` and `pair_start` of plan.cu,
//                  where the pairs of 8 neurons and a tile of tokens lie together; a panel is so
//                  many whole tiles
//   list_tokens    fours of tokens, panels of neurons: out of the rounds and links of plan.cu,
//                  where the pairs of 8 tokens and a panel of plan.cu lie together; `split` panels
//                  here are one there
//
// A block makes the lists of two fours, 8 rows, and a panel. A map in shared memory has a bit for
// each (row, other row of the panel), those of a four and a bank class together. The bits below a
// pair's own are its rank in the class, and the rank is its place: slot_of_class, and places of
// other classes, in order, for what finds none of its own. Then the slots are written in the order
// of memory. So nothing depends on the order in which pairs are read.
//
// kept, grads: of each pair, by its place in `pairs`: gate | up << 16, grad_gate | grad_up << 16.
//
// Launch: grid (ceil(rows / 8), panels), blocks of 128 threads. Dynamic shared memory: 64 * W + 32
// * W + 6 * kMapSlots bytes, W = ceil(panel_rows / 64) rounded up to even. num_listed, the
// rounds given away so far, is 0 before; there is room for 8 rounds a list and those of all pairs.
#include "spec.cuh"
#include "tile/bf16.cuh"
#include "tile/lists.cuh"
#include "tile/round_masks.cuh"
#include "tile/warp.cuh"
#include "train/grad_lists.cuh"

namespace {

constexpr int kThreads = spec::GRAD_LISTS_BLOCK, kWarps = kThreads / 32;
constexpr int kMapSlots = spec::GRAD_MAP_SLOTS;  // slots that are written at a time
constexpr unsigned kNoPair = ~0u;
constexpr int kHalves = 2;

struct Lists {
    int2* heads;
    unsigned* codes;
    uint2* pairs;
    uint2* hidden;  // or null
    unsigned* masks;
};

struct Half {
    int counts[CLASSES];   // pairs
    int spilled[CLASSES];  // pairs without a place in the classes before
    int num_rounds;
};

// Shared memory of a block.
struct Shared {
    unsigned* bits;         // [two fours][CLASSES][words]
    unsigned short* ranks;  // [the same]: bits of the class in the words before
    unsigned* places;       // [kMapSlots] of the pairs that the slots take
    unsigned short* codes;  // [kMapSlots]
    int words;              // of a class

    __device__ __forceinline__ Shared(unsigned char* memory, int panel_rows) {
        words = ((panel_rows + 63) / 64 + 1) & ~1;
        bits = reinterpret_cast<unsigned*>(memory);
        ranks = reinterpret_cast<unsigned short*>(bits + 16 * words);
        places = reinterpret_cast<unsigned*>(ranks + 16 * words);
        codes = reinterpret_cast<unsigned short*>(places + kMapSlots);
    }
};

// Where a pair's bit is.
struct Bit {
    int class_idx, word;  // class_idx: four * CLASSES + bank class
    unsigned below;       // bits of the word that lie below

    __device__ __forceinline__ Bit(int row, int other)
        : class_idx(row / FOUR * CLASSES + other % CLASSES), word(other / 64),
          below((1u << (other / CLASSES % 8 * FOUR + row % FOUR)) - 1) {}
};

// Ranks of all words; a warp takes every fourth class.
__device__ __forceinline__ void rank_words(const Shared& shared, Half* halves) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int c = warp; c < kHalves * CLASSES; c += kWarps) {
        int sum = 0;
        for (int first = 0; first < shared.words; first += 32) {
            const int i = first + lane;
            const int own = i < shared.words ? __popc(shared.bits[c * shared.words + i]) : 0;
            const int end = scan_warp(own, lane);
            if (i < shared.words) shared.ranks[c * shared.words + i] = sum + end - own;
            sum += __shfl_sync(~0u, end, 31);
        }
        if (lane == 0) halves[c / CLASSES].counts[c % CLASSES] = sum;
    }
}

// How many rounds a four takes, and which of its classes have too few places.
__device__ __forceinline__ void lay_half(Half& half) {
    int pairs = 0;
    for (int c = 0; c < CLASSES; ++c) pairs += half.counts[c];
    half.num_rounds = (pairs + ROUND - 1) / ROUND;
    int spilled = 0;
    for (int c = 0; c < CLASSES; ++c) {
        half.spilled[c] = spilled;
        spilled += max(0, half.counts[c] - 2 * half.num_rounds);
    }
}

// Of a pair's four.
__device__ __forceinline__ int slot_of(const Shared& shared, const Half& half, const Bit& bit) {
    const int at = bit.class_idx * shared.words + bit.word, bank_class = bit.class_idx % CLASSES;
    const int rank = shared.ranks[at] + __popc(shared.bits[at] & bit.below);
    const int places = 2 * half.num_rounds;
    if (rank < places) return slot_of_class(bank_class, rank);
    int spilled = half.spilled[bank_class] + rank - places;
    for (int c = 0; c < CLASSES; ++c) {
        const int free = max(0, places - half.counts[c]);
        if (spilled < free) return slot_of_class(c, half.counts[c] + spilled);
        spilled -= free;
    }
    __trap();  // there are 8 * places >= pairs
    return 0;
}

// Masks of 8 rounds: lane 4 i + t has the four codes of record t in round i.
__device__ __forceinline__ void write_masks(unsigned* masks, const unsigned (&codes)[4], int lane) {
    unsigned mask = 0;
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
        unsigned same = ~0u;
#pragma unroll
        for (int bit = 0; bit < 2; ++bit) {
            const unsigned set = __ballot_sync(~0u, (codes[slot] & 1u << (COLUMN_BITS + bit)) != 0);
            same &= lane >> (2 + bit) & 1 ? set : ~set;
        }
        mask |= every_fourth_bit(same >> (lane & 3)) << (8 * slot);
    }
    if (lane < FOUR_MASKS) masks[lane] = mask;
}

__device__ __forceinline__ uint2 join(const unsigned (&halves)[4]) {
    return make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
}

// Slots `window` to `window + num` of the block's, of which the map has the pairs.
__device__ __forceinline__ void write_slots(const Shared& shared, const Lists& lists, int first,
                                            int window, int num, const unsigned* kept,
                                            const unsigned* grads) {
    const int lane = threadIdx.x % 32;
    const unsigned pads = lane % 4 * 2;
    for (int i = threadIdx.x; i < num / 4; i += kThreads) {
        const long long record = static_cast<long long>(first) * 4 + window / 4 + i;
        unsigned codes[4], gate[4], up[4], hidden[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned place = shared.places[4 * i + j];
            codes[j] = pads + j % 2, gate[j] = up[j] = hidden[j] = PAD;
            if (place != kNoPair) {
                const unsigned value = __ldg(kept + place), grad = __ldg(grads + place);
                codes[j] = shared.codes[4 * i + j];
                gate[j] = grad & 0xffff, up[j] = grad >> 16;
                hidden[j] = bf16_bits(bf16_value(value & 0xffff) * bf16_value(value >> 16));
            }
        }
        write_masks(lists.masks + record / 32 * FOUR_MASKS, codes, lane);
        lists.pairs[record / 4 * 8 + lane % 4] = join(gate);
        lists.pairs[record / 4 * 8 + 4 + lane % 4] = join(up);
        if (lists.hidden) lists.hidden[record] = join(hidden);
    }
    unsigned* words = lists.codes + (static_cast<long long>(first) * ROUND + window) / 2;
    for (int i = threadIdx.x; i < num / 2; i += kThreads) {
        const int slot = i % ROUND, round = i / 32 * CODES_TOGETHER + i / ROUND % 2;
        const int at = slot_of_class(slot % CLASSES, 2 * round + slot / CLASSES);
        unsigned word = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = at + half * 2 * ROUND;
            const unsigned pad = slot % CLASSES;
            const unsigned code = shared.places[from] != kNoPair ? shared.codes[from] : pad;
            word |= code << 16 * half;
        }
        words[i] = word;
    }
}

// The lists of the 8 rows. `pairs.each(see)` shows each pair to `see(row, other, place)`;
// q: of the first four.
template <class Pairs>
__device__ __forceinline__ void list_rows(const Pairs& pairs, int* num_listed, const Lists& lists,
                                          int num_fours, int q, int q_step, int panel_rows,
                                          const unsigned* kept, const unsigned* grads,
                                          unsigned char* memory, Half* halves, int* first_at) {
    const Shared shared(memory, panel_rows);
    for (int i = threadIdx.x; i < 16 * shared.words; i += kThreads) shared.bits[i] = 0;
    __syncthreads();
    pairs.each([&](int row, int other, unsigned) {
        const Bit bit(row, other);
        atomicOr(&shared.bits[bit.class_idx * shared.words + bit.word], bit.below + 1);
    });
    __syncthreads();
    rank_words(shared, halves);
    __syncthreads();
    if (threadIdx.x < kHalves) lay_half(halves[threadIdx.x]);
    __syncthreads();
    const int room0 = (halves[0].num_rounds + LIST_ALIGNMENT - 1) & ~(LIST_ALIGNMENT - 1);
    const int room1 = (halves[1].num_rounds + LIST_ALIGNMENT - 1) & ~(LIST_ALIGNMENT - 1);
    if (threadIdx.x == 0) {
        const int first = atomicAdd(num_listed, room0 + room1);
        *first_at = first;
        lists.heads[q] = make_int2(first, halves[0].num_rounds);
        if (num_fours > 1) lists.heads[q + q_step] = make_int2(first + room0, halves[1].num_rounds);
    }
    __syncthreads();
    const int first = *first_at, num_slots = (room0 + room1) * ROUND;
    for (int window = 0; window < num_slots; window += kMapSlots) {
        const int num = min(kMapSlots, num_slots - window);
        for (int i = threadIdx.x; i < num; i += kThreads) shared.places[i] = kNoPair;
        __syncthreads();
        pairs.each([&](int row, int other, unsigned place) {
            const int half = row / FOUR;
            const int slot =
                slot_of(shared, halves[half], Bit(row, other)) + half * room0 * ROUND - window;
            if (slot >= 0 && slot < num) {
                shared.places[slot] = place;
                shared.codes[slot] = row % FOUR << COLUMN_BITS | other;
            }
        });
        __syncthreads();
        write_slots(shared, lists, first, window, num, kept, grads);
        __syncthreads();
    }
}

// The pairs of 8 neurons in the tiles of a panel; a warp takes every fourth tile.
struct PairsOfNeurons {
    const int* pair_start;  // of the neurons, in the panel's first tile
    const unsigned* pairs;
    int tile_step;  // of pair_start, from one tile to the next
    int first_tile, num_tiles, tile_tokens;
    unsigned tile_places;

    template <class See>
    __device__ __forceinline__ void each(See see) const {
        const int lane = threadIdx.x % 32;
        for (int tile = threadIdx.x / 32; tile < num_tiles; tile += kWarps) {
            const int* start = pair_start + static_cast<long long>(tile) * tile_step;
            const unsigned base = (first_tile + tile) * tile_places;
            const int end = __ldg(start + 1);
            for (int i = __ldg(start) + lane; i < end; i += 32) {
                const unsigned pair = __ldg(pairs + base + i);
                see(pair >> 16 & (NEURONS - 1), tile * tile_tokens + (pair & 0xffff), base + i);
            }
        }
    }
};

// The pairs of 8 tokens in a panel of plan.cu, of those the neurons of a panel of ours.
struct PairsOfTokens {
    const uint4* records;
    const uint4* links;
    int num_records, first_column, panel_rows;

    template <class See>
    __device__ __forceinline__ void each(See see) const {
        for (int i = threadIdx.x; i < num_records; i += kThreads) {
            const uint4 record = __ldg(records + i), link = __ldg(links + i);
            const unsigned places[4] = {link.x, link.y, link.z, link.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned code = (j < 2 ? record.z : record.w) >> (j % 2 * 16) & 0xffff;
                const unsigned column = (code & COLUMN_MASK) - first_column;
                if (places[j] != NO_LINK && column < static_cast<unsigned>(panel_rows))
                    see(code >> COLUMN_BITS, column, places[j]);
            }
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    list_neurons(const int* pair_start, const unsigned* pairs, const unsigned* kept,
                 const unsigned* grads, int N, int num_tiles, int tile_tokens, int cap,
                 int panel_tiles, int* num_listed, int2* heads, unsigned* codes, uint2* values,
                 uint2* hidden, unsigned* masks) {
    extern __shared__ uint4 memory[];
    __shared__ Half halves[kHalves];
    __shared__ int first_at;
    const int group = blockIdx.x, panel = blockIdx.y, num_panels = gridDim.y;
    const int first_tile = panel * panel_tiles, num_groups = (N + NEURONS - 1) / NEURONS;
    const PairsOfNeurons of_panel{
        pair_start + static_cast<long long>(first_tile) * (num_groups + 1) + group,
        pairs,
        num_groups + 1,
        first_tile,
        min(panel_tiles, num_tiles - first_tile),
        tile_tokens,
        static_cast<unsigned>(tile_tokens) * cap};
    list_rows(of_panel, num_listed, {heads, codes, values, hidden, masks},
              (N + FOUR - 1) / FOUR - group * 2, group * 2 * num_panels + panel, num_panels,
              panel_tiles * tile_tokens, kept, grads, reinterpret_cast<unsigned char*>(memory),
              halves, &first_at);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    list_tokens(const int* num_rounds, const uint4* rounds, const uint4* links,
                const unsigned* kept, const unsigned* grads, int M, int panel_rows, int split,
                int group_rounds, int* num_listed, int2* heads, unsigned* codes, uint2* values,
                unsigned* masks) {
    extern __shared__ uint4 memory[];
    __shared__ Half halves[kHalves];
    __shared__ int first_at;
    const int group = blockIdx.x, panel = blockIdx.y, num_panels = gridDim.y;
    const long long q = static_cast<long long>(group) * (num_panels / split) + panel / split;
    const PairsOfTokens of_group{
        rounds + q * group_rounds * ROUND_RECORDS, links + q * group_rounds * ROUND_RECORDS,
        __ldg(num_rounds + q) * ROUND_RECORDS, panel % split * panel_rows, panel_rows};
    list_rows(of_group, num_listed, {heads, codes, values, nullptr, masks},
              (M + FOUR - 1) / FOUR - group * 2, group * 2 * num_panels + panel, num_panels,
              panel_rows, kept, grads, reinterpret_cast<unsigned char*>(memory), halves, &first_at);
}
