// The arithmetic of flat_step_, one element at a time: shared by the CPU and the CUDA kernels.
//
// Products and sums round as written; where one rounding is meant, it says `fused`. That is the
// arithmetic of torch's fused CPU optimizers on a processor with fused multiply-add: they handle
// eight elements at a time in one order of operations, and the last numel % 8 of a tensor in
// another (`last`), which differs in the last bit.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define LZ_MATH __device__ __forceinline__
#else
// Always inline: every caller then compiles it for its own instruction set.
#define LZ_MATH static inline __attribute__((always_inline))
#endif

namespace layerzero {

// Columns of `table`: int64, one row for each range of elements.
//   kMain, kGrad, kState  where the range begins in main, in grad, in the states
//   kNumel                its elements
//   kRow                  its row of `rows`
//   kIndex, kKey          index of its first element in the whole parameter, and which that is
//   kBlock                where its scales begin
enum StepColumn { kMain, kGrad, kState, kNumel, kRow, kIndex, kKey, kBlock, kStepColumns };

// Columns of `rows`: float64, what the ranges of one parameter group and step number share.
enum RowColumn { kRowSign = 8, kRowFlag = 9, kRowStep = 10, kRowColumns = 11 };

constexpr int64_t kQuantNumel = 256;  // elements that share a scale
constexpr int kMaxStates = 3;

enum StepForm { kFullForm, kBfloatForm, kQuantForm };

// What a step of one flat parameter reads and writes.
struct StepFlat {
  char* main;
  const char* grad;
  char* states[kMaxStates];
  float* scales[kMaxStates];
  const int64_t* table;
  int64_t main_numel;
  int64_t num_ranges;
};

// The first range that ends after `position` of main.
LZ_MATH int64_t first_range(const StepFlat& flat, int64_t position) {
  int64_t low = 0;
  int64_t high = flat.num_ranges;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t* const range = flat.table + middle * kStepColumns;
    if (range[kMain] + range[kNumel] <= position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <class To, class From>
LZ_MATH To step_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

#ifdef __CUDA_ARCH__
LZ_MATH float mul(float a, float b) { return __fmul_rn(a, b); }
LZ_MATH float add(float a, float b) { return __fadd_rn(a, b); }
LZ_MATH float div(float a, float b) { return __fdiv_rn(a, b); }
LZ_MATH float root(float a) { return __fsqrt_rn(a); }
LZ_MATH float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LZ_MATH double mul(double a, double b) { return __dmul_rn(a, b); }
LZ_MATH double add(double a, double b) { return __dadd_rn(a, b); }
LZ_MATH double div(double a, double b) { return __ddiv_rn(a, b); }
LZ_MATH double root(double a) { return __dsqrt_rn(a); }
#else
template <class T>
LZ_MATH T mul(T a, T b) {
  return a * b;
}
template <class T>
LZ_MATH T add(T a, T b) {
  return a + b;
}
template <class T>
LZ_MATH T div(T a, T b) {
  return a / b;
}
LZ_MATH float root(float a) { return __builtin_sqrtf(a); }
LZ_MATH double root(double a) { return __builtin_sqrt(a); }
LZ_MATH float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
// float64 rounds twice: plain torch, which is the reference, has no fused float64.
LZ_MATH double fused(double a, double b, double c) { return add(mul(a, b), c); }

// One row of `rows` in the dtype of the computation; `sign` also has the factor that clips: a
// product with -1 rounds nothing.
template <class T>
struct StepRow {
  T k[8];
  T sign;
  bool flag;
};

template <class T>
LZ_MATH StepRow<T> step_row(const double* row, T factor) {
  StepRow<T> result;
  for (int i = 0; i < 8; ++i) result.k[i] = static_cast<T>(row[i]);
  result.sign = mul(static_cast<T>(row[kRowSign]), factor);
  result.flag = row[kRowFlag] != 0.0;
  return result;
}

// k: 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, -lr / correction1, sqrt(correction2), eps,
// 1 / sqrt(correction2). With states in fewer bits, which have no torch to agree with (`kSmall`),
// that factor takes the place of a division: dividers are what one core waits for.
template <class T, bool kAmsgrad, bool kSmall>
LZ_MATH void adamw_element(const StepRow<T>& row, T gradient, T& p, T& m, T& v, T& most,
                           bool last) {
  const T g = mul(gradient, row.sign);
  const T weight = row.k[1];
  const bool small = (weight < 0 ? -weight : weight) < T(0.5);
  m = fused(small ? weight : add(weight, T(-1)), add(g, -m), small ? m : g);
  const T part = mul(row.k[3], g);
  v = last ? fused(v, row.k[2], mul(part, g)) : fused(part, g, mul(v, row.k[2]));
  T largest = v;
  if (kAmsgrad) {
    // As torch's maximum: a NaN on either side stays.
    most = most > v || most != most ? most : v;
    largest = most;
  }
  const T divisor = kSmall ? fused(root(largest), row.k[7], row.k[6])
                           : add(div(root(largest), row.k[5]), row.k[6]);
  p = add(mul(p, row.k[0]), div(mul(row.k[4], m), divisor));
}

struct StepKeys {
  uint32_t first;
  uint32_t second;
};

LZ_MATH uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// For the elements that share the upper half of their index in the whole parameter.
LZ_MATH StepKeys step_keys(int64_t seed, int64_t key, int64_t step, int64_t index) {
  uint64_t x = mix64(static_cast<uint64_t>(seed));
  x = mix64(x ^ static_cast<uint64_t>(key));
  x = mix64(x ^ static_cast<uint64_t>(step));
  x = mix64(x ^ (static_cast<uint64_t>(index) >> 32));
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
}

// 32 bits for the element whose index ends with these 32 bits.
LZ_MATH uint32_t step_random(StepKeys keys, uint32_t index) {
  uint32_t x = (index ^ keys.first) * 0x9E3779B1u;
  x = ((x ^ (x >> 15)) + keys.second) * 0x85EBCA6Bu;
  return x ^ (x >> 16);
}

// The second state takes the other half first. The largest squares take the bits of the squares
// that they come from, so that equal values are rounded alike.
LZ_MATH uint32_t random_of_state(uint32_t random, int state) {
  return state == 0 ? random : (random >> 16) | (random << 16);
}

// bfloat16, rounded up with the probability that makes the mean exact. Infinities stay, and NaN as
// arithmetic makes it, whose first bit of fraction is 1.
LZ_MATH uint16_t bfloat_at_random(float value, uint32_t random) {
  const uint32_t bits = step_bits<uint32_t>(value);
  const uint32_t between = (bits & 0x7F800000u) == 0x7F800000u ? 0u : random & 0xFFFFu;
  return static_cast<uint16_t>((bits + between) >> 16);
}

LZ_MATH float bfloat_value(uint16_t bits) {
  return step_bits<float>(static_cast<uint32_t>(bits) << 16);
}

// Eight bits, relative to the largest magnitude of the block: code 0 is 0, and the others are the
// upper bits of a float32 from 1 (the largest code) downwards, with 3 bits of fraction. Signed: 1
// bit of sign and 16 powers of two; unsigned, for averages of squares: 32 powers of two.
template <bool kSigned>
struct Quant {
  static constexpr uint32_t kLargest = kSigned ? 127 : 255;
  static constexpr uint32_t kBase = (0x3F800000u >> 20) - kLargest;
};

template <bool kSigned>
LZ_MATH float quant_value(uint8_t code, float scale) {
  const uint32_t magnitude = code & Quant<kSigned>::kLargest;
  const float unit = step_bits<float>((magnitude + Quant<kSigned>::kBase) << 20);
  const float value = magnitude == 0 ? 0.0f : mul(unit, scale);
  return kSigned && (code & 0x80u) != 0 ? -value : value;
}

// What values are multiplied by to become parts of `scale`. 0 for a scale below the normal numbers,
// whose inverse may be none: such states become 0.
LZ_MATH float quant_inverse(float scale) { return scale < 0x1p-126f ? 0.0f : div(1.0f, scale); }

// `inverse`: of a scale >= |value|. `random`: its 20 lower bits decide what is between two codes.
template <bool kSigned>
LZ_MATH uint8_t quant_code(float value, float inverse, uint32_t random) {
  const uint32_t bits = step_bits<uint32_t>(value);
  const float unit = mul(step_bits<float>(bits & 0x7FFFFFFFu), inverse);
  const uint32_t upper = (step_bits<uint32_t>(unit) + (random & 0xFFFFFu)) >> 20;
  int32_t code = static_cast<int32_t>(upper) - static_cast<int32_t>(Quant<kSigned>::kBase);
  code = code < 0 ? 0 : code;
  code = code > static_cast<int32_t>(Quant<kSigned>::kLargest)
             ? static_cast<int32_t>(Quant<kSigned>::kLargest)
             : code;
  return static_cast<uint8_t>(static_cast<uint32_t>(code) | (kSigned ? bits >> 24 & 0x80u : 0u));
}

// The bits of |value|, whose order is that of the magnitudes, with NaN above infinity.
LZ_MATH uint32_t magnitude_bits(float value) { return step_bits<uint32_t>(value) & 0x7FFFFFFFu; }

// The average of gradients is; those of squares are not.
LZ_MATH constexpr bool state_is_signed(int state) { return state == 0; }

}  // namespace layerzero
