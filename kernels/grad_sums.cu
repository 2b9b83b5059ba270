// grad_sums: the weighted sums of rows of the backward pass, over the lists of `grad_lists`
// (grad_lists.cuh).
//
//   grad_gate_up   dW_gate = grad_gate^T x, dW_up = grad_up^T x           fours of neurons
//   grad_down      dW_down = h^T grad_y, by rows of neurons               fours of neurons
//   grad_x         grad_gate W_gate + grad_up W_up                        fours of tokens
//
// Each is `down` (down.cu) with rows in fours and two values a slot: the other rows lie in shared
// memory, 32 bytes of each, and a round of 16 slots is one mma
//
//     sums [16, 8] += planes [16, 16 slots] V [16 slots, 8]
//
// V has two columns for each row of the four, one for either value. In grad_gate_up the planes are
// 16 columns of x, and all 16 x 8 sums are wanted: two products for the price of one. In grad_x
// plane 0 has 8 columns of W_gate and plane 1 the same 8 of W_up; each lane adds the sum of the
// one over the first values to that of the other over the second. grad_down has one value and
// leaves half of the sums alone: what a round costs is its reads of shared memory, which are 4
// clocks for two planes, 2 for values, 1 for codes. grad_x has four planes, of 16 columns, and
// panels of half as many rows: its values and codes serve two mmas.
//
// A block goes through its fours once for each panel. Between panels their sums go through float32
// [rows, K], each written and read by the same thread, of which each has its own together; those of
// grad_x, of which there are more, through [chunk, K], chunk after chunk, every other one through
// the panels from the last to the first. With heavy_count the first panel adds to what is there if
// *heavy_count > 0: grad_heavy was there before.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the fours); K a multiple of
// 16, panel_rows of 8, chunk of 4; matrices contiguous, at multiples of 16 bytes. Dynamic shared
// memory: panel_rows * 32 (grad_x: 64) + 49152 bytes, 49152 = 16 * 2 * 16 * 96. Without out0 (and
// out1) the last panel leaves its sums in sums0 (and sums1).
#include "grad_lists.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kPlaneRow = 16, kCodeBytes = 32;  // bytes of a row in a plane, of a round's codes
constexpr int kStep = 2 * BATCH, kStages = 2;   // rounds of a step, at most
constexpr unsigned kNothing = ~0u;  // in place of a number of rounds: no four is left
constexpr int kFlip = 4;            // of rows in plane 1

enum class Sums { Both, One, Merged };  // grad_gate_up, grad_down, grad_x

// What of a slot's values a kernel reads.
template <Sums KIND>
struct Values {
    static constexpr int kBytes = KIND == Sums::One ? 32 : 64;  // of a round
    static constexpr int kStageBytes = kStep * (kCodeBytes + kBytes);
};

// Times 16 columns, or 8 in each of two matrices: two planes each.
template <Sums KIND>
constexpr int kSets = KIND == Sums::Merged ? 2 : 1;

struct Lists {
    const int2* heads;
    const uint4* codes;
    const uint4* values;
    const unsigned* masks;
};

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

// A step on its way.
struct Step {
    int left;           // rounds of its four from there on
    unsigned masks[2];  // of its slots, for 8 rounds each
};

// Brings the rounds of a warp's fours onto its stages, step after step. Heads are looked up for 32
// fours at a time, one a lane, and for the 32 behind before they are needed.
template <Sums KIND>
struct Feed {
    Lists lists;               // from the lane's place on
    const int2* heads;         // of four 0 in this panel
    const uint4 *codes, *values;  // of the step to come, the lane's
    const unsigned* masks;
    int num_fours, stride, panels, lane;
    int four;  // of the step to come
    unsigned counts, counts_behind, firsts, firsts_behind;  // the lane's
    int from;                                               // the lane with the four's head
    int left;                                               // rounds of the four that are to come

    __device__ __forceinline__ Feed(const Lists& all, int panel, int num_fours, int first,
                                    int stride, int panels, int lane)
        : lists{all.heads, opaque(all.codes + lane), opaque(all.values + lane),
                opaque(all.masks + (lane >> 3) * 4 + (lane & 3))},
          heads(all.heads + panel), num_fours(num_fours), stride(stride), panels(panels),
          lane(lane), four(first), counts_behind(kNothing), firsts_behind(0), from(0) {
        look_up(first + lane * stride);
        look_up(first + (32 + lane) * stride);
        seek();
    }

