// down: y = h W_down^T + b_down, of the pairs in the rounds that `plan` laid out and `hidden` filled.
//
// The weights stay and the tokens pass by. A block has 16 columns of y and keeps their weights for a
// whole panel of neurons in shared memory; each of its warps takes groups of 8 tokens. A round is 16
// slots, pairs (token in group, neuron) with their h, and one mma:
//
//     y^T [16 columns, 8 tokens] += W^T [16 columns, 16 slots] H [16 slots, 8 tokens]
//
// W^T are the rows of the slots' neurons, gathered by one ldmatrix: 32 bytes a slot. H has one value
// a row, at the slot's token. Shared memory moves 128 bytes a clock and is what time goes by: 4 clocks
// a round for the weights, 4 for values, codes and their staging. Against a dense product a slot
// costs the same whatever the density, so few pairs are cheap and all 16 columns x N x M never read.
//
// Shared memory: two planes of [panel_rows] rows of 16 bytes, 8 columns of y each. Rows whose low three
// bits differ lie in different banks: the classes of plan.cu. Row m of the mma's 16 is column
// 4 (m / 2) + m % 2 in plane 0 and 4 (m / 2) + m % 2 + 2 in plane 1, so that after a transposition
// a lane has four columns of a token, 8 bytes, in a row. Behind the planes, three stages of 512 bytes
// a warp: rounds come 8 at a time by cp.async, two stages ahead.
//
// A lane needs to know, of 8 rounds and the 4 slots of its thread in the quad, which belong to the
// token of its quad. Lane 4 k + t reads the codes of round k's record t; three ballots a slot give the
// bits of all tokens, from which each lane makes its own mask, one bit for each (k, t).
//
// With several panels the launches follow one another: sums go through y32, whose order of columns
// within 16 is its own: 2 m and 2 m + 1 are row m of the planes.
//
// Launch: blocks of 512 threads, grid (K / 16, any number of shares of the groups), once for each
// panel. Dynamic shared memory: panel_rows * 32 + 24576 bytes, 24576 = 16 * 3 * 512.
// y32 float32 [M, K] if num_panels > 1.
#include "twell_lists.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kColumns = 16;     // of y
constexpr int kPlaneRow = 16;    // bytes
constexpr int kStageRounds = 8;  // as many as quads
constexpr int kStageBytes = kStageRounds * 64;
constexpr int kStages = 3;

// Which column of the 16 lies in a row of a plane.
__device__ __forceinline__ int column_of(int plane, int m) { return 4 * (m >> 1) + (m & 1) + 2 * plane; }

// Two neighbouring neurons of a row of W_down; zeros from `end` on.
__device__ __forceinline__ unsigned load_neurons(const unsigned short* row, int n, int end,
                                                 bool even) {
    if (even && n + 1 < end) return __ldg(reinterpret_cast<const unsigned*>(row + n));
    const unsigned low = n < end ? row[n] : 0, high = n + 1 < end ? row[n + 1] : 0;
    return low | high << 16;
}

// The panel's weights for 16 columns of y, transposed: all of the block's threads.
__device__ __forceinline__ void load_planes(uint4* planes, const unsigned short* w_down, int N,
                                            int first_neuron, int panel_rows) {
    const int end = min(panel_rows, N - first_neuron);
    const bool even = N % 2 == 0;
    w_down += first_neuron;
    for (int n = 2 * threadIdx.x; n < panel_rows; n += 2 * kThreads) {
        unsigned v[2][8];
#pragma unroll
        for (int plane = 0; plane < 2; ++plane)
#pragma unroll
            for (int m = 0; m < 8; ++m)
                v[plane][m] = load_neurons(
                    w_down + static_cast<long long>(column_of(plane, m)) * N, n, end, even);
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            uint4* row = planes + plane * panel_rows + n;
            const unsigned(&w)[8] = v[plane];
            row[0] = make_uint4(permute_bytes(w[0], w[1], 0x5410), permute_bytes(w[2], w[3], 0x5410),
                                permute_bytes(w[4], w[5], 0x5410), permute_bytes(w[6], w[7], 0x5410));
            row[1] = make_uint4(permute_bytes(w[0], w[1], 0x7632), permute_bytes(w[2], w[3], 0x7632),
                                permute_bytes(w[4], w[5], 0x7632), permute_bytes(w[6], w[7], 0x7632));
        }
    }
}

