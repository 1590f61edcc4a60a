// flat_step_ on the CPU: what its arguments file (step.cpp) and its arithmetic (step.inc) share.
#pragma once

#include <cstdint>

#include "convert.h"
#include "step_math.h"

namespace layerzero {

struct StepJob : StepFlat {
  int kind;
  StepForm form;
  layerzero_dtype dtype;  // of main and grad
  int num_states;
  const double* rows;
  float factor;
  float grad_scale;
  int64_t seed;
  StepMode mode;
  const Kernels* kernels;  // for casts
};

// Elements [first, first + n) of range `range`, a row of `table`.
using StepChunk = void (*)(const StepJob& job, const int64_t* range, int64_t first, int64_t n);

// The sum of squares of n <= kSquaresChunk elements, in float64 and in 16 lanes.
using SquaresChunk = double (*)(const void* x, layerzero_dtype dtype, int64_t n);

// out[begin, begin + n) = the sum of parts, times scale; returns the sum of squares of that. For
// n <= kSquaresChunk, with the bits of `Sum` and `SquaresChunk`; `out` may be a part.
using SumSquaresChunk = double (*)(const float* const* parts, int64_t num_parts, int64_t begin,
                                   int64_t n, float* out, float scale);

struct StepKernels {
  StepChunk chunk;
  SquaresChunk squares;
  SumSquaresChunk sum_squares;
};
const StepKernels& step_kernels();

constexpr int64_t kStepChunk = 1024;     // elements at a time, in the first cache
constexpr int64_t kSquaresChunk = 4096;  // elements whose squares are added first

}  // namespace layerzero
