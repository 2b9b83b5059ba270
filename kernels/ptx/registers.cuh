// Registers that a warpgroup gives back, or takes of those given back (sm_90a).
#pragma once

template <int NUM_REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

template <int NUM_REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}