    __device__ __forceinline__ void look_up(int four) {
        counts = counts_behind, counts_behind = kNothing;
        firsts = firsts_behind;
        const int2* at = offset_by(heads, four, 8 * panels);
        const unsigned* head = reinterpret_cast<const unsigned*>(at);
        load_if(four < num_fours, head, firsts_behind);
        load_if(four < num_fours, head + 1, counts_behind);
    }

    __device__ __forceinline__ void seek() {
        left = __shfl_sync(~0u, static_cast<int>(counts), from);
        const unsigned first = __shfl_sync(~0u, firsts, from);
        codes = offset_by(lists.codes, first, kCodeBytes);
        values = offset_by(lists.values, first, Values<KIND>::kBytes);
        masks = offset_by(lists.masks, first / BATCH, FOUR_MASKS * 4);
    }

    // Starts to bring a step, to the lane's place on a stage: codes, and behind them values.
    __device__ __forceinline__ Step bring(unsigned stage) {
        const int num = left;
        const unsigned values_at = stage + kStep * kCodeBytes;
        if (lane / 2 < num) copy_async(stage, codes);
        if constexpr (KIND == Sums::One) {
            if (lane / 2 < num) copy_async(values_at, values);
        } else {
            if (lane / 4 < num) copy_async(values_at, values);
            if (lane / 4 + BATCH < num)
                copy_async(values_at + BATCH * Values<KIND>::kBytes, values + 32);
        }
        commit_copies();
        const Step step{num, load_or_leave(num > 0, masks),
                        load_or_leave(num > BATCH, masks + FOUR_MASKS)};
        if (num > kStep) {
            left -= kStep;
            codes += kStep * kCodeBytes / 16, values += kStep * Values<KIND>::kBytes / 16;
            masks += 2 * FOUR_MASKS;
        } else {
            four += stride;
            if (++from == 32) from = 0, look_up(four + (32 + lane) * stride);
            seek();
        }
        return step;
    }
};

// Where a lane reads: the values of the first round to come; the code of the row it addresses.
template <Sums KIND>
struct Place {
    unsigned values, code;

    __device__ __forceinline__ void pass(int num) {
        values += num * Values<KIND>::kBytes, code += num * kCodeBytes;
    }
};

// Where a lane finds a row: of the first plane or of the second, and how far the next set is.
struct Planes {
    unsigned at, flip, set_bytes;
};

// Of a set, two sums that alternate, of two columns each.
template <Sums KIND>
struct Accumulators {
    float of[kSets<KIND>][2][4];
};

