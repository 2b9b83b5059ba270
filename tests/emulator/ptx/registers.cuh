#pragma once

template <int NUM_REGISTERS>
inline void give_registers() {}

template <int NUM_REGISTERS>
inline void take_registers() {}
