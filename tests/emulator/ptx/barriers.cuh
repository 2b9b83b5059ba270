#pragma once

void barrier_init(unsigned barrier, unsigned arrivals);
void barrier_init_fence();
void barrier_expect_bytes(unsigned barrier, unsigned num_bytes);
bool barrier_is_over(unsigned barrier, unsigned parity);
void barrier_wait(unsigned barrier, unsigned parity);
inline void barrier_arrive(unsigned barrier) { barrier_expect_bytes(barrier, 0); }
inline void sync_some(int which, int num_threads) { emulator::meet_in_block(which, num_threads); }
