// down: y = h W_down^T + b_down, of the pairs in the rounds that `plan` laid out and `hidden`
// filled.
//
// The weights stay and the tokens pass by. A block has 16 columns of y and keeps their weights for
// a whole panel of neurons in shared memory; each of its warps takes groups of 8 tokens. A round is
// 16 slots, pairs (token in group, neuron) with their h, and an mma for each 8 columns:
//
//     y [8 tokens, 16 columns] += H [8 tokens, 16 slots] W [16 slots, 16 columns]
//
// W are the rows of the slots' neurons, gathered by ldmatrix: 32 bytes a slot (tile/octets.cuh). H
// has one value a column, at its slot's token: each lane takes the values of its four slots and
// masks away those of other tokens. Shared memory fills one register of a warp a clock, and that is
// what time goes by: 4 clocks a round for the weights, 2 for values, half of one for codes. What a
// slot costs does not depend on density, nor on how often a neuron fires.
//
// W_down lies by rows of neurons, [N, K]; a block takes 32 bytes of each. Shared memory: two planes
// of [panel_rows] rows of 16 bytes, 8 columns of y each. Rows whose low three bits differ lie in
// different banks: the classes of plan.cu. In plane 1 neuron n has row n ^ 4: both halves of four
// neurons, which arrive together, lie in different banks too. Behind the planes lie two stages a
// warp, of 16 rounds each: a warp goes step by step, a step being up to 16 rounds of a group, and
// while it computes one, cp.async brings the next. The masks (tile/round_masks.cuh) of a step go to
// registers.
//
// With several panels the launches follow one another: sums go through y32, whose order of columns
// within 16 is its own: 4t to 4t + 3 are columns 2t, 2t + 1, 2t + 8 and 2t + 9.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the groups), once for each
// panel; K and panel_rows multiples of 16 and of 8, w_down at a multiple of 16 bytes. Dynamic
// shared memory: panel_rows * 32 + 32768 bytes, 32768 = 16 * 2 * 16 * 64. y32 float32 [M, K] if
// num_panels > 1.
#include "spec.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/bf16.cuh"
#include "ptx/compiler.cuh"
#include "ptx/copies.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "tile/bf16.cuh"
#include "tile/lists.cuh"
#include "tile/octets.cuh"
#include "tile/round_masks.cuh"

namespace {

constexpr int kThreads = spec::DOWN_BLOCK, kWarps = kThreads / 32;
constexpr int kColumns = spec::DOWN_COLUMNS;  // of y
constexpr int kRoundBytes = 2 * ROUND_HALVES;
constexpr int kStep = 2 * BATCH;  // rounds of a step, at most
constexpr int kStageBytes = kStep * kRoundBytes;
constexpr int kStages = 2;
static_assert(kWarps * kStages * kStageBytes == spec::DOWN_STAGES);
constexpr unsigned kNothing = ~0u;  // in place of a count of rounds: no group is left

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
    const uint4* records;  // of the step to come, from the lane's on
    const unsigned* masks;
    unsigned group_bytes, mask_bytes;  // from one group to the next
    int num_groups, stride, panels, lane;
    int group;                       // of the step to come
    unsigned counts, counts_behind;  // the lane's
    int from;                        // the lane with the count of the group
    int left;                        // rounds of the group that are to come

