// few_hidden_hopper: the sparse hidden state of few tokens, as few_hidden, by clusters that cut K.
//
// x of up to 64 tokens is more than a block can keep, and to read it again and again is what
// few_hidden's time goes by then. Here the four blocks of a cluster have the same neurons, and a
// quarter of K each, of which x stays: it comes out of L2 once for a cluster. Each of a block's two
// warpgroups takes `rows` neurons, by wgmma: tokens are its rows (64, of which those that there are
// not are anything), neurons its columns. Gate's weights come by TMA in slabs of 64 columns of K.
//
// The blocks' sums are exchanged by DSMEM. Of 16 neurons one block is the owner, who adds the four
// up and knows who fires; all blocks are told, and fetch their quarter of these neurons' rows of
// up. With those it goes as with the gates.
//
// hidden, fired and counts as in few_hidden, but that behind token M hidden is 0.
//
// Launch: 256 threads, clusters of four, 2 `rows` neurons each; x in boxes of 8 `octets` tokens,
// w_gate in boxes of `rows`, both of 64 columns, 128-byte swizzle. Dynamic shared memory: bytes()
// of Places.
#include "few.cuh"
#include "few_hopper.cuh"
#include "warp.cuh"

namespace {

constexpr int kRanks = 4, kGroups = 2;  // blocks of a cluster; warpgroups of a block
constexpr int kMostRows = 104;          // of a warpgroup
constexpr int kFewRows = 32;            // so few of up take less time
constexpr int kSlab = 64, kRowBytes = 2 * kSlab;
constexpr int kAlignment = 1024;
constexpr int kWords = (kGroups * kMostRows + few::kRows - 1) / few::kRows;
constexpr int kMostTokens = 64;

// Where things lie, from a multiple of kAlignment on.
struct Places {
    unsigned x, ring, ring_bytes, sums, gates, list, fired, counts, barriers, end;

    __device__ static Places of(int K, int rows, int stages, int octets) {
        const int slabs = (K / kSlab + kRanks - 1) / kRanks, neurons = kGroups * rows;
        const int words = neurons / few::kRows;
        Places at = {};
        at.ring = slabs * octets * 8 * kRowBytes;
        // a round of up has at least a row block
        at.ring_bytes = (stages * neurons > few::kRows * slabs ? stages * neurons
                                                               : few::kRows * slabs) * kRowBytes;
        at.sums = at.ring + at.ring_bytes;
        at.gates = at.sums + neurons * (8 * octets + 4) * 4;
        at.list = at.gates + (words + kRanks - 1) / kRanks * few::kRows * 16 * octets;
        at.fired = at.list + neurons;
        at.counts = at.fired + (kWords + 1) / 2 * 8;
        at.barriers = at.counts + 4 * kMostTokens;
        at.end = at.barriers + 8 * (kGroups * stages + slabs);
        return at;
    }

    // wgmma reads on behind x and behind the ring.
    __device__ static unsigned bytes(int K, int rows, int stages, int octets) {
        const Places at = of(K, rows, stages, octets);
        const unsigned most = at.sums + kMostRows * kRowBytes;
        return (at.end > most ? at.end : most) + kAlignment;
    }
};

class Hidden {
  public:
    const TensorMap *x_map, *gate_map;
    const unsigned short *w_up, *w_down, *b_gate, *b_up;
    int M, N, K, rows, stages, octets;
    unsigned short *hidden, *fired;
    int* counts;

    __device__ __forceinline__ void run(const uint4* memory) {
        find_places(memory);
        if (threadIdx.x == 0) {
            for (int i = 0; i < kGroups * stages + num_slabs_; ++i) barrier_init(barrier(i), 1);
            barrier_init_fence();
        }
        if (threadIdx.x < kWords) store_shared_word(at_.fired + 4 * threadIdx.x, 0);
        if (threadIdx.x < kMostTokens) store_shared_word(at_.counts + 4 * threadIdx.x, 0);
        __syncthreads();
        if (threadIdx.x % 128 == 0)
            for (int i = 0; i < min(stages, num_slabs_); ++i) bring_gates(i);
        wait_for_previous();
        let_next_start();
        if (threadIdx.x == 0) bring_x();
        multiply_gates();
        cluster_sync();
        find_fired();
        cluster_sync();
        up_of_fired(make_list());
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            const int num_words = (N + few::kRows - 1) / few::kRows;
            if (num_words % 2) fired[num_words] = 0;
        }
        if (counts && static_cast<int>(threadIdx.x) < M) {
            const int own = load_shared_word(at_.counts + 4 * threadIdx.x);
            if (own) atomicAdd(counts + threadIdx.x, own);
        }
    }

