// attend (attend.cuh) for heads of 192.
#include "spec.cuh"
#include "decode/attend.cuh"

TWELL_ENTRIES(TWELL_ATTEND)
