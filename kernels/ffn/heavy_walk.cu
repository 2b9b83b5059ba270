// heavy_walk and heavy_walk_gate over bf16 (heavy_walk.cuh).
#include "ffn/heavy_walk.cuh"

namespace {

using few_heavy::Bf16;
constexpr int kSize = spec::HEAVY_WALK_SIZE;

}  // namespace

extern "C" __global__ void __cluster_dims__(kSize, 1, 1)
    __launch_bounds__(few_walk::kMostThreads, 1)
        heavy_walk(const unsigned short* x, const unsigned short* w_up,
                   const unsigned short* w_down, const unsigned short* b_up,
                   const unsigned short* b_down, const int* heavy_rows, const int* heavy_count,
                   int columns, int N, int K, int cap, int ways, int warps, int few,
                   unsigned short* y, const int* counts, const int* entries, int num_tiles,
                   int num_slots, const unsigned short* w_gate, const unsigned short* b_gate) {
    extern __shared__ uint4 memory[];
    const few_heavy::HeavyRows<Bf16> rows = {
        {}, x, w_up, w_down, b_up, b_down, heavy_rows, heavy_count, few,
        {N, K, cap, ways, warps, columns}, y};
    rows.walk<kSize>(few_heavy::PackedGate<Bf16>{counts, entries, num_tiles, num_slots, x, w_gate,
                                                 b_gate},
                     memory);
}

extern "C" __global__ void __cluster_dims__(kSize, 1, 1)
    __launch_bounds__(few_walk::kMostThreads, 1)
        heavy_walk_gate(const unsigned short* x, const unsigned short* w_up,
                        const unsigned short* w_down, const unsigned short* b_up,
                        const unsigned short* b_down, const int* heavy_rows,
                        const int* heavy_count, int columns, int N, int K, int cap, int ways,
                        int warps, int few, unsigned short* y, const unsigned short* gate) {
    extern __shared__ uint4 memory[];
    const few_heavy::HeavyRows<Bf16> rows = {
        {}, x, w_up, w_down, b_up, b_down, heavy_rows, heavy_count, few,
        {N, K, cap, ways, warps, columns}, y};
    rows.walk<kSize>(few_heavy::DenseGate{gate}, memory);
}
