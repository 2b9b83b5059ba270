// grad_sums: the weighted sums of rows of the backward pass, over the lists of `grad_lists`
// (grad_lists.cuh).
//
//   grad_gate_up   dW_gate = grad_gate^T x, dW_up = grad_up^T x           fours of neurons
//   grad_down      dW_down = h^T grad_y, by rows of neurons               fours of neurons
//   grad_x         grad_gate W_gate + grad_up W_up                        fours of tokens
//
// Each is `down` (ffn/down.cu) with rows in fours and two values a slot: the other rows lie in
// shared memory, 32 bytes of each, in planes of 8 columns, and a round of 16 slots is an mma a
// plane (tile/octets.cuh)
//
//     sums [8, 8 columns] += V [8, 16 slots] plane [16 slots, 8 columns]
//
// V has two rows for each row of the four. In grad_gate_up they are for either value, the planes
// are 16 columns of x, and all 8 x 16 sums are wanted: two products for the price of one. So it is
// in grad_x, but of its four planes, 16 columns in panels of half as many rows, two are of W_gate
// and two of W_up, and of the sums half are wanted: those of W_gate over the first values, of W_up
// over the second. In grad_down, with one value a slot, the two rows take turns: one has the values
// of rounds 0, 2 .., the other those of 1, 3 .., and the lanes that have them add up in the end.
// What a round costs is its reads of shared memory: 4 clocks for two planes, 2 for values (in
// grad_down 1), a quarter for codes, of which a lane reads those for four rounds at once.
//
// A block goes through its fours once for each panel. Between panels their sums go through float32
// [rows, K], each written and read by the same thread, of which each has its own together; those of
// grad_x, of which there are more, through [chunk, K], chunk after chunk, every other one through
// the panels from the last to the first. With heavy_count the first panel adds to what is there if
// *heavy_count > 0: sums over the heavy rows are there before.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the fours); K a multiple of
// 16, panel_rows of 8, chunk of 4; matrices contiguous, at multiples of 16 bytes. Dynamic shared
// memory: panel_rows * 32 (grad_x: 64) + 49152 bytes, 49152 = 16 * 2 * 16 * 96. Without out0 (and
// out1) the last panel leaves its sums in sums0 (and sums1).
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/lists.cuh"
#include "tile/octets.cuh"
#include "tile/round_masks.cuh"
#include "train/grad_lists.cuh"
#include "train/grad_sums_feed.cuh"

namespace {

constexpr int kThreads = spec::GRAD_SUMS_BLOCK, kWarps = kThreads / 32;

// Rounds between those of which a lane has values.
template <Sums KIND>
constexpr int kTurns = KIND == Sums::One ? 2 : 1;

// Of two planes each.
template <Sums KIND>
constexpr int kSets = KIND == Sums::Merged ? 2 : 1;

// What is summed up: 8 columns in each plane; those of the second set follow the first's.
template <int SETS>
__device__ __forceinline__ void load_planes(uint4* planes, const unsigned short* plane0,
                                            const unsigned short* plane1, int K, int num_rows,
                                            int panel_rows) {
    constexpr int STEP = kThreads / (2 * SETS);
    const int plane = threadIdx.x % (2 * SETS), side = plane % 2;
    int row = threadIdx.x / (2 * SETS);
    const unsigned short* from =
        (side ? plane1 : plane0) + plane / 2 * 8 + static_cast<long long>(row) * K;
    uint4* to = planes + plane * panel_rows + (row ^ side * kFlip);
#pragma unroll 4
    for (; row < panel_rows; row += STEP) {
        if (row < num_rows)
            copy_async(smem_address(to), from);
        else
            *to = make_uint4(0, 0, 0, 0);
        from += STEP * K, to += STEP;
    }
    commit_copies();
}

// Where a lane reads: the values of the first round to come, or of the first of its turn; the codes
// of the rows it addresses.
template <Sums KIND>
struct Place {
    unsigned values, code;

