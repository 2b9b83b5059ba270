// step over int4 weights: step.cuh says what a step is, step_codes.cuh how its weights lie, and
// step_head.cuh the head's, which are of 8 bits.
#pragma once

#include "decode/step_head.cuh"

namespace {
using Ffn = CodesHead;
}  // namespace

#include "decode/step_layers.cuh"
