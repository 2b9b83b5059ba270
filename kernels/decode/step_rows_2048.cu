// step_rows (step_rows.cuh) for models of hidden size 2048.
#include "spec.cuh"
#include "decode/step_rows.cuh"

TWELL_ENTRIES(TWELL_STEP_ROWS)
