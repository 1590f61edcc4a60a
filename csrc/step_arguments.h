// The arguments of flat_step_, unboxed and checked; for the CPU and for CUDA.
#pragma once

#include "checks.h"
#include "step.h"

namespace layerzero {

// A flat parameter: a job, and how much there is of what it points into.
struct StepFlatArguments {
  StepJob job{};
  Output main;
  int64_t grad_numel = 0;
  int64_t state_numel = 0;
  int64_t num_rows = 0;
  int64_t scale_numels[3] = {};
};

// Owns the tensors that `flats` point into.
struct StepArguments {
  explicit StepArguments(StableIValue* stack);

  TensorList main, grad, states, scales, table, rows;
  Handle factor_tensor;
  std::vector<StepFlatArguments> flats;
  const float* factor = nullptr;  // on main's device; null: 1

 private:
  StepFlatArguments flat_of(size_t i, const StepJob& shared) const;
};

}  // namespace layerzero
