// heavy_walk and heavy_walk_gate over e4m3 x and weights with scales (heavy_walk.cuh); of a token's
// two scales the first (quantise_rows.cu). K a multiple of 128.
#include "ffn/heavy_walk.cuh"

namespace {

using few_heavy::E4m3;
constexpr int kSize = spec::HEAVY_WALK_SIZE;

}  // namespace

extern "C" __global__ void __cluster_dims__(kSize, 1, 1)
    __launch_bounds__(few_walk::kMostThreads, 1)
        heavy_walk_e4m3(const unsigned char* x, const unsigned char* w_up,
                        const unsigned char* w_down, const unsigned short* b_up,
                        const unsigned short* b_down, const int* heavy_rows,
                        const int* heavy_count, int columns, int N, int K, int cap, int ways,
                        int warps, int few, unsigned short* y, const float2* token_scales,
                        const float* up_scales, const float* down_scales, const int* counts,
                        const int* entries, int num_tiles, int num_slots,
                        const unsigned char* w_gate, const unsigned short* b_gate,
                        const float* gate_scales) {
    extern __shared__ uint4 memory[];
    const few_heavy::HeavyRows<E4m3> rows = {
        {{up_scales, down_scales}, token_scales, gate_scales}, x, w_up, w_down, b_up, b_down,
        heavy_rows, heavy_count, few, {N, K, cap, ways, warps, columns}, y};
    rows.walk<kSize>(few_heavy::PackedGate<E4m3>{counts, entries, num_tiles, num_slots, x, w_gate,
                                                 b_gate},
                     memory);
}

extern "C" __global__ void __cluster_dims__(kSize, 1, 1)
    __launch_bounds__(few_walk::kMostThreads, 1)
        heavy_walk_gate_e4m3(const unsigned char* x, const unsigned char* w_up,
                             const unsigned char* w_down, const unsigned short* b_up,
                             const unsigned short* b_down, const int* heavy_rows,
                             const int* heavy_count, int columns, int N, int K, int cap, int ways,
                             int warps, int few, unsigned short* y, const float2* token_scales,
                             const float* up_scales, const float* down_scales,
                             const unsigned short* gate) {
    extern __shared__ uint4 memory[];
    const few_heavy::HeavyRows<E4m3> rows = {
        {{up_scales, down_scales}, token_scales, nullptr}, x, w_up, w_down, b_up, b_down,
        heavy_rows, heavy_count, few, {N, K, cap, ways, warps, columns}, y};
    rows.walk<kSize>(few_heavy::DenseGate{gate}, memory);
}