  private:
    __device__ __forceinline__ void find_places(const uint4* memory) {
        if (dynamic_smem_bytes() < Places::bytes(K, rows, stages, octets)) __trap();
        const unsigned base = (kept_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
        at_ = Places::of(K, rows, stages, octets);
        at_.x += base, at_.ring += base, at_.sums += base, at_.gates += base, at_.list += base;
        at_.fired += base, at_.counts += base, at_.barriers += base;
        neurons_ = kGroups * rows, tokens_ = 8 * octets, sum_step_ = tokens_ + 4;
        rank_ = cluster_rank(), group_ = threadIdx.x / 128;
        first_ = blockIdx.x / kRanks * neurons_;
        const int all = K / kSlab;
        first_slab_ = all * rank_ / kRanks, num_slabs_ = all * (rank_ + 1) / kRanks - first_slab_;
        most_slabs_ = (all + kRanks - 1) / kRanks;
    }

    // Of the warpgroups' stages, then of the slabs of x.
    __device__ __forceinline__ unsigned barrier(int i) const { return at_.barriers + 8 * i; }
    __device__ __forceinline__ unsigned x_barrier(int slab) const {
        return barrier(kGroups * stages + slab);
    }

    __device__ __forceinline__ unsigned x_at(int slab) const {
        return at_.x + slab * tokens_ * kRowBytes;
    }

    // The warpgroup's part of a stage.
    __device__ __forceinline__ unsigned stage_at(int stage) const {
        return at_.ring + (stage * neurons_ + group_ * rows) * kRowBytes;
    }

    // Sends for slab `slab` of the thread's warpgroup.
    __device__ __forceinline__ void bring_gates(int slab) const {
        const int stage = slab % stages;
        const unsigned full = barrier(group_ * stages + stage);
        barrier_expect_bytes(full, rows * kRowBytes);
        copy_box(stage_at(stage), gate_map, (first_slab_ + slab) * kSlab, first_ + group_ * rows,
                 full);
    }

    __device__ __forceinline__ void bring_x() const {
        for (int i = 0; i < num_slabs_; ++i) {
            barrier_expect_bytes(x_barrier(i), tokens_ * kRowBytes);
            copy_box(x_at(i), x_map, (first_slab_ + i) * kSlab, 0, x_barrier(i));
        }
    }

    __device__ __forceinline__ static void multiply_16(float (&d)[kMostRows / 2],
                                                       unsigned long long x,
                                                       unsigned long long weights) {
        wgmma_64x104x16(d, x, weights);
    }

    __device__ __forceinline__ static void multiply_16(float (&d)[kFewRows / 2],
                                                       unsigned long long x,
                                                       unsigned long long weights) {
        wgmma_64x32x16(d, x, weights);
    }

    // d += a slab of x times that of the neurons whose weights lie at `from`.
    template <int NUM>
    __device__ __forceinline__ void multiply(float (&d)[NUM], int slab, unsigned from) const {
        wgmma_fence();
        const unsigned long long x = Along::descriptor(x_at(slab));
        const unsigned long long weights = Along::descriptor(from);
#pragma unroll
        for (int i = 0; i < kSlab / 16; ++i)
            multiply_16(d, x + i * Along::kNext16, weights + i * Along::kNext16);
        wgmma_commit();
    }

    __device__ __forceinline__ void multiply_gates() const {
        float d[kMostRows / 2] = {};
#pragma unroll 1
        for (int i = 0; i < num_slabs_; ++i) {
            const int stage = i % stages;
            barrier_wait(barrier(group_ * stages + stage), i / stages & 1);
            barrier_wait(x_barrier(i), 0);
            multiply(d, i, stage_at(stage));
            if (i + stages >= num_slabs_) continue;
            wgmma_wait<0>();
            group_sync(group_);
            if (threadIdx.x % 128 == 0) bring_gates(i + stages);
        }
        wgmma_wait<0>();
        store(d, group_ * rows, rows);
    }

    // The sums of `num` neurons of the warpgroup, to place `first` on: [neuron][sum_step_].
    template <int NUM>
    __device__ __forceinline__ void store(const float (&d)[NUM], int first, int num) const {
        const int token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        const unsigned to =
            at_.sums + 4 * ((first + threadIdx.x % 4 * 2) * sum_step_ + token);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (token + 8 * half >= tokens_) break;
#pragma unroll
            for (int j = 0; j < NUM / 4; ++j) {
                if (8 * j >= num) break;
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    store_shared(to + 4 * ((8 * j + i) * sum_step_ + 8 * half),
                                 d[4 * j + 2 * half + i]);
            }
        }
    }

