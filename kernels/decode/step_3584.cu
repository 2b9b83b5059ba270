// step (step.cuh) for models of hidden size 3584.
#define TWELL_STEP_K 3584
#include "decode/step.cuh"

TWELL_STEP(step_3584_64, 64, true)
TWELL_STEP(step_3584_128, 128, true)
TWELL_STEP(step_3584_64_dense, 64, false)
TWELL_STEP(step_3584_128_dense, 128, false)
