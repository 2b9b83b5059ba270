// step_rows (step_rows.cuh) for models of hidden size 2048.
#include "decode/step_rows.cuh"

TWELL_STEP_ROWS(step_rows_2048_64, 64)
TWELL_STEP_ROWS(step_rows_2048_128, 128)
