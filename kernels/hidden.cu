// hidden: h = gate * up of each pair, of the parts of its dot product that `up` left, into the
// rounds of `down`; and the masks of those (round_masks.cuh).
//
// Rounds are read and written in order; of each slot the link says where the parts are. Those of
// one tile of tokens lie together and are wanted by blocks that run together, out of L2.
//
// Launch: blocks of 256 threads, grid (any, any): (group, panel)s, a warp each, and among the
// second dimension their rounds, 16 at a time.
#include "twell_lists.cuh"
#include "round_masks.cuh"
#include "twell.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kBatches = 2;  // of rounds that a warp has under way

// Of the lane's record in each batch: its slots, and where their sums come from.
struct Records {
    uint4 record[kBatches], link[kBatches];
};

__device__ __forceinline__ unsigned element(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The sums of all parts; of slots without a pair, 0.
template <int RANGES>
__device__ __forceinline__ void add_parts(float (&sums)[kBatches][4], const Records& at,
                                          const float* partial, long long partial_stride) {
    float parts[RANGES][kBatches][4];
#pragma unroll
    for (int q = 0; q < RANGES; ++q)
#pragma unroll
        for (int b = 0; b < kBatches; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned link = element(at.link[b], i);
                parts[q][b][i] = link == NO_LINK ? 0.f : __ldg(partial + q * partial_stride + link);
            }
#pragma unroll
    for (int q = 0; q < RANGES; ++q)
#pragma unroll
        for (int b = 0; b < kBatches; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[b][i] += parts[q][b][i];
}

// h in the place of the gate; pads stay what they are.
__device__ __forceinline__ unsigned multiply_gate(unsigned gate, float sum, unsigned link) {
    const unsigned h = bf16_bits(bf16_value(gate) * bf16_value(bf16_bits(sum)));
    return link == NO_LINK ? PAD : h;
}

__device__ __forceinline__ uint2 values_of(const uint4& record, const uint4& link,
                                           const float (&sums)[4]) {
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned gate = (i < 2 ? record.x : record.y) >> (i % 2 * 16) & 0xffff;
        h[i] = multiply_gate(gate, sums[i], element(link, i));
    }
    return make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    hidden(const float* partial, long long partial_stride, int Q, const uint4* links, int M,
           int panel_rows, int num_panels, int group_rounds, const unsigned short* b_up,
           const int* num_rounds, uint4* rounds, unsigned* masks) {
    const int lane = threadIdx.x % 32, warps = kThreads / 32;
    const int end = (M + GROUP - 1) / GROUP * num_panels;
    for (int q = blockIdx.x * warps + threadIdx.x / 32; q < end; q += gridDim.x * warps) {
        const int num = __ldg(num_rounds + q) * ROUND_RECORDS;
        const long long first = static_cast<long long>(q) * group_rounds * ROUND_RECORDS + lane;
        uint4* records = rounds + first;
        const uint4* links_of = links + first;
        unsigned* masks_of =
            masks + static_cast<long long>(q) * batches_of(group_rounds) * BATCH_MASKS + lane;
        const unsigned short* bias = b_up ? b_up + q % num_panels * panel_rows : nullptr;
        const int step = kBatches * 32;
        for (int start = blockIdx.y * step; start < num; start += gridDim.y * step) {
            Records at;
#pragma unroll
            for (int b = 0; b < kBatches; ++b) {
                const int i = start + 32 * b;
                const bool any = i + lane < num;
                at.record[b] = any ? records[i] : make_uint4(0, 0, 0, 0);
                at.link[b] = any ? __ldg(links_of + i) : make_uint4(NO_LINK, NO_LINK, NO_LINK,
                                                                    NO_LINK);
            }
            float sums[kBatches][4] = {};
            int range = 0;
            for (; range + 2 <= Q; range += 2)
                add_parts<2>(sums, at, partial + range * partial_stride, partial_stride);
            for (; range < Q; ++range)
                add_parts<1>(sums, at, partial + range * partial_stride, partial_stride);
#pragma unroll
            for (int b = 0; b < kBatches; ++b) {
                const int i = start + 32 * b;
                const uint4 record = at.record[b];
                if (bias) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const unsigned code = (j < 2 ? record.z : record.w) >> (j % 2 * 16);
                        if (element(at.link[b], j) != NO_LINK)
                            sums[b][j] += bf16_value(__ldg(bias + (code & COLUMN_MASK)));
                    }
                }
                if (i < num)
                    masks_of[i] = batch_mask(make_uint2(record.z, record.w), lane);
                if (i + lane < num)
                    *reinterpret_cast<uint2*>(records + i) =
                        values_of(record, at.link[b], sums[b]);
            }
        }
    }
}