// The mmas of COUNT rounds. Of each byte of `mask`, one a slot, bit i says whether the slot of
// round i belongs to the row of the lane's column.
template <int COUNT, Sums KIND>
__device__ __forceinline__ void add_rounds(Accumulators<KIND>& sums, Place<KIND> place,
                                           unsigned mask, const Planes& planes) {
    unsigned codes[COUNT];
    uint2 values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) codes[i] = load_shared_half(place.code + i * kCodeBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        values[i] = load_shared_pair(place.values + i * Values<KIND>::kBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const unsigned row = (codes[i] & COLUMN_MASK) ^ planes.flip;
        const unsigned at = scale_and_add(row, kPlaneRow, planes.at);
        const unsigned signs = mask << (7 - i);
        const unsigned low = values[i].x & permute_bytes(signs, 0, 0x9988);
        const unsigned high = values[i].y & permute_bytes(signs, 0, 0xbbaa);
#pragma unroll
        for (int set = 0; set < kSets<KIND>; ++set) {
            unsigned w[4];
            load_matrices_transposed(w, at + set * planes.set_bytes);
            multiply_add(sums.of[set][i % 2], w[0], w[1], w[2], w[3], low, high);
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
        place.pass(2), mask >>= 2;
    }
    if (num & 1) add_rounds<1, KIND>(sums, place, mask, planes);
}

// Where a four's sums go: float32 [rows, K] between panels, bf16 in the end.
struct Target {
    float* sums[2];
    unsigned short* out[2];
    int num_rows, K, first_column;
    int first_row;  // of what lies in `sums`
    bool add, kept, last;  // add: to rows of sums; kept: to what the panel before left

    __device__ __forceinline__ bool as_bf16() const { return last && out[0]; }

    // Of a lane, the first of its columns.
    __device__ __forceinline__ float* sum_at(int matrix, int row, int quad) const {
        return sums[matrix] + static_cast<long long>(row - first_row) * K + first_column + quad;
    }

    // Between panels a four's sums lie in its own 16 columns of its rows, but as lanes have them:
    // of each lane those of grad_gate_up together, four of 128, else two of 64.
    template <Sums KIND>
    __device__ __forceinline__ float* kept_at(int four_row, int lane) const {
        constexpr int NUM = KIND == Sums::Both ? 4 : 2, CHUNKS = 16 / NUM;
        const int row = four_row - first_row + lane / CHUNKS % FOUR;
        float* matrix = KIND == Sums::Both && lane >= 16 ? sums[1] : sums[0];
        return matrix + static_cast<long long>(row) * K + first_column + lane % CHUNKS * NUM;
    }

    // What was there before of a lane's sums, in their order in `finish`.
    template <Sums KIND>
    __device__ __forceinline__ void load(float (&before)[4], bool wanted, const float* kept_at,
                                         int four_row, int lane) const {
        if (kept) {
            if constexpr (KIND == Sums::Both)
                load_four_if(wanted, kept_at, before);
            else
                load_pair_if(wanted, kept_at, before[0], before[2]);
            return;
        }
        const int quad = lane >> 2, row = four_row + (lane & 3);
        wanted = wanted && add && row < num_rows;
        const float* at = sum_at(0, row, quad);
        before[0] = load_or_zero(wanted, at);
        before[2] = load_or_zero(wanted, at + 8);
        if (KIND == Sums::Both) {
            at = sum_at(1, row, quad);
            before[1] = load_or_zero(wanted, at);
            before[3] = load_or_zero(wanted, at + 8);
        }
    }

    template <Sums KIND>
    __device__ __forceinline__ void store(const float (&out)[4], float* kept_at, int four_row,
                                          int lane) const {
        __syncwarp();  // what other lanes have loaded is written over
        if (!last) {
            if constexpr (KIND == Sums::Both)
                *reinterpret_cast<float4*>(kept_at) = make_float4(out[0], out[1], out[2], out[3]);
            else
                *reinterpret_cast<float2*>(kept_at) = make_float2(out[0], out[2]);
            return;
        }
        const int quad = lane >> 2, row = four_row + (lane & 3);
        if (row >= num_rows) return;
        float* at = sum_at(0, row, quad);
        at[0] = out[0], at[8] = out[2];
        if (KIND == Sums::Both) {
            at = sum_at(1, row, quad);
            at[0] = out[1], at[8] = out[3];
        }
    }
};

// A lane has out[0], out[1] of column quad, first and second value of row t, and out[2], out[3] of
// column quad + 8; of grad_x out[0] and out[2].
template <Sums KIND>
__device__ __forceinline__ void finish(const Target& target, int first_row, float (&out)[4],
                                       float* kept_at, int quad, int t) {
    if (!target.as_bf16()) {
        target.store<KIND>(out, kept_at, first_row, quad * 4 + t);
        return;
    }
    // after the transposition: the row and its columns 2t, 2t + 1
    const int turned = first_row + quad / 2;
    const long long line = static_cast<long long>(turned) * target.K + target.first_column;
    if constexpr (KIND == Sums::Merged) {
        const unsigned pair = transpose_matrix(bf16_pair(out[0], out[2]));
        if (turned < target.num_rows)
            *reinterpret_cast<unsigned*>(target.out[0] + line + quad % 2 * 8 + 2 * t) = pair;
    } else {
        const unsigned low = transpose_matrix(bf16_pair(out[0], out[1]));
        const unsigned high = transpose_matrix(bf16_pair(out[2], out[3]));
        // columns 2t and 2t + 1, and 8 more: of a pair of lanes one stores the lower four
        const bool odd = t & 1;
        const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        unsigned short* to = KIND == Sums::Both && quad % 2 ? target.out[1] : target.out[0];
        if (turned < target.num_rows && (KIND == Sums::Both || quad % 2 == 0))
            store_pair(to + line + (odd ? 8 + 2 * (t - 1) : 2 * t), odd ? other : low,
                       odd ? high : other);
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

    // the first step is on its way while the planes come
    const unsigned stages =
        smem_address(planes + 2 * SETS * panel_rows) + warp * kStages * kStageBytes;
    const int first_four = target.first_row / FOUR + blockIdx.y * kWarps + warp;
    Feed<KIND> feed(lists, panel, end_four, first_four, stride, num_panels, lane);
    Step behind = feed.bring(stages + lane * 16);
    if (load) {
        const int first_other = panel * panel_rows;
        const long long skipped =
            static_cast<long long>(first_other) * target.K + target.first_column;
        load_planes<SETS>(planes, rows0 + skipped, rows1 + skipped, target.K,
                          num_others - first_other, panel_rows);
    }
    wait_for_copies<0>();
    __syncthreads();

    // lane i addresses row i & 7 of matrix i >> 3: slots 0-7 of both planes, then slots 8-15
    const int slot = (lane & 7) + (lane >> 4) * 8;
    const unsigned code_at = (slot & 7) / 2 * 8 + 2 * ((slot >> 3) * 2 + (slot & 1));
    // (through a shuffle, or the compiler would make them anew for every step)
    const int side = lane >> 3 & 1;
    const Planes lane_planes{__shfl_sync(~0u, smem_address(planes + side * panel_rows), lane),
                             __shfl_sync(~0u, static_cast<unsigned>(side * kFlip), lane),
                             static_cast<unsigned>(2 * panel_rows * kPlaneRow)};
    const unsigned value_at =
        kStep * kCodeBytes + t * 8 + (KIND == Sums::One ? 0 : quad % 2 * 32);
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
        add_step<KIND>(sums, {values_at + at, codes_at + at}, min(step.left, kStep), step.masks,
                       lane_planes);
        at = kStageBytes - at;
        if (step.left > kStep) continue;

#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                auto& both = sums.of[set];
                // of grad_x the first value's of plane 0, the second's of plane 1
                if (KIND != Sums::Merged)
                    out[i] += both[0][i] + both[1][i];
                else if (i == 0 || i == 3)
                    out[2 * set] += both[0][i] + both[1][i];
                both[0][i] = both[1][i] = 0;
            }
        finish<KIND>(target, first_row, out, kept_at, quad, t);
        first_row += stride * FOUR;
        kept_at += kept_step;
    }
}

