#pragma once

// They land when the thread waits for them, or before.
void copy_async_or_zero(bool wanted, unsigned smem_to, const void* from);
void commit_copies();
namespace emulator {
void wait_for_copies(int pending);
}

inline void copy_async(unsigned smem_to, const void* from) {
    copy_async_or_zero(true, smem_to, from);
}
inline void copy_async_if(bool wanted, unsigned smem_to, const void* from) {
    if (wanted) copy_async(smem_to, from);
}
template <int PENDING>
inline void wait_for_copies() {
    emulator::wait_for_copies(PENDING);
}
