// step (step.cuh) for models of hidden size 3072.
#include "spec.cuh"
#include "decode/step.cuh"

TWELL_ENTRIES(TWELL_STEP)
