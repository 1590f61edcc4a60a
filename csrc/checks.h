// What an op refuses, with values, before anything is written.
//
// A refusal is std::invalid_argument, which reaches Python as ValueError, from torch 2.15 on as
// RuntimeError.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "tensors.h"

namespace layerzero {

template <class... Parts>
[[noreturn]] inline void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// Refuses what is not float32, float16, bfloat16 or float64. The text names it by `op`, `noun` and,
// unless that is -1, `index`.
layerzero_dtype dtype_of(const Handle& tensor, const char* op, const char* noun, int64_t index);

// The output of an op: contiguous, of a dtype that the kernels know.
struct Output {
  void* data;
  int64_t numel;
  layerzero_dtype dtype;
  Device device;
  int64_t nbytes() const { return numel * size_of(dtype); }
};
Output check_output(const Handle& out, const char* op);

// Memory of a contiguous tensor on `device`; null if it has no elements.
void* memory_of(const Handle& tensor, const char* op, const char* noun, Device device);

// All sources of a launch, checked: one dtype, the output's device, apart from the output's memory.
struct Sources {
  std::vector<const void*> data;  // contiguous; null: a source without elements
  std::vector<int64_t> numels;
  layerzero_dtype dtype = LZ_FLOAT32;
};

struct SourceRules {
  const char* op;
  const char* noun;    // what the op calls a source
  bool may_be_output;  // a source may be exactly the output
  int64_t numel;       // that every source must have; -1: any
};

// Sources that the kernel cannot read in place are copied first; the copies live as long as `list`.
// Empty sources may have any dtype and device: nothing of them is read.
Sources check_sources(TensorList& list, const Output& out, const SourceRules& rules);

}  // namespace layerzero
