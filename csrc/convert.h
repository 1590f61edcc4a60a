// The arithmetic of packing, ordered sums and checksums on the CPU, in the best version that this
// processor can run.
//
//     value = cast(compute(source) * scale), one rounding
//
// compute is float64 for a float64 source and float32 for the others. A float64 value reaches a
// 16-bit type through float32, as torch's own cast does.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace layerzero {

// Bytes moved: n * (size of source + size of output), each once. `ahead`: n elements that will be
// read soon, fetched into the cache line by line by conversions; null: none. Only a hint: whatever
// lies there, nothing is read.
using Copy = void (*)(const void* src, void* dst, int64_t n, double scale, const void* ahead);

// dst[begin + i] = cast(scale * (parts[0][begin + i] + parts[1][begin + i] + ...)), i < n. dst may
// be one of the parts.
using Sum = void (*)(const void* const* parts, int64_t num_parts, int64_t begin, int64_t n,
                     void* dst, double scale);

// The sum of the bytes as 64-bit words, modulo 2^64; the end counts as a word that zeros complete.
using SumWords = uint64_t (*)(const void* data, int64_t nbytes);

struct Kernels {
  Copy copy[4][4];    // [source dtype][output dtype], numbered as in dtypes.h
  Copy stream[4][4];  // the same with stores past the cache
  Sum sum[4][4];
  SumWords sum_words;
  bool avx2;  // whether this is the set for AVX2
};

const Kernels& kernels();

// Whether a test asked for what runs on any processor.
bool baseline_is_forced();

}  // namespace layerzero
