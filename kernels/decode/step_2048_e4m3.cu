// step_2048 over e4m3 weights: another list of entries.
#include "decode/step_2048.cu"
