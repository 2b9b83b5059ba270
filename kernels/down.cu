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
// W_down lies by rows of neurons, [N, K]; a block takes 32 bytes of each. Shared memory: two planes
// of [panel_rows] rows of 16 bytes, 8 columns of y each. Rows whose low three bits differ lie in
// different banks: the classes of plan.cu. In plane 1 neuron n has row n ^ 4: both halves of four
// neurons, which arrive together, lie in different banks too. Behind the planes lie two stages a
// warp, of 16 rounds each: a warp goes step by step, a step being up to 16 rounds of a group, and
// while it computes one, cp.async brings the next. The masks (round_masks.cuh) of a step go to
// registers.
//
// With several panels the launches follow one another: sums go through y32, whose order of columns
// within 16 is its own: 2 m and 2 m + 1 are columns m and m + 8.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the groups), once for each
// panel; K and panel_rows multiples of 16 and of 8, w_down at a multiple of 16 bytes. Dynamic
// shared memory: panel_rows * 32 + 32768 bytes, 32768 = 16 * 2 * 16 * 64. y32 float32 [M, K] if
// num_panels > 1.
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
constexpr int kFlip = 4;            // of rows in plane 1

// The panel's weights for 16 columns of y, all copies under way at once. Two neighbouring lanes
// take a neuron: the warp asks for whole sectors of 32 bytes. Zeros behind the last neuron.
__device__ __forceinline__ void load_planes(uint4* planes, const unsigned short* w_down, int K,
                                            int num_neurons, int panel_rows) {
    const int plane = threadIdx.x % 2;
    int neuron = threadIdx.x / 2;
    const unsigned short* from = w_down + static_cast<long long>(neuron) * K + 8 * plane;
    uint4* to = planes + plane * panel_rows + (neuron ^ plane * kFlip);
#pragma unroll 4
    for (; neuron < panel_rows; neuron += kThreads / 2) {
        if (neuron < num_neurons)
            copy_async(smem_address(to), from);
        else
            *to = make_uint4(0, 0, 0, 0);
        from += kThreads / 2 * K, to += kThreads / 2;
    }
    commit_copies();
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
                                           unsigned plane, unsigned flip) {
    unsigned codes[COUNT];
    uint2 values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) codes[i] = load_shared_half(place.code + i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = load_shared_pair(place.values + i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        unsigned w[4];
        const unsigned row = (codes[i] & COLUMN_MASK) ^ flip;
        load_matrices_transposed(w, scale_and_add(row, kPlaneRow, plane));
        const unsigned signs = mask << (7 - i);
        const unsigned low = values[i].x & permute_bytes(signs, 0, 0x9988);
        const unsigned high = values[i].y & permute_bytes(signs, 0, 0xbbaa);
        multiply_add(sums[i % 2], w[0], w[1], w[2], w[3], low, high);
    }
}

// The `num` rounds of a step.
__device__ __forceinline__ void add_step(float (&sums)[2][4], Place place, int num, Masks masks,
                                         unsigned plane, unsigned flip) {
    unsigned mask = masks.first;
#pragma unroll 1
    for (; num >= BATCH; num -= BATCH) {
        add_rounds<BATCH>(sums, place, mask, plane, flip);
        place.pass(BATCH), mask = masks.second;
    }
    if (num & 4) {
        add_rounds<4>(sums, place, mask, plane, flip);
        place.pass(4), mask >>= 4;
    }
    if (num & 2) {
        add_rounds<2>(sums, place, mask, plane, flip);
        place.pass(2), mask >>= 2;
    }
    if (num & 1) add_rounds<1>(sums, place, mask, plane, flip);
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
    const long long first_neuron = static_cast<long long>(panel) * panel_rows;
    load_planes(planes, w_down + first_neuron * K + first_column, K,
                N - static_cast<int>(first_neuron), panel_rows);
    wait_for_copies<0>();
    __syncthreads();

    // lane i addresses row i & 7 of matrix i >> 3: slots 0-7 of both planes, then slots 8-15
    const int slot = (lane & 7) + (lane >> 4) * 8;
    const unsigned code_at = (slot & 7) / 2 * 16 + 2 * (CODE_HALVES + (slot >> 3) * 2 + (slot & 1));
    // (through a shuffle, or the compiler would make them anew for every step)
    const int side = lane >> 3 & 1;
    const unsigned plane = __shfl_sync(~0u, smem_address(planes + side * panel_rows), lane);
    const unsigned flip = __shfl_sync(~0u, side * kFlip, lane);
    const unsigned values_at = stages + t * 16, codes_at = stages + code_at;
    const unsigned copies_at = stages + kStageBytes + lane * 16;
    const bool is_last = panel == num_panels - 1;
    float bias[2] = {};
    if (b_down && is_last) {
        bias[0] = bf16_value(b_down[first_column + quad]);
        bias[1] = bf16_value(b_down[first_column + 8 + quad]);
    }

    int token = first_group * GROUP + quad;
    const bool odd = t & 1;
    y = opaque(y + first_column + (odd ? 8 + 2 * (t - 1) : 2 * t));
    float sums[2][4] = {{bias[0], bias[0], bias[1], bias[1]}};
    unsigned at = 0;  // of the stage, in bytes
    while (behind != kNothing) {
        wait_for_copies<0>();
        __syncwarp();
        // the other stage is free: it takes the next step
        const int left = behind;
        const Masks step_masks = masks_behind;
        behind = feed.bring(copies_at - at, masks_behind);
        add_step(sums, {values_at + at, codes_at + at}, min(left, kStep), step_masks, plane,
                 flip);
        at = kStageBytes - at;
        if (left > kStep) continue;

        float out[4];  // of columns quad and quad + 8, tokens 2t and 2t + 1
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
            // columns 2t and 2t + 1, and 8 more: of a pair of lanes one stores the lower four
            const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
            if (token < M)
                store_pair(offset_by(y, token, 2 * K), odd ? other : low, odd ? high : other);
        }
        token += stride * GROUP;
    }
}
