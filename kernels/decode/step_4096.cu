// step (step.cuh) for models of hidden size 4096.
#define TWELL_STEP_K 4096
#include "decode/step.cuh"

TWELL_STEP(step_4096_64, 64, true)
TWELL_STEP(step_4096_128, 128, true)
TWELL_STEP(step_4096_64_dense, 64, false)
TWELL_STEP(step_4096_128_dense, 128, false)
