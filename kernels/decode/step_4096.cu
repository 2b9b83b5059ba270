// step (step.cuh) for models of hidden size 4096.
#include "spec.cuh"
#include "decode/step.cuh"

TWELL_ENTRIES(TWELL_STEP)
