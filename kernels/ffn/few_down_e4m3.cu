// few_down over e4m3 weights: another list of entries.
#include "ffn/few_down.cu"
