// step (step.cuh) for models of hidden size 2048.
#define TWELL_STEP_K 2048
#include "decode/step.cuh"

TWELL_STEP(step_2048_64, 64, true)
TWELL_STEP(step_2048_128, 128, true)
TWELL_STEP(step_2048_64_dense, 64, false)
TWELL_STEP(step_2048_128_dense, 128, false)