    __device__ __forceinline__ void pass(int num) {
        values += num * Values<KIND>::kBytes, code += num * kCodeBytes;
    }
};

// Where the planes of the first set lie, and how far those of the next are.
struct Planes {
    unsigned at[2], set_bytes;
};

// Of a lane: sums[0] and sums[1] of row g of V, each plane (tile/octets.cuh).
template <Sums KIND>
struct Accumulators {
    float of[kSets<KIND>][2][4];
};

// The mmas of COUNT rounds. Of each byte of `mask`, one a slot, bit i says whether the slot of
// round i belongs to the lane's row of V. `behind`: the codes are those of the upper half.
template <int COUNT, Sums KIND>
__device__ __forceinline__ void add_rounds(Accumulators<KIND>& sums, Place<KIND> place,
                                           unsigned mask, const Planes& planes,
                                           bool behind = false) {
    constexpr int TWOS = (COUNT + 1) / 2, TURNS = kTurns<KIND>;
    constexpr int VALUES = (COUNT + TURNS - 1) / TURNS;
    unsigned codes[(TWOS + 1) / 2];
    uint2 values[VALUES];
#pragma unroll
    for (int i = 0; i < TWOS;
         i += 2)  // a lane's slot in two rounds, those behind in the upper half
        codes[i / 2] = load_shared_word(place.code + 2 * i * kCodeBytes);
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        values[i] = load_shared_pair(place.values + TURNS * i * Values<KIND>::kBytes);
#pragma unroll
    for (int i = 0; i < TWOS; ++i) {
        const unsigned code = i % 2 || behind ? codes[i / 2] >> 16 : codes[i / 2];
        const unsigned row = code & COLUMN_MASK;
        unsigned w[kSets<KIND>][2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned at = scale_and_add(row ^ j * kFlip, kPlaneRow, planes.at[j]);
#pragma unroll
            for (int set = 0; set < kSets<KIND>; ++set)
                load_octets<(COUNT > 1)>(w[set][j], at + set * planes.set_bytes);
        }
#pragma unroll
        for (int round = 2 * i; round < 2 * i + 2 && round < COUNT; ++round) {
            unsigned low, high;
            keep_own(values[round / TURNS], mask, round, low, high);
#pragma unroll
            for (int set = 0; set < kSets<KIND>; ++set)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    add_octets(sums.of[set][j], low, high, w[set][j][round % 2 * 2],
                               w[set][j][round % 2 * 2 + 1]);
        }
    }
}

// The `num` rounds of a step.
template <Sums KIND>
__device__ __forceinline__ void add_step(Accumulators<KIND>& sums, Place<KIND> place, int num,
                                         const unsigned (&masks)[2], const Planes& planes) {
    unsigned mask = masks[0];
#pragma unroll 1
    for (; num >= BATCH; num -= BATCH) {
        add_rounds<BATCH, KIND>(sums, place, mask, planes);
        place.pass(BATCH), mask = masks[1];
    }
    if (num & 4) {
        add_rounds<4, KIND>(sums, place, mask, planes);
        place.pass(4), mask >>= 4;
    }
    if (num & 2) {
        add_rounds<2, KIND>(sums, place, mask, planes);
        place.values += 2 * Values<KIND>::kBytes, mask >>= 2;
    }
    if (num & 1) add_rounds<1, KIND>(sums, place, mask, planes, num & 2);
}

// Which row of the four, and which of its two in V, a lane has.
__device__ __forceinline__ int row_of(int lane) { return lane / 8; }
__device__ __forceinline__ int is_second(int lane) { return lane / 4 % 2; }

// Where a four's sums go: float32 [rows, K] between panels, bf16 in the end.
struct Target {
    float* sums[2];
    unsigned short* out[2];
    int num_rows, K, first_column;
    int first_row;         // of what lies in `sums`
    bool add, kept, last;  // add: to rows of sums; kept: to what the panel before left

    __device__ __forceinline__ bool as_bf16() const { return last && out[0]; }

    // Of a lane's sums between panels: those of grad_gate_up together, four of 64 in a row.
    template <Sums KIND>
    __device__ __forceinline__ float* kept_at(int four_row, int lane) const {
        const int row = four_row - first_row + row_of(lane), second = is_second(lane), t = lane & 3;
        float* matrix = KIND == Sums::Both && second ? sums[1] : sums[0];
        return matrix + static_cast<long long>(row) * K + first_column +
               (KIND == Sums::Both ? 4 * t : 8 * second + 2 * t);
    }

    // Of a lane's first column.
    template <Sums KIND>
    __device__ __forceinline__ float* sum_at(int four_row, int lane) const {
        return kept_at<KIND>(four_row, lane) - (KIND == Sums::Both ? 2 * (lane & 3) : 0);
    }

    // What was there before of a lane's sums, in their order in `finish`.
    template <Sums KIND>
    __device__ __forceinline__ void load(float (&before)[4], bool wanted, const float* kept_at,
                                         int four_row, int lane) const {
        if (kept) {
            if constexpr (KIND == Sums::Both)
                load_floats_if(wanted, kept_at, before);
            else
                load_floats_if(wanted, kept_at, before[0], before[1]);
            return;
        }
        wanted = wanted && add && four_row + row_of(lane) < num_rows;
        const float* at = sum_at<KIND>(four_row, lane);
        load_floats_if(wanted, at, before[0], before[1]);
        if (KIND == Sums::Both) load_floats_if(wanted, at + 8, before[2], before[3]);
    }

