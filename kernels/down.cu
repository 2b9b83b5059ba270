// down: y = h W_down^T + b_down, of the pairs in the rounds that `plan` laid out and `hidden`
// filled.
//
// The weights stay and the tokens pass by. A block has 16 columns of y and keeps their weights for
// a whole panel of neurons in shared memory; each of its warps takes groups of 8 tokens. A round is
// 16 slots, pairs (token in group, neuron) with their h, and one mma:
//
//     y^T [16 columns, 8 tokens] += W^T [16 columns, 16 slots] H [16 slots, 8 tokens]
//
// W^T are the rows of the slots' neurons, gathered by one ldmatrix: 32 bytes a slot. H has one
// value a row, at its slot's token: each lane takes the values of its four slots and masks away
// those of other tokens. Shared memory fills one register of a warp a clock, and that is what time
// goes by: 4 clocks a round for the weights, 2 for values, 1 for codes. What a slot costs does not
// depend on density, nor on how often a neuron fires.
//
// Shared memory: two planes of [panel_rows] rows of 16 bytes, 8 columns of y each. Rows whose low
// three bits differ lie in different banks: the classes of plan.cu. Row m of a plane's 8 columns is
// column 4 (m / 2) + m % 2 of the 16, two more in plane 1, so that after a transposition a lane has
// four neighbouring columns of a token, 8 bytes. Behind the planes lie two stages a warp, of 16
// rounds each: a warp goes step by step, a step being up to 16 rounds of a group, and while it
// computes one, cp.async brings the next. The masks (round_masks.cuh) of a step go to registers.
//
// With several panels the launches follow one another: sums go through y32, whose order of columns
// within 16 is its own: 2 m and 2 m + 1 are row m of the two planes.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the groups), once for each
// panel. Dynamic shared memory: panel_rows * 32 + 32768 bytes, 32768 = 16 * 2 * 16 * 64.
// y32 float32 [M, K] if num_panels > 1.
#include "twell_lists.cuh"
#include "round_masks.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kColumns = 16;     // of y
constexpr int kPlaneRow = 16;    // bytes
constexpr int kRoundBytes = 2 * ROUND_HALVES;
constexpr int kStep = 2 * BATCH;  // rounds of a step, at most
constexpr int kStageBytes = kStep * kRoundBytes;
constexpr int kStages = 2;
constexpr unsigned kNothing = ~0u;  // in place of a count of rounds: no group is left
constexpr int kLoadParts = 4;  // of the weights: the first are turned over while others come

// Which column of the 16 lies in a row of a plane.
__device__ __forceinline__ int column_of(int plane, int m) {
    return 4 * (m >> 1) + (m & 1) + 2 * plane;
}

// Turns over the warp's matrices first, first + 64 .. of both planes, four at a time.
__device__ __forceinline__ void transpose_planes(uint4* planes, int panel_rows, int first, int end,
                                                 int lane) {
    __syncwarp();
#pragma unroll 1
    for (int at = first; at < end; at += 64)
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            uint4* four = planes + plane * panel_rows + at * 8;
            unsigned* words = reinterpret_cast<unsigned*>(four) + lane;
            unsigned v[4];
            transpose_matrices(v, smem_address(four + (at + lane / 8 < end ? lane : lane % 8)));
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (at + j < end) words[32 * j] = v[j];
        }
}

// The panel's weights for 16 columns of y, transposed. A warp copies 8 x 8 matrices, rows of 8
// neurons, to where they belong, and turns them over in place; all copies are under way at once.
__device__ __forceinline__ void load_planes(uint4* planes, const unsigned short* w_down, int N,
                                            int first_neuron, int panel_rows) {
    const int lane = threadIdx.x % 32, m = lane % 8, num = panel_rows / 8;
    const int first = threadIdx.x / 32 * 4;
    const int part = ((num + 63) / 64 + kLoadParts - 1) / kLoadParts * 64;
    int at = first + lane / 8;  // the lane's one of the warp's four matrices
    const unsigned short* from0 =
        w_down + static_cast<long long>(column_of(0, m)) * N + first_neuron + at * 8;
    const unsigned short* from1 = from0 + static_cast<long long>(column_of(1, 0)) * N;
    uint4* to = planes + at * 8 + m;
#pragma unroll 1
    for (int i = 1; i <= kLoadParts; ++i) {
#pragma unroll 2
        for (; at < min(i * part, num); at += 64) {
            if (first_neuron + at * 8 < N) {
                copy_async(smem_address(to), from0);
                copy_async(smem_address(to + panel_rows), from1);
            } else {
                to[0] = to[panel_rows] = make_uint4(0, 0, 0, 0);
            }
            from0 += 512, from1 += 512, to += 512;
        }
        commit_copies();
    }
    wait_for_copies<3>();
    transpose_planes(planes, panel_rows, first, min(part, num), lane);
    wait_for_copies<2>();
    transpose_planes(planes, panel_rows, first + part, min(2 * part, num), lane);
    wait_for_copies<1>();
    transpose_planes(planes, panel_rows, first + 2 * part, min(3 * part, num), lane);
    wait_for_copies<0>();
    transpose_planes(planes, panel_rows, first + 3 * part, num, lane);
}

