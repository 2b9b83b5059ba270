// step (step.cuh) for models of hidden size 2048.
#include "spec.cuh"
#include "decode/step.cuh"

TWELL_ENTRIES(TWELL_STEP)
