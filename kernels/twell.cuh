// What the sparse products are built of, for any GPU from sm_80 on: bf16 by its bits, copies into
// shared memory behind the threads' back, and the warp's 16 x 8 x 16 product on tensor cores. One
// instruction a function, no CUDA header. Of a warp, lane = 4 g + t in what follows: g = 0 .. 7 is
// called the quad, t = 0 .. 3 the thread in it.
#pragma once

// ---- bf16

__device__ __forceinline__ float bf16_value(unsigned bits) { return __uint_as_float(bits << 16); }

// Two values rounded to nearest even, the first in the low half.
__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned bf16_bits(float value) {
    return bf16_pair(value, 0.f) & 0xffff;
}

// ---- what fires (README.md): a gate above 0, or NaN, as it is once it is rounded to bf16

__device__ __forceinline__ bool fires(float gate) { return !(gate <= 0.f); }

// The gate where it fires, else +0.
__device__ __forceinline__ float keep_fired(float gate) { return fires(gate) ? gate : 0.f; }

// 0xffff in each half that fires. From sm_90 on.
__device__ __forceinline__ unsigned fires_pair(unsigned gates) {
    unsigned fired;
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(fired) : "r"(gates), "r"(0u));
    return fired;
}

// ---- integers

// a b + c, as one instruction.
__device__ __forceinline__ unsigned scale_and_add(unsigned a, unsigned b, unsigned c) {
    unsigned sum;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Bytes of {high, low}, one for each of the selector's nibbles; a nibble's top bit asks for the
// byte's sign eight times over instead.
__device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high, unsigned selector) {
    unsigned bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// ---- memory

__device__ __forceinline__ unsigned dynamic_smem_bytes() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

__device__ __forceinline__ unsigned smem_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// The same, but the compiler forgets how it was made, and keeps it; else it makes it at each use.
__device__ __forceinline__ unsigned kept_address(const void* pointer) {
    unsigned address = smem_address(pointer);
    asm volatile("" : "+r"(address));
    return address;
}

// Of what nobody writes meanwhile and no other warp here will want: not kept in L1.
__device__ __forceinline__ uint4 load_streamed(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// `index` times `bytes` further on, as one instruction.
template <class T>
__device__ __forceinline__ T* offset_by(T* pointer, unsigned index, unsigned bytes) {
    T* moved;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(moved) : "r"(index), "r"(bytes), "l"(pointer));
    return moved;
}

__device__ __forceinline__ void store_pair(void* to, unsigned low, unsigned high) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint4 load_shared(unsigned smem_from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(smem_from)
                 : "memory");
    return v;
}

__device__ __forceinline__ float load_shared_float(unsigned smem_from) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem_from) : "memory");
    return v;
}

__device__ __forceinline__ unsigned load_shared_byte(unsigned smem_from) {
    unsigned v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(smem_from) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(unsigned smem_to, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_to), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared_word(unsigned to, unsigned word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_half(unsigned smem_to, unsigned v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem_to), "h"(static_cast<unsigned short>(v))
                 : "memory");
}

__device__ __forceinline__ unsigned load_shared_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

__device__ __forceinline__ unsigned load_shared_half(unsigned smem_from) {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem_from));
    return v;
}

__device__ __forceinline__ uint2 load_shared_pair(unsigned smem_from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem_from));
    return v;
}

// Into `word`, or nothing: a predicate, no branch.
__device__ __forceinline__ void load_if(bool wanted, const unsigned* from, unsigned& word) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1];}"
        : "+r"(word)
        : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

// A word, or anything: a predicate, no branch.
__device__ __forceinline__ unsigned load_or_leave(bool wanted, const unsigned* from) {
    unsigned word;
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1];}"
        : "=r"(word)
        : "l"(from), "r"(static_cast<unsigned>(wanted)));
    return word;
}

// Numbers that lie together, or what was there.
__device__ __forceinline__ void load_pair_if(bool wanted, const float* from, float& a, float& b) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.f32 {%0, %1}, [%2];}"
        : "+f"(a), "+f"(b)
        : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

__device__ __forceinline__ void load_four_if(bool wanted, const float* from, float (&v)[4]) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];}"
        : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
        : "l"(from), "r"(static_cast<unsigned>(wanted)));
}

// As `load_if`, of 16 bytes in shared memory.
__device__ __forceinline__ void load_shared_if(bool wanted, unsigned smem_from, uint4& v) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "r"(smem_from), "r"(static_cast<unsigned>(wanted)));
}

__device__ __forceinline__ void prefetch_into_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ void add_to(float* to, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

// The pointer, but the compiler forgets how it was made: an offset to it is one instruction then.
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// ---- copies of 16 bytes that run on while the thread does something else

__device__ __forceinline__ void copy_async(unsigned smem_to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_if(bool wanted, unsigned smem_to, const void* from) {
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(
            smem_to),
        "l"(from), "r"(static_cast<unsigned>(wanted))
        : "memory");
}

// Zeros if not wanted; `from` is not looked at then.
__device__ __forceinline__ void copy_async_or_zero(bool wanted, unsigned smem_to,
                                                   const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_to), "l"(from),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the newest PENDING groups of this thread's copies are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor cores

// Four 8 x 8 matrices of 16 bits, transposed: lane i gives the address of row i % 8 of matrix i / 8
// and gets of each matrix column g, rows 2t and 2t + 1. For memory that does not change any more:
// the compiler may move this.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
        : "r"(smem_row));
}

// The same of memory that changes: all lanes have read when this returns.
__device__ __forceinline__ void read_transposed(unsigned (&m)[4], unsigned smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(smem_row)
                 : "memory");
}

// As they lie: of each matrix row g, columns 2t and 2t + 1. All lanes have read when this returns.
__device__ __forceinline__ void read_matrices(unsigned (&m)[4], unsigned smem_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(smem_row)
                 : "memory");
}

// sums [16, 8] += a [16, 16] b [16, 8], bf16 in and fp32 out. A lane holds, two to a register:
//   a   (row g, columns 2t ..), (row g + 8, 2t ..), (row g, 2t + 8 ..), (row g + 8, 2t + 8 ..)
//   b   (rows 2t .., column g), (rows 2t + 8 .., column g)
//   sums (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1,
                                             unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
