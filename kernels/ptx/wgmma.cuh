// The tensor core product of a warpgroup: 64 x 256 fp32 sums of 16 bf16 products, both operands in
// shared memory as the copy engine leaves boxes of 64 columns there: 128 bytes a row, 128-byte
// swizzle, 1024-aligned. Rows lie by themselves (K-major: what is summed over lies along a row). So
// do columns, or they lie across (MN-major): a row of a box has 64 of them for one of what is
// summed over.
//
// Thread `lane` of warp `warp` holds of the 64 x 256 tile, with g = lane / 4 and t = lane % 4:
//   d[4 j + 0], d[4 j + 1]   row 16 warp + g        columns 8 j + 2 t, 8 j + 2 t + 1
//   d[4 j + 2], d[4 j + 3]   row 16 warp + g + 8    the same columns
#pragma once

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define TWELL_SUMS(I)                                                                           \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
        "+f"(d[I + 6]), "+f"(d[I + 7]), "+f"(d[I + 8]), "+f"(d[I + 9]), "+f"(d[I + 10]),        \
        "+f"(d[I + 11]), "+f"(d[I + 12]), "+f"(d[I + 13]), "+f"(d[I + 14]), "+f"(d[I + 15])

#define TWELL_PLACES                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"     \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33,"     \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"     \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65,"     \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81,"     \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97,"     \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"   \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125," \
    "%126, %127},"

// d = (add ? d : 0) + rows[64, 16] columns[256, 16]^T, or columns[16, 256] that lie across
template <int COLUMNS_ACROSS>
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[128], unsigned long long rows,
                                                unsigned long long columns, int add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TWELL_PLACES
        " %128, %129, add, 1, 1, 0, %131;\n"
        "}"
        : TWELL_SUMS(0), TWELL_SUMS(16), TWELL_SUMS(32), TWELL_SUMS(48), TWELL_SUMS(64),
          TWELL_SUMS(80), TWELL_SUMS(96), TWELL_SUMS(112)
        : "l"(rows), "l"(columns), "r"(add), "n"(COLUMNS_ACROSS));
}

#undef TWELL_PLACES
#undef TWELL_SUMS