    // Four tokens' sums of a place, of each block.
    struct Parts {
        float4 of[kRanks];

        __device__ __forceinline__ void add_up(float (&sums)[4]) const {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = 0;
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank) {
                sums[0] += of[rank].x, sums[1] += of[rank].y;
                sums[2] += of[rank].z, sums[3] += of[rank].w;
            }
        }
    };

    __device__ __forceinline__ Parts load_parts(int place, int quad) const {
        const unsigned at = at_.sums + 4 * (place * sum_step_ + 4 * quad);
        Parts parts;
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) parts.of[rank] = load_four_of_block(at, rank);
        return parts;
    }

    // Of the neurons that a block owns the `slot`th, by its place in the cluster's.
    __device__ __forceinline__ int owned(int slot) const {
        return (rank_ + slot / few::kRows * kRanks) * few::kRows + slot % few::kRows;
    }

    // Gates of the block's own neurons, 2 `octets` lanes each; all blocks are told who fires.
    __device__ __forceinline__ void find_fired() const {
        const int lanes = 2 * octets, lane = threadIdx.x % 32, quad = threadIdx.x % lanes;
        const int num =
            (neurons_ / few::kRows - rank_ + kRanks - 1) / kRanks * few::kRows * lanes;
        Parts next;  // asked for one turn ahead
        if (static_cast<int>(threadIdx.x) < num)
            next = load_parts(owned(threadIdx.x / lanes), quad);
#pragma unroll 1
        for (int i = threadIdx.x; i < num; i += few::kThreads) {
            const int slot = i / lanes, place = owned(slot), n = first_ + place;
            float bias = 0, sums[4];
            if (b_gate && n < N) bias = bf16_value(b_gate[n]);
            const Parts parts = next;
            if (i + few::kThreads < num)
                next = load_parts(owned((i + few::kThreads) / lanes), quad);
            parts.add_up(sums);
            unsigned bits[4], any = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                bits[j] = bf16_bits(sums[j] + bias);
                if (n >= N || 4 * quad + j >= M || !fires(bf16_value(bits[j]))) bits[j] = 0;
                any |= bits[j];
                if (bits[j] && counts) add_shared_word(at_.counts + 4 * (4 * quad + j), 1);
            }
            store_shared_pair(at_.gates + 2 * (slot * tokens_ + 4 * quad),
                              bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            const unsigned all = __ballot_sync(~0u, any != 0);
            const unsigned own = ((1u << lanes) - 1) << lane / lanes * lanes;
            if (quad > 0 || !(all & own)) continue;
#pragma unroll
            for (int rank = 0; rank < kRanks; ++rank)
                or_in_block(at_.fired + 4 * (place / few::kRows), rank, 1u << place % few::kRows);
        }
    }

    // The list of all neurons of the cluster that fired; how many. The owners write who fired.
    __device__ __forceinline__ int make_list() const {
        const int own = threadIdx.x / few::kRows, bit = threadIdx.x % few::kRows;
        const int lane = threadIdx.x % 32, num_words = neurons_ / few::kRows;
        const unsigned word = lane < num_words ? load_shared_word(at_.fired + 4 * lane) : 0;
        const int upto = scan_warp(__popc(word), lane), num = __shfl_sync(~0u, upto, 31);
        const int before = __shfl_sync(~0u, upto - __popc(word), own);
        const unsigned own_word = __shfl_sync(~0u, word, own);
        if (own_word >> bit & 1)
            store_shared_byte(at_.list + before + __popc(own_word & ((1u << bit) - 1)),
                              threadIdx.x);
        const int first_word = first_ / few::kRows;
        if (own < num_words && bit == 0 && own % kRanks == rank_ &&
            (first_word + own) * few::kRows < N)
            fired[first_word + own] = static_cast<unsigned short>(own_word);
        __syncthreads();
        return num;
    }

    // In rounds of what the stages have room for, shared out evenly to the warpgroups.
    __device__ __forceinline__ void up_of_fired(int num) const {
        const int room = at_.ring_bytes / (most_slabs_ * kRowBytes) / few::kRows * few::kRows;
        const int most = min(room, neurons_);
#pragma unroll 1
        for (int first = 0; first < num; first += most) {
            const int here = min(most, num - first), half = (here + 15) / 16 * 8;
            fetch(first, here, 2 * half);
            if (half <= kFewRows)
                multiply_up<kFewRows>(half);
            else
                multiply_up<kMostRows>(half);
            cluster_sync();
            write_hidden(first, here);
            cluster_sync();
        }
    }

    // The block's columns of up of `num` neurons of the list, slab by slab, as TMA would lay them.
    __device__ __forceinline__ void fetch(int first, int num, int rows_of_slab) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < num; row += few::kWarps) {
            const long long n = first_ + static_cast<int>(load_shared_byte(at_.list + first + row));
            const unsigned short* from = w_up + n * K + first_slab_ * kSlab;
            const unsigned to = at_.ring + row * kRowBytes;
#pragma unroll 1
            for (int i = lane; i < 8 * num_slabs_; i += 32)
                copy_async(to + i / 8 * rows_of_slab * kRowBytes + (i % 8 ^ row % 8) * 16,
                           from + 8 * i);
        }
        commit_copies();