// All panels, chunk by chunk.
template <Sums KIND>
__device__ __forceinline__ void sum_panels(uint4* planes, const unsigned short* rows0,
                                           const unsigned short* rows1, const Lists& lists,
                                           Target target, int chunk, int num_others,
                                           int panel_rows, int num_panels) {
    constexpr unsigned kStageBytes = kWarps * kStages * Values<KIND>::kStageBytes;
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
    grad_gate_up(const unsigned short* x, const int2* heads, const uint4* codes,
                 const uint4* pairs, const unsigned* masks, int M, int N, int K, int panel_rows,
                 int num_panels, const int* heavy_count, float* sums_gate, float* sums_up,
                 unsigned short* out_gate, unsigned short* out_up) {
    extern __shared__ uint4 planes[];
    const Target target{{sums_gate, sums_up},
                        {out_gate, out_up},
                        N, K, static_cast<int>(blockIdx.x) * 16, 0, any_heavy(heavy_count), false,
                        false};
    sum_panels<Sums::Both>(planes, x, x + 8, {heads, codes, pairs, masks}, target, N, M,
                           panel_rows, num_panels);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_down(const unsigned short* grad_y, const int2* heads, const uint4* codes,
              const uint4* hidden, const unsigned* masks, int M, int N, int K,
              int panel_rows, int num_panels, const int* heavy_count, float* sums,
              unsigned short* out) {
    extern __shared__ uint4 planes[];
    const Target target{{sums, nullptr},
                        {out, nullptr},
                        N, K, static_cast<int>(blockIdx.x) * 16, 0, any_heavy(heavy_count), false,
                        false};
    sum_panels<Sums::One>(planes, grad_y, grad_y + 8, {heads, codes, hidden, masks}, target, N, M,
                          panel_rows, num_panels);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grad_x(const unsigned short* w_gate, const unsigned short* w_up, const int2* heads,
           const uint4* codes, const uint4* pairs, const unsigned* masks, int M, int N, int K,
           int panel_rows, int num_panels, int chunk, float* sums, unsigned short* out) {
    extern __shared__ uint4 planes[];
    const Target target{{sums, nullptr},
                        {out, nullptr},
                        M, K, static_cast<int>(blockIdx.x) * 16, 0, false, false, false};
    sum_panels<Sums::Merged>(planes, w_gate, w_up, {heads, codes, pairs, masks}, target, chunk,
                             N, panel_rows, num_panels);
}