    template <Sums KIND>
    __device__ __forceinline__ void store(const float (&out)[4], float* kept_at, int four_row,
                                          int lane) const {
        __syncwarp();  // what other lanes have loaded is written over
        if (!last) {
            if constexpr (KIND == Sums::Both)
                *reinterpret_cast<float4*>(kept_at) = make_float4(out[0], out[1], out[2], out[3]);
            else
                *reinterpret_cast<float2*>(kept_at) = make_float2(out[0], out[1]);
            return;
        }
        if (four_row + row_of(lane) >= num_rows) return;
        float2* at = reinterpret_cast<float2*>(sum_at<KIND>(four_row, lane));
        at[0] = make_float2(out[0], out[1]);
        if (KIND == Sums::Both) at[4] = make_float2(out[2], out[3]);
    }
};

// What a lane has in the end, of row_of(lane): in grad_gate_up of one value or the other, out[0]
// and out[1] of columns 2t, 2t + 1, the others of the two 8 behind. Else out[0] and out[1] alone,
// of the first 8 columns or the second.
template <Sums KIND>
__device__ __forceinline__ void add_up(const Accumulators<KIND>& sums, float (&out)[4], int lane) {
    if constexpr (KIND == Sums::Both) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] += sums.of[0][i / 2][i % 2];
    } else {
        // of grad_down a lane has its turns' sums of two planes, of grad_x in two sets those of the
        // plane that its value belongs to: it keeps 8 columns of 16, and gives the others away
        constexpr int SETS = kSets<KIND>;
        const bool second = is_second(lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float low = sums.of[0][0][i], high = sums.of[0][1][i];
            if constexpr (KIND == Sums::Merged) {
                low = second ? high : low;
                high = second ? sums.of[SETS - 1][1][i] : sums.of[SETS - 1][0][i];
            }
            const float given = __shfl_xor_sync(~0u, second ? low : high, 4);
            out[i] += (second ? high : low) + given;
        }
    }
}

template <Sums KIND>
__device__ __forceinline__ void finish(const Target& target, int first_row, float (&out)[4],
                                       float* kept_at, int lane) {
    if (!target.as_bf16()) {
        target.store<KIND>(out, kept_at, first_row, lane);
        return;
    }
    const int row = first_row + row_of(lane), second = is_second(lane), t = lane & 3;
    const long long line = static_cast<long long>(row) * target.K + target.first_column;
    const unsigned low = bf16_pair(out[0], out[1]);
    if constexpr (KIND == Sums::Both) {
        // columns 2t and 2t + 1, and 8 more: of a pair of lanes one stores the lower four
        const unsigned high = bf16_pair(out[2], out[3]);
        const bool odd = t & 1;
        const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        unsigned short* to = second ? target.out[1] : target.out[0];
        if (row < target.num_rows)
            store_pair(to + line + (odd ? 8 + 2 * (t - 1) : 2 * t), odd ? other : low,
                       odd ? high : other);
    } else if (row < target.num_rows) {
        *reinterpret_cast<unsigned*>(target.out[0] + line + 8 * second + 2 * t) = low;
    }
}

// The pass of the fours up to `end_row` over one panel; what is summed up has `num_others` rows in
// all. `load`: the panel is not in shared memory yet.
template <Sums KIND>
__device__ __forceinline__ void sum_panel(uint4* planes, const unsigned short* rows0,
                                          const unsigned short* rows1, const Lists& lists,
                                          const Target& target, int end_row, int num_others,
                                          int panel, int panel_rows, int num_panels, bool load) {
    constexpr int SETS = kSets<KIND>;
    constexpr int kStageBytes = Values<KIND>::kStageBytes;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int quad = lane >> 2, t = lane & 3;
    const int end_four = (end_row + FOUR - 1) / FOUR, stride = gridDim.y * kWarps;

    const unsigned stages =
        smem_address(planes + 2 * SETS * panel_rows) + warp * kStages * kStageBytes;
    const int first_four = target.first_row / FOUR + blockIdx.y * kWarps + warp;
    if (load) {
        const int first_other = panel * panel_rows;
        const long long skipped =
            static_cast<long long>(first_other) * target.K + target.first_column;
        load_planes<SETS>(planes, rows0 + skipped, rows1 + skipped, target.K,
                          num_others - first_other, panel_rows);
    }
    // the first step is on its way while the planes come
    Feed<KIND> feed(lists, panel, end_four, first_four, stride, num_panels, lane);
    Step behind = feed.bring(stages + lane * 16);
    wait_for_copies<0>();
    __syncthreads();

    const Planes both_planes{
        {opaque(smem_address(planes)), opaque(smem_address(planes + panel_rows))},
        static_cast<unsigned>(2 * panel_rows * kPlaneRow)};
    const unsigned code_at = 4 * lane, value_at = kStep * kCodeBytes + quad % 2 * 32 + t * 8;
    // where lanes take turns, of every other round
    const unsigned own_rounds = kTurns<KIND> == 1 ? ~0u : quad % 2 ? 0xaaaaaaaa : 0x55555555;
    const unsigned values_at = stages + value_at, codes_at = stages + code_at;
    const unsigned copies_at = stages + kStageBytes + lane * 16;

    int first_row = first_four * FOUR;
    float* kept_at = opaque(target.kept_at<KIND>(first_row, lane));
    const long long kept_step = static_cast<long long>(stride) * FOUR * target.K;
    Accumulators<KIND> sums = {};
    unsigned at = 0;  // of the stage, in bytes
    while (behind.left != static_cast<int>(kNothing)) {
        wait_for_copies<0>();
        __syncwarp();
        // the other stage is free: it takes the next step
        const Step step = behind;
        behind = feed.bring(copies_at - at);
        float out[4] = {};
        target.load<KIND>(out, step.left <= kStep, kept_at, first_row, lane);
        const unsigned masks[2] = {step.masks[0] & own_rounds, step.masks[1] & own_rounds};
        add_step<KIND>(sums, {values_at + at, codes_at + at}, min(step.left, kStep), masks,
                       both_planes);
        at = kStageBytes - at;
        if (step.left > kStep) continue;

        add_up<KIND>(sums, out, lane);
        sums = {};
        finish<KIND>(target, first_row, out, kept_at, lane);
        first_row += stride * FOUR;
        kept_at += kept_step;
    }
}

