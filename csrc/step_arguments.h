// The arguments of flat_step_, unboxed and checked; for the CPU and for CUDA.
#pragma once

#include "checks.h"
#include "step.h"

namespace layerzero {

// Owns the tensors that `job` points into.
struct StepArguments {
  explicit StepArguments(StableIValue* stack);

  std::vector<Handle> held;
  TensorList states;
  TensorList scales;
  Output main;
  int64_t num_rows = 0;
  const float* factor = nullptr;  // on main's device; null: 1
  StepJob job{};
};

}  // namespace layerzero
