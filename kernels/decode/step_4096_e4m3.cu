// step_4096 over e4m3 weights: another list of entries.
#include "decode/step_4096.cu"
