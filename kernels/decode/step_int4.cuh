// step over int4 weights: step.cuh says what a step is, step_codes.cuh how its weights lie.
#pragma once

#include "decode/step_codes_ffn.cuh"

namespace {
using Ffn = CodesFfn;
}  // namespace

#include "decode/step_layers.cuh"
