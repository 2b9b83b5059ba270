// step (step.cuh) for models of hidden size 1536.
#include "spec.cuh"
#include "decode/step.cuh"

TWELL_ENTRIES(TWELL_STEP)
