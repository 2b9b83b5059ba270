// step_3072 over e4m3 weights: another list of entries.
#include "decode/step_3072.cu"