// All panels, chunk by chunk.
template <Sums KIND>
__device__ __forceinline__ void sum_panels(uint4* planes, const unsigned short* rows0,
                                           const unsigned short* rows1, const Lists& lists,
                                           Target target, int chunk, int num_others, int panel_rows,
                                           int num_panels) {
    constexpr unsigned kStageBytes = kWarps * kStages * Values<KIND>::kStageBytes;
    static_assert(kStageBytes <= spec::GRAD_STAGES);
    if (dynamic_smem_bytes() < panel_rows * 32u * kSets<KIND> + kStageBytes) __trap();
    int loaded = -1;
#pragma unroll 1
    for (int first = 0; first < target.num_rows; first += chunk) {
        const bool back = first / chunk & 1;
        target.first_row = first;
#pragma unroll 1
        for (int i = 0; i < num_panels; ++i) {
            const int panel = back ? num_panels - 1 - i : i;
            target.kept = i > 0, target.last = i == num_panels - 1;
            sum_panel<KIND>(planes, rows0, rows1, lists, target,
                            min(first + chunk, target.num_rows), num_others, panel, panel_rows,
                            num_panels, panel != loaded);
            loaded = panel;
            __syncthreads();  // no warp reads the planes any more
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_gate_up(const unsigned short* x, const int2* heads, const uint4* codes, const uint4* pairs,
                 const unsigned* masks, int M, int N, int K, int panel_rows, int num_panels,
                 const int* heavy_count, float* sums_gate, float* sums_up, unsigned short* out_gate,
                 unsigned short* out_up) {
    extern __shared__ uint4 planes[];
    const Target target{{sums_gate, sums_up},
                        {out_gate, out_up},
                        N,
                        K,
                        static_cast<int>(blockIdx.x) * 16,
                        0,
                        any_heavy(heavy_count),
                        false,
                        false};
    sum_panels<Sums::Both>(planes, x, x + 8, {heads, codes, pairs, masks}, target, N, M, panel_rows,
                           num_panels);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_down(const unsigned short* grad_y, const int2* heads, const uint4* codes,
              const uint4* hidden, const unsigned* masks, int M, int N, int K, int panel_rows,
              int num_panels, const int* heavy_count, float* sums, unsigned short* out) {
    extern __shared__ uint4 planes[];
    const Target target{
        {sums, nullptr},        {out, nullptr}, N,    K, static_cast<int>(blockIdx.x) * 16, 0,
        any_heavy(heavy_count), false,          false};
    sum_panels<Sums::One>(planes, grad_y, grad_y + 8, {heads, codes, hidden, masks}, target, N, M,
                          panel_rows, num_panels);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_x(const unsigned short* w_gate, const unsigned short* w_up, const int2* heads,
           const uint4* codes, const uint4* pairs, const unsigned* masks, int M, int N, int K,
           int panel_rows, int num_panels, int chunk, float* sums, unsigned short* out) {
    extern __shared__ uint4 planes[];
    const Target target{
        {sums, nullptr}, {out, nullptr}, M,    K, static_cast<int>(blockIdx.x) * 16, 0,
        false,           false,          false};
    sum_panels<Sums::Merged>(planes, w_gate, w_up, {heads, codes, pairs, masks}, target, chunk, N,
                             panel_rows, num_panels);
}
