// Which of several blocks comes last.
#pragma once

// Takes a ticket of `count`: the last one comes after all the others' writes, and finds the tickets
// as they were before the first.
__device__ __forceinline__ unsigned take_ticket(unsigned* tickets, unsigned count) {
    unsigned ticket;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(tickets), "r"(count - 1)
                 : "memory");
    return ticket;
}
