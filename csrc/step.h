// flat_step_ on the CPU: what its arguments file (step.cpp) and its arithmetic (step.inc) share.
#pragma once

#include <cstdint>

#include "convert.h"
#include "step_math.h"

namespace layerzero {

struct StepJob : StepFlat {
  StepForm form;
  layerzero_dtype dtype;  // of main and grad
  int num_states;
  const double* rows;
  float factor;
  float grad_scale;
  int64_t seed;
  const Kernels* kernels;  // for casts
};

// Elements [first, first + n) of range `range`, a row of `table`.
using StepChunk = void (*)(const StepJob& job, const int64_t* range, int64_t first, int64_t n);

// The sum of squares of n <= kSquaresChunk elements, in float64 and in 16 lanes.
using SquaresChunk = double (*)(const void* x, layerzero_dtype dtype, int64_t n);

struct StepKernels {
  StepChunk chunk;
  SquaresChunk squares;
};
const StepKernels& step_kernels();

constexpr int64_t kStepChunk = 1024;     // elements at a time, in the first cache
constexpr int64_t kSquaresChunk = 4096;  // elements whose squares are added first

}  // namespace layerzero
