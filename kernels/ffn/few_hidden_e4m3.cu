// few_hidden over e4m3 weights: another list of entries.
#include "ffn/few_hidden.cu"
