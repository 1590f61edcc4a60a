// The boxed kernels that module.cpp and pack_cuda.cpp register, and what they share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "checks.h"

namespace layerzero {

void pack_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void ordered_sum_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void flat_step_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void sum_squares_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void crc32_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void copy_crc32_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void word_sums_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);
void find_changed_cpu(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs);

struct SegsShape {
  const int64_t* rows;  // on the device of out
  int64_t num_segs;
};
SegsShape check_segs_shape(const Handle& segs, const Output& out);

// Call `work(begin, end)` on disjoint ranges that cover [0, numel), in the threads of torch's own
// pool. Ranges begin at multiples of `unit`; with less than 2 * `min_per_thread` elements it is one
// call in this thread. `work` must not throw.
template <class Work>
void parallel_units(int64_t numel, int64_t unit, int64_t min_per_thread, const Work& work) {
  if (numel < 2 * min_per_thread) return work(0, numel);
  auto units = [&](int64_t begin, int64_t end) { work(begin * unit, std::min(end * unit, numel)); };
  // The stable ABI's parallel_for, not at::parallel_for: that one is inline in a header and,
  // without -fopenmp, silently serial.
  using Units = decltype(units);
  check_call(
      torch_parallel_for(
          0, (numel + unit - 1) / unit, min_per_thread / unit,
          [](int64_t begin, int64_t end, void* all) { (*static_cast<Units*>(all))(begin, end); },
          &units),
      "parallel_for");
}

}  // namespace layerzero
