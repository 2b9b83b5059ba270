// few_linear over e4m3 weights: another list of entries.
#include "ffn/few_linear.cu"