// What lies on a stage.
struct Batch {
    int num;    // rounds
    bool last;  // of their group
    bool none;  // all groups are done
};

// Brings the rounds of a warp's groups onto its stages, batch after batch. Counts of rounds are looked
// up for 32 groups at a time, one a lane, and for the 32 behind before they are needed.
struct Feed {
    const int* num_rounds;    // of the first group in this panel
    const uint4* records;     // of the group at hand, from the lane's on
    long long group_records;  // from one of the warp's groups to the next
    int num_groups, stride, panels, lane;
    int group;                // at hand
    int looked_up;            // the lane's next group to look up
    int counts, counts_behind, from;  // the lane's; the lane with the count of the group at hand
    int num, brought;                 // rounds of the group at hand

    __device__ __forceinline__ Feed(const int* num_rounds, const uint4* rounds, int num_groups,
                                    int first, int stride, int panels, int group_rounds, int lane)
        : num_rounds(num_rounds), num_groups(num_groups), stride(stride), panels(panels),
          lane(lane), group(first), looked_up(first + lane * stride), from(0), brought(0) {
        const long long one = static_cast<long long>(panels) * group_rounds * ROUND_RECORDS;
        records = rounds + first * one + lane;
        group_records = stride * one;
        counts = look_up();
        counts_behind = look_up();
        num = __shfl_sync(~0u, counts, 0);
    }

    __device__ __forceinline__ int look_up() {
        const int group = looked_up;
        looked_up += 32 * stride;
        return group < num_groups ? __ldg(num_rounds + static_cast<long long>(group) * panels) : 0;
    }

    __device__ __forceinline__ void next_group() {
        group += stride, records += group_records, brought = 0;
        if (++from == 32) from = 0, counts = counts_behind, counts_behind = look_up();
        num = __shfl_sync(~0u, counts, from);
    }

    // Starts copying a batch; each call makes one group of copies.
    __device__ __forceinline__ Batch bring(unsigned stage) {
        Batch batch = {0, true, group >= num_groups};
        if (!batch.none) {
            batch.num = min(num - brought, kStageRounds);
            if (lane < batch.num * ROUND_RECORDS)
                copy_async(stage + lane * 16, records + brought * ROUND_RECORDS);
            brought += kStageRounds;
            batch.last = brought >= num;
            if (batch.last) next_group();
        }
        commit_copies();
        return batch;
    }
};

// For which rounds of a stage the quad's token has the four slots of the lane: bit 4 k + 3 of odd for
// odd rounds k, 4 k + 7 of even for even ones.
struct Masks {
    unsigned odd[4], even[4];

    __device__ __forceinline__ Masks(const unsigned char* stage, int lane) {
        const uint4 record = reinterpret_cast<const uint4*>(stage)[lane];
        const int quad = lane >> 2, t = lane & 3;
#pragma unroll
        for (int slot = 0; slot < 4; ++slot) {
            const unsigned code = (slot < 2 ? record.z : record.w) >> (slot % 2 * 16);
            unsigned same = ~0u;
#pragma unroll
            for (int bit = 0; bit < 3; ++bit) {
                const unsigned set = __ballot_sync(~0u, (code >> (COLUMN_BITS + bit) & 1) != 0);
                same &= set ^ (quad >> bit & 1 ? 0 : ~0u);
            }
            odd[slot] = same << (3 - t);
            even[slot] = odd[slot] << 4;
        }
    }

    // All bits of the halves whose slots, first and first + 1, belong to the token in round k.
    __device__ __forceinline__ unsigned halves(int k, int first) const {
        const unsigned byte = 8 | k / 2;
        const unsigned selector = byte * 0x11 | (byte | 4) * 0x1100;
        return k % 2 ? permute_bytes(odd[first], odd[first + 1], selector)
                     : permute_bytes(even[first], even[first + 1], selector);
    }
};

// The mma of round k on a stage. `code_at`: where in a round the code of the lane's row lies.
__device__ __forceinline__ void add_round(float (&sums)[4], const unsigned char* stage,
                                          const Masks& masks, int k, int code_at, int t,
                                          unsigned plane) {
    const unsigned char* round = stage + k * ROUND_HALVES * 2;
    const unsigned code = *reinterpret_cast<const unsigned short*>(round + code_at);
    const uint2 values = *reinterpret_cast<const uint2*>(round + t * 16);
    unsigned w[4];
    load_matrices_transposed(w, plane + (code & COLUMN_MASK) * kPlaneRow);
    multiply_add(sums, w[0], w[1], w[2], w[3], values.x & masks.halves(k, 0),
                 values.y & masks.halves(k, 2));
}