    __device__ __forceinline__ Feed(const int* num_rounds, const uint4* rounds,
                                    const unsigned* masks, int num_groups, int first, int stride,
                                    int panels, int group_rounds, int lane)
        : num_rounds(num_rounds), all_records(opaque(rounds + lane)),
          all_masks(opaque(masks + lane)), group_bytes(panels * group_rounds * kRoundBytes),
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
        load_constant_word_if(group < num_groups, from, counts_behind);
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
        step_masks.first = load_constant_or_leave(num > 0, masks);
        step_masks.second = load_constant_or_leave(num > BATCH, masks + BATCH_MASKS);
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
                                           const unsigned (&plane)[2]) {
    constexpr int TWOS = (COUNT + 1) / 2;
    unsigned codes[TWOS];
    uint2 values[COUNT];
#pragma unroll
    for (int i = 0; i < TWOS; ++i) codes[i] = load_shared_half(place.code + 2 * i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = load_shared_pair(place.values + i * kRoundBytes);
#pragma unroll
    for (int i = 0; i < TWOS; ++i) {
        const unsigned row = codes[i] & COLUMN_MASK;
        unsigned w[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            load_octets<(COUNT > 1)>(w[j], scale_and_add(row ^ j * kFlip, kPlaneRow, plane[j]));
#pragma unroll
        for (int round = 2 * i; round < 2 * i + 2 && round < COUNT; ++round) {
            unsigned low, high;
            keep_own(values[round], mask, round, low, high);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                add_octets(sums[j], low, high, w[j][round % 2 * 2], w[j][round % 2 * 2 + 1]);
        }
    }
}

// The `num` rounds of a step.
__device__ __forceinline__ void add_step(float (&sums)[2][4], Place place, int num, Masks masks,
                                         const unsigned (&plane)[2]) {
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

// Where the sums of a token's columns go that a lane has: y32 while panels follow, y at the last.
struct Target {
    float* y32;
    unsigned short* y;  // of the four neighbouring columns that the lane stores
    int M, K, panel, num_panels;
    int first_column, t;

    // `sums` of columns 2t, 2t + 1, and those 8 behind.
    __device__ __forceinline__ void take(float (&sums)[4], int token) const {
        const bool is_last = panel == num_panels - 1, odd = t & 1;
        if (num_panels > 1 && token < M) {
            float4* kept = reinterpret_cast<float4*>(y32 + static_cast<long long>(token) * K +
                                                     first_column + 4 * t);
            if (panel > 0) {
                const float4 before = *kept;
                sums[0] += before.x, sums[1] += before.y, sums[2] += before.z, sums[3] += before.w;
            }
            if (!is_last) *kept = make_float4(sums[0], sums[1], sums[2], sums[3]);
        }
        if (is_last) {
            const unsigned low = bf16_pair(sums[0], sums[1]), high = bf16_pair(sums[2], sums[3]);
            // columns 2t and 2t + 1, and 8 more: of a pair of lanes one stores the lower four
            const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
            if (token < M)
                store_pair(offset_by(y, token, 2 * K), odd ? other : low, odd ? high : other);
        }
    }
};

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
    const unsigned stages = smem_address(planes + 2 * panel_rows) + warp * kStages * kStageBytes;
    const int first_group = blockIdx.y * kWarps + warp;
    Feed feed(num_rounds + panel,
              rounds + static_cast<long long>(panel) * group_rounds * ROUND_RECORDS,
              masks + static_cast<long long>(panel) * batches_of(group_rounds) * BATCH_MASKS,
              num_groups, first_group, stride, num_panels, group_rounds, lane);
    Masks masks_behind = {};
    int behind = feed.bring(stages + lane * 16, masks_behind);
    const long long first_neuron = static_cast<long long>(panel) * panel_rows;
    load_planes(planes, w_down + first_neuron * K + first_column, K,
                N - static_cast<int>(first_neuron), panel_rows);
    wait_for_copies<0>();
    __syncthreads();

    // a lane looks up slot lane % 16, of every second round
    const int slot = lane % 16;
    const unsigned code_at =
        lane / 16 * kRoundBytes + slot % 8 / 2 * 16 + 2 * (CODE_HALVES + slot / 8 * 2 + slot % 2);
    const unsigned plane[2] = {opaque(smem_address(planes)),
                               opaque(smem_address(planes + panel_rows))};
    const unsigned values_at = stages + t * 16, codes_at = stages + code_at;
    const unsigned copies_at = stages + kStageBytes + lane * 16;
    const bool is_last = panel == num_panels - 1;
    float bias[4] = {};
    if (b_down && is_last)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            bias[i] = bf16_value(b_down[first_column + i / 2 * 8 + 2 * t + i % 2]);

    int token = first_group * GROUP + quad;
    const bool odd = t & 1;
    y = opaque(y + first_column + (odd ? 8 + 2 * (t - 1) : 2 * t));
    const Target target{y32, y, M, K, panel, num_panels, first_column, t};
    float sums[2][4] = {{bias[0], bias[1]}, {bias[2], bias[3]}};  // of 8 columns each
    unsigned at = 0;                                              // of the stage, in bytes
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

        float out[4];  // of columns 2t, 2t + 1, and those 8 behind
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = sums[i / 2][i % 2];
            sums[i / 2][i % 2] = bias[i];
        }
        target.take(out, token);
        token += stride * GROUP;
    }
}
