// attend (attend.cuh) for heads of 96.
#include "spec.cuh"
#include "decode/attend.cuh"

TWELL_ENTRIES(TWELL_ATTEND)
