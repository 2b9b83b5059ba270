// store_keys: k and v of new tokens into the cache, for `attend` with several tokens of a sequence
// in one launch. What is stored has the bits that `attend` stores itself.
//
// All parameters are those of `attend` (attend.cuh), but `width`: the columns DIM of the cache. A
// row whose position is below 0 stores nothing.
//
// Launch: a warp a block, grid (Hkv, B), dynamic shared memory 5 DIM 4 bytes: as `Shared` has it,
// q, k and v, and three heads that `rotate` turns.
#include "decode/attend_job.cuh"
#include "decode/attend_token.cuh"
#include "ptx/global.cuh"
#include "ptx/pdl.cuh"

namespace {

// Groups of lanes take the tasks 1 (k) and 2 (v) of a block of `attend` with one head of q.
template <int DIM>
__device__ __forceinline__ void store_heads(const Job& job, int position, float* memory) {
    constexpr int GROUPS = Shape<DIM>::GROUPS, ROUNDS = GROUPS == 1 ? 2 : 1;
    const Heads heads = heads_of_block(job, 1);
    const Lane<DIM> lane(threadIdx.x);
    const Range range = range_of_row<DIM>(job, position);
    NewHead made[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
        made[i] = begin_new_head<DIM, 1>(job, heads, range, lane, 1 + i + lane.group, true);
    wait_for_previous();
    const Shared<DIM, 1> shared(memory, 1);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
        finish_new_head<DIM, 1>(job, heads, made[i], lane, 1 + i + lane.group, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32)
    store_keys(const unsigned short* qkv, const int* positions, const int* tables, int table_stride,
               const unsigned short* cos, const unsigned short* sin, int columns, int half,
               const unsigned short* k_norm, float eps, unsigned short* keys,
               unsigned short* values, int num_kv_heads, int sharing, int width) {
    extern __shared__ float memory[];
    let_next_start();
    const int position = load_constant_word(positions + blockIdx.y);
    if (position < 0) return;
    Job job = {};
    job.qkv = qkv, job.positions = positions;
    job.tables = tables, job.table_stride = table_stride;
    job.cos = cos, job.sin = sin, job.columns = columns, job.half = half;
    job.q_norm = job.k_norm = k_norm, job.eps = eps;
    job.keys = keys, job.values = values;
    job.num_kv_heads = num_kv_heads, job.sharing = sharing;
    switch (width) {
        case 64: return store_heads<64>(job, position, memory);
        case 80: return store_heads<80>(job, position, memory);
        case 96: return store_heads<96>(job, position, memory);
        case 128: return store_heads<128>(job, position, memory);
        default: return store_heads<256>(job, position, memory);
    }
}