// The same of weights whose rows of 8 neurons are not at multiples of 16 bytes.
__device__ __noinline__ void load_odd_planes(uint4* planes, const unsigned short* w_down, int N,
                                             int first_neuron, int panel_rows) {
    unsigned short* to = reinterpret_cast<unsigned short*>(planes);
    for (int i = 0; i < kColumns; ++i) {
        const long long row = static_cast<long long>(column_of(i / 8, i % 8)) * N + first_neuron;
        for (int n = threadIdx.x; n < panel_rows; n += kThreads)
            to[(i / 8 * panel_rows + n) * 8 + i % 8] =
                first_neuron + n < N ? __ldg(w_down + row + n) : 0;
    }
}

// The masks of a step's two batches.
struct Masks {
    unsigned first, second;
};

// Brings the rounds of a warp's groups onto its stages, step after step. Counts of rounds are
// looked up for 32 groups at a time, one a lane, and for the 32 behind before they are needed.
struct Feed {
    const int* num_rounds;     // of group 0 in this panel
    const uint4* all_records;  // of group 0 in this panel, from the lane's on
    const unsigned* all_masks;
    const uint4* records;    // of the step to come, from the lane's on
    const unsigned* masks;
    unsigned group_bytes, mask_bytes;  // from one group to the next
    int num_groups, stride, panels, lane;
    int group;                        // of the step to come
    unsigned counts, counts_behind;   // the lane's
    int from;                         // the lane with the count of the group
    int left;                         // rounds of the group that are to come

    __device__ __forceinline__ Feed(const int* num_rounds, const uint4* rounds,
                                    const unsigned* masks, int num_groups, int first, int stride,
                                    int panels, int group_rounds, int lane)
        : num_rounds(num_rounds), all_records(opaque(rounds + lane)),
          all_masks(opaque(masks + lane)),
          group_bytes(panels * group_rounds * kRoundBytes),
          mask_bytes(panels * batches_of(group_rounds) * BATCH_MASKS * 4), num_groups(num_groups),
          stride(stride), panels(panels), lane(lane), group(first), counts_behind(kNothing),
          from(0) {
        look_up(first + lane * stride);
        look_up(first + (32 + lane) * stride);
        seek();
    }

    __device__ __forceinline__ void look_up(int group) {
        counts = counts_behind, counts_behind = kNothing;
        const unsigned* from =
            reinterpret_cast<const unsigned*>(offset_by(num_rounds, group, 4 * panels));
        load_if(group < num_groups, from, counts_behind);
    }

    __device__ __forceinline__ void seek() {
        left = __shfl_sync(~0u, static_cast<int>(counts), from);
        records = offset_by(all_records, group, group_bytes);
        masks = offset_by(all_masks, group, mask_bytes);
    }

    // Starts to bring a step, to the lane's place on a stage. Returns how many rounds its group has
    // from there on.
    __device__ __forceinline__ int bring(unsigned stage, Masks& step_masks) {
        const int num = left;
        if (lane / ROUND_RECORDS < num) copy_async(stage, records);
        if (lane / ROUND_RECORDS + BATCH < num)
            copy_async(stage + BATCH * kRoundBytes, records + BATCH * ROUND_RECORDS);
        commit_copies();
        step_masks.first = load_or_leave(num > 0, masks);
        step_masks.second = load_or_leave(num > BATCH, masks + BATCH_MASKS);
        if (num > kStep) {
            left -= kStep;
            records += kStep * ROUND_RECORDS, masks += 2 * BATCH_MASKS;
        } else {
            group += stride;
            if (++from == 32) from = 0, look_up(group + (32 + lane) * stride);
            seek();
        }
        return num;
    }
};

// Where a lane reads: the record of the first round to come; the code of the row it addresses.
struct Place {
    unsigned values, code;

    __device__ __forceinline__ void pass(int num) {
        values += num * kRoundBytes, code += num * kRoundBytes;
    }
};

// The mmas of COUNT rounds. Of each byte of `mask`, one a slot, bit i says whether the slot of
// round i belongs to the quad's token.
template <int COUNT>
__device__ __forceinline__ void add_rounds(float (&sums)[2][4], Place place, unsigned mask,
                                           unsigned plane) {
    unsigned codes[COUNT];
    uint2 values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) codes[i] = load_shared_half(place.code + i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = load_shared_pair(place.values + i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        unsigned w[4];
        load_matrices_transposed(w, scale_and_add(codes[i] & COLUMN_MASK, kPlaneRow, plane));
        const unsigned signs = mask << (7 - i);
        const unsigned low = values[i].x & permute_bytes(signs, 0, 0x9988);
        const unsigned high = values[i].y & permute_bytes(signs, 0, 0xbbaa);
        multiply_add(sums[i % 2], w[0], w[1], w[2], w[3], low, high);
    }
}