#pragma unroll 1
        for (int row = threadIdx.x / 32; row < num; row += few::kWarps) {
            const long long n = first_ + static_cast<int>(load_shared_byte(at_.list + first + row));
            for (int i = lane; i < num_slabs_; i += 32)
                prefetch_into_l2(w_down + n * K + (first_slab_ + i) * kSlab);
        }
        wait_for_copies<0>();
        fence_for_engine();
        __syncthreads();
    }

    template <int ROWS>
    __device__ __forceinline__ void multiply_up(int half) const {
        float d[ROWS / 2] = {};
#pragma unroll 1
        for (int i = 0; i < num_slabs_; ++i)
            multiply(d, i, at_.ring + (i * 2 * half + group_ * half) * kRowBytes);
        wgmma_wait<0>();
        store(d, group_ * half, half);
    }

    // Of the round's neurons every fourth.
    __device__ __forceinline__ void write_hidden(int first, int num) const {
        const int lanes = 2 * octets, own = (num - rank_ + kRanks - 1) / kRanks;
#pragma unroll 1
        for (int i = threadIdx.x; i < own * lanes; i += few::kThreads) {
            const int place = i / lanes * kRanks + rank_, quad = i % lanes;
            const int neuron = load_shared_byte(at_.list + first + place), n = first_ + neuron;
            const int word = neuron / few::kRows;
            const int slot = word / kRanks * few::kRows + neuron % few::kRows;
            float bias = 0, up[4];
            if (b_up) bias = bf16_value(b_up[n]);
            const uint2 gates = load_pair_of_block(
                at_.gates + 2 * (slot * tokens_ + 4 * quad), word % kRanks);
            load_parts(place, quad).add_up(up);
            store_pair(hidden + static_cast<long long>(n) * tokens_ + 4 * quad,
                       bf16_pair(product(gates.x & 0xffff, up[0] + bias),
                                 product(gates.x >> 16, up[1] + bias)),
                       bf16_pair(product(gates.y & 0xffff, up[2] + bias),
                                 product(gates.y >> 16, up[3] + bias)));
        }
    }

    __device__ __forceinline__ static float product(unsigned gate, float up) {
        return gate ? bf16_value(gate) * rounded(up) : 0.f;
    }

    Places at_;                        // addresses
    int neurons_, tokens_, sum_step_;  // of the cluster; there is room for; floats of a neuron
    int rank_, group_;
    int first_, first_slab_, num_slabs_, most_slabs_;  // neuron of the cluster; slabs of the block
};

}  // namespace

extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(few::kThreads, 1)
    few_hidden_hopper(const __grid_constant__ TensorMap x_map,
                      const __grid_constant__ TensorMap gate_map, const unsigned short* w_up,
                      const unsigned short* w_down, const unsigned short* b_gate,
                      const unsigned short* b_up, int M, int N, int K, int rows, int stages,
                      int octets, unsigned short* hidden, unsigned short* fired, int* counts) {
    extern __shared__ uint4 memory[];
    Hidden state;
    state.x_map = &x_map, state.gate_map = &gate_map, state.w_up = w_up, state.w_down = w_down;
    state.b_gate = b_gate, state.b_up = b_up;
    state.M = M, state.N = N, state.K = K;
    state.rows = rows, state.stages = stages, state.octets = octets;
    state.hidden = hidden, state.fired = fired, state.counts = counts;
    state.run(memory);
}
