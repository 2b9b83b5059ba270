// step (step.cuh) for models of hidden size 1536.
#define TWELL_STEP_K 1536
#include "decode/step.cuh"

TWELL_STEP(step_1536_64, 64, true)
TWELL_STEP(step_1536_128, 128, true)
TWELL_STEP(step_1536_64_dense, 64, false)
TWELL_STEP(step_1536_128_dense, 128, false)