// The `num` rounds of a step.
__device__ __forceinline__ void add_step(float (&sums)[2][4], Place place, int num, Masks masks,
                                         unsigned plane) {
    unsigned mask = masks.first;
#pragma unroll 1
    for (; num >= BATCH; num -= BATCH) {
        add_rounds<BATCH>(sums, place, mask, plane);
        place.pass(BATCH), mask = masks.second;
    }
    if (num & 4) {
        add_rounds<4>(sums, place, mask, plane);
        place.pass(4), mask >>= 4;
    }
    if (num & 2) {
        add_rounds<2>(sums, place, mask, plane);
        place.pass(2), mask >>= 2;
    }
    if (num & 1) add_rounds<1>(sums, place, mask, plane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    down(const unsigned short* w_down, const unsigned short* b_down, const int* num_rounds,
         const uint4* rounds, const unsigned* masks, int M, int N, int K, int panel, int panel_rows,
         int num_panels, int group_rounds, float* y32, unsigned short* y) {
    extern __shared__ uint4 planes[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int quad = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * kColumns, num_groups = (M + GROUP - 1) / GROUP;
    const int stride = gridDim.y * kWarps;
    if (dynamic_smem_bytes() < panel_rows * 32u + kWarps * kStages * kStageBytes) __trap();

    // the first rounds are on their way while the weights come
    const unsigned stages =
        smem_address(planes + 2 * panel_rows) + warp * kStages * kStageBytes;
    const int first_group = blockIdx.y * kWarps + warp;
    Feed feed(
        num_rounds + panel, rounds + static_cast<long long>(panel) * group_rounds * ROUND_RECORDS,
        masks + static_cast<long long>(panel) * batches_of(group_rounds) * BATCH_MASKS,
        num_groups, first_group, stride, num_panels, group_rounds, lane);
    Masks masks_behind = {};
    int behind = feed.bring(stages + lane * 16, masks_behind);
    const unsigned short* rows = w_down + static_cast<long long>(first_column) * N;
    if (N % 8 == 0 && panel_rows % 8 == 0 && reinterpret_cast<unsigned long long>(rows) % 16 == 0)
        load_planes(planes, rows, N, panel * panel_rows, panel_rows);
    else
        load_odd_planes(planes, rows, N, panel * panel_rows, panel_rows);
    __syncthreads();

    // lane i addresses row i & 7 of matrix i >> 3: slots 0-7 of both planes, then slots 8-15
    const int slot = (lane & 7) + (lane >> 4) * 8;
    const unsigned code_at = (slot & 7) / 2 * 16 + 2 * (CODE_HALVES + (slot >> 3) * 2 + (slot & 1));
    const unsigned plane = smem_address(planes + (lane >> 3 & 1) * panel_rows);
    const unsigned values_at = stages + t * 16, codes_at = stages + code_at;
    const unsigned copies_at = stages + kStageBytes + lane * 16;
    const bool is_last = panel == num_panels - 1;
    float bias[2] = {};
    if (b_down && is_last) {
        bias[0] = bf16_value(b_down[first_column + column_of(0, quad)]);
        bias[1] = bf16_value(b_down[first_column + column_of(1, quad)]);
    }

    int token = first_group * GROUP + quad;
    y = opaque(y + first_column + 4 * t);
    float sums[2][4] = {{bias[0], bias[0], bias[1], bias[1]}};
    unsigned at = 0;  // of the stage, in bytes
    while (behind != kNothing) {
        wait_for_copies<0>();
        __syncwarp();
        // the other stage is free: it takes the next step
        const int left = behind;
        const Masks step_masks = masks_behind;
        behind = feed.bring(copies_at - at, masks_behind);
        add_step(sums, {values_at + at, codes_at + at}, min(left, kStep), step_masks, plane);
        at = kStageBytes - at;
        if (left > kStep) continue;

        float out[4];  // of row quad of both planes, tokens 2t and 2t + 1
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = sums[0][i] + sums[1][i];
            sums[0][i] = bias[i / 2], sums[1][i] = 0;
        }
        if (num_panels > 1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int of_sum = token - quad + 2 * t + i;
                if (of_sum < M) {
                    float2* kept = reinterpret_cast<float2*>(
                        y32 + static_cast<long long>(of_sum) * K + first_column + 2 * quad);
                    if (panel > 0) {
                        const float2 before = *kept;
                        out[i] += before.x, out[i + 2] += before.y;
                    }
                    if (!is_last) *kept = make_float2(out[i], out[i + 2]);
                }
            }
        }
        if (is_last) {
            const unsigned low = transpose_matrix(bf16_pair(out[0], out[1]));
            const unsigned high = transpose_matrix(bf16_pair(out[2], out[3]));
            if (token < M) store_pair(offset_by(y, token, 2 * K), low, high);
        }
        token += stride * GROUP;
    }
}
