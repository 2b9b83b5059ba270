// few_gated over e4m3 weights: another list of entries.
#include "decode/few_gated.cu"
