// Checksums that ops take of what they read or write anyway.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace layerzero {

// Memory for `count` checksums (-1: any number) in a contiguous int64 tensor.
uint64_t* check_sums(const Handle& sums, const char* op, int64_t count);

// Threads add to one checksum in any order: the sum is the same.
inline void add_to(uint64_t* sum, uint64_t value) {
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

}  // namespace layerzero
