// step_1536 over e4m3 weights: another list of entries.
#include "decode/step_1536.cu"
