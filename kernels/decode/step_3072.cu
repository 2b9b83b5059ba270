// step (step.cuh) for models of hidden size 3072.
#define TWELL_STEP_K 3072
#include "decode/step.cuh"

TWELL_STEP(step_3072_64, 64, true)
TWELL_STEP(step_3072_128, 128, true)
TWELL_STEP(step_3072_64_dense, 64, false)
TWELL_STEP(step_3072_128_dense, 128, false)