__device__ __forceinline__ void add_batch(float (&sums)[2][4], const unsigned char* stage, int num,
                                          int lane, int code_at, unsigned plane) {
    const Masks masks(stage, lane);
    if (num == kStageRounds) {
#pragma unroll
        for (int k = 0; k < kStageRounds; ++k)
            add_round(sums[k % 2], stage, masks, k, code_at, lane & 3, plane);
    } else {
#pragma unroll
        for (int k = 0; k < kStageRounds - 1; ++k) {
            if (k >= num) break;
            add_round(sums[k % 2], stage, masks, k, code_at, lane & 3, plane);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    down(const unsigned short* w_down, const unsigned short* b_down, const int* num_rounds,
         const uint4* rounds, int M, int N, int K, int panel, int panel_rows, int num_panels,
         int group_rounds, float* y32, unsigned short* y) {
    extern __shared__ uint4 planes[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int quad = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * kColumns, num_groups = (M + GROUP - 1) / GROUP;
    const int stride = gridDim.y * kWarps;
    if (dynamic_smem_bytes() < panel_rows * 32u + kWarps * kStages * kStageBytes) __trap();

    // the first rounds are on their way while the weights come
    unsigned char* stages = reinterpret_cast<unsigned char*>(planes + 2 * panel_rows) +
                            warp * kStages * kStageBytes;
    const unsigned stages_address = smem_address(stages);
    int group = blockIdx.y * kWarps + warp;
    Feed feed(num_rounds + panel,
              rounds + static_cast<long long>(panel) * group_rounds * ROUND_RECORDS, num_groups,
              group, stride, num_panels, group_rounds, lane);
    Batch batch = feed.bring(stages_address);
    Batch behind = feed.bring(stages_address + kStageBytes);
    load_planes(planes, w_down + static_cast<long long>(first_column) * N, N, panel * panel_rows,
                panel_rows);
    __syncthreads();

    // lane i addresses row i & 7 of matrix i >> 3: slots 0-7 of both planes, then slots 8-15
    const int slot = (lane & 7) + (lane >> 4) * 8;
    const int code_at = ((slot & 7) >> 1) * 16 + (slot >> 3) * 4 + (slot & 1) * 2 + CODE_HALVES * 2;
    const unsigned plane = smem_address(planes + (lane >> 3 & 1) * panel_rows);
    const bool is_last = panel == num_panels - 1;
    float bias[2] = {};
    if (b_down && is_last) {
        bias[0] = bf16_value(b_down[first_column + column_of(0, quad)]);
        bias[1] = bf16_value(b_down[first_column + column_of(1, quad)]);
    }

    float sums[2][4] = {};
    int at = 0;  // of the stage, in bytes
    while (!batch.none) {
        // the stage that is free now takes the batch after the next
        __syncwarp();
        const int free = at == 0 ? (kStages - 1) * kStageBytes : at - kStageBytes;
        const Batch later = feed.bring(stages_address + free);
        wait_for_copies<kStages - 1>();
        __syncwarp();
        if (batch.num > 0) add_batch(sums, stages + at, batch.num, lane, code_at, plane);
        if (batch.last) {
            float out[4];  // of row quad of both planes, tokens 2t and 2t + 1
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[i] = sums[0][i] + sums[1][i] + bias[i / 2];
                sums[0][i] = sums[1][i] = 0;
            }
            if (num_panels > 1) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = group * GROUP + 2 * t + i;
                    if (token < M) {
                        float2* kept = reinterpret_cast<float2*>(
                            y32 + static_cast<long long>(token) * K + first_column + 2 * quad);
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
                const int token = group * GROUP + quad;
                if (token < M)
                    *reinterpret_cast<uint2*>(y + static_cast<long long>(token) * K +
                                              first_column + 4 * t) = make_uint2(low, high);
            }
            group += stride;
        }
        batch = behind, behind = later;
        at = at == (kStages - 1) * kStageBytes ? 0 : at + kStageBytes;
    }
}
