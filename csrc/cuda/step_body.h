// One optimizer step of a flat parameter: what a lane does. Arithmetic: ../step_math.h.
//
// A warp owns a window of 256 elements of `main`, and steps the segments that begin in it. Segments
// are parts of a range: blocks of 256 of the whole parameter's elements, which 8-bit states share a
// scale over, less at the ends of the range.
//
//   main      | window 0        | window 1        | window 2        |
//   segments   |range 0 |range 1    :         :  |range 2   :           warp 0 steps three of them
//
// A lane steps every 32nd element of a segment. With 8-bit states it keeps the new states, the warp
// finds the largest, and the lane then writes codes; tests/ops/emulate.cpp takes the warp's part.
// Bytes moved: see ../step.cpp.
#pragma once

#include "../step_math.h"
#include "elements.h"

namespace layerzero {

constexpr int kSegmentNumel = 256;
constexpr int kLaneNumel = kSegmentNumel / kWarpThreads;
constexpr int kMaxStates = 3;
constexpr int kRowWindow = 32;  // rows that one launch carries in its parameters

enum StepForm { kFullForm, kBfloatForm, kQuantForm };

struct StepCall {
  char* main;
  const char* grad;
  char* states[kMaxStates];
  float* scales[kMaxStates];
  char* copy;  // null: none
  float* edges;
  const int64_t* table;
  const float* factor;  // null: 1
  int64_t main_numel;
  int64_t num_ranges;
  int64_t seed;
  float grad_scale;
  int kind;
  int form;
  int dtype;
  int copy_dtype;
  int num_states;
  int phase;
};

struct StepParams {
  StepCall call;
  int64_t row_begin;  // the first row that this launch has
  int64_t num_rows;   // and how many
  double rows[kRowWindow * kRowColumns];
};
static_assert(sizeof(StepParams) <= 4096, "more than any device's kernels may take");

inline int64_t step_blocks(int64_t numel) {
  constexpr int64_t kBlockNumel = int64_t{kSegmentNumel} * kBlockWarps;
  return numel / kBlockNumel + (numel % kBlockNumel != 0);
}

template <class T>
LZ_BODY T load_as(const char* memory, int dtype, int64_t i) {
  switch (dtype) {
    case LZ_FLOAT64: return static_cast<T>(reinterpret_cast<const double*>(memory)[i]);
    case LZ_FLOAT16:
      return static_cast<T>(
          Format<LZ_FLOAT16>::decode(reinterpret_cast<const uint16_t*>(memory)[i]));
    case LZ_BFLOAT16:
      return static_cast<T>(
          Format<LZ_BFLOAT16>::decode(reinterpret_cast<const uint16_t*>(memory)[i]));
    default: return static_cast<T>(reinterpret_cast<const float*>(memory)[i]);
  }
}

template <class T>
LZ_BODY void store_as(char* memory, int dtype, int64_t i, T value) {
  switch (dtype) {
    case LZ_FLOAT64: reinterpret_cast<double*>(memory)[i] = static_cast<double>(value); break;
    case LZ_FLOAT16:
      reinterpret_cast<uint16_t*>(memory)[i] = Format<LZ_FLOAT16>::encode(value);
      break;
    case LZ_BFLOAT16:
      reinterpret_cast<uint16_t*>(memory)[i] = Format<LZ_BFLOAT16>::encode(value);
      break;
    default: reinterpret_cast<float*>(memory)[i] = static_cast<float>(value);
  }
}

template <class T>
LZ_BODY T load_state(const StepCall& call, int state, int64_t place, int64_t block) {
  const char* const memory = call.states[state];
  if (sizeof(T) == 8 || call.form == kFullForm) return reinterpret_cast<const T*>(memory)[place];
  if (call.form == kBfloatForm)
    return static_cast<T>(bfloat_value(reinterpret_cast<const uint16_t*>(memory)[place]));
  const uint8_t code = reinterpret_cast<const uint8_t*>(memory)[place];
  const float scale = call.scales[state][block];
  return static_cast<T>(state_is_signed(call.kind, state) ? quant_value<true>(code, scale)
                                                          : quant_value<false>(code, scale));
}

// A part of a range: elements [first, first + count), of one block.
struct Segment {
  const int64_t* range;
  int64_t first;
  int count;
  int64_t block;
};

LZ_BODY Segment segment_of(const int64_t* range, int64_t first) {
  const int64_t index = range[kIndex] + first;
  const int64_t left = kSegmentNumel - index % kSegmentNumel;
  const int64_t rest = range[kNumel] - first;
  return {range, first, static_cast<int>(left < rest ? left : rest),
          range[kBlock] + index / kQuantNumel - range[kIndex] / kQuantNumel};
}

template <class T, bool kAmsgrad>
LZ_BODY void adamw_of(const StepRow<T>& row, T g, T& p, T* s, bool has_ends, bool last) {
  if (!has_ends)
    adamw_element<T, kAmsgrad, false, true>(row, g, p, s[0], s[1], s[2]);
  else if (last)
    adamw_element<T, kAmsgrad, true, false>(row, g, p, s[0], s[1], s[2]);
  else
    adamw_element<T, kAmsgrad, false, false>(row, g, p, s[0], s[1], s[2]);
}

// The new value and states of one element; writes the value, and its copy.
template <class T>
LZ_BODY void step_element(const StepCall& call, const StepRow<T>& row, const Segment& segment,
                          int i, int num_states, T* s) {
  const int64_t* const range = segment.range;
  const int64_t along = segment.first + i;
  const int64_t place = range[kMain] + along;
  T p = load_as<T>(call.main, call.dtype, place);
  T g = load_as<T>(call.grad, call.dtype, range[kGrad] + along);
  if (call.grad_scale != 1.0f) g = div(g, static_cast<T>(call.grad_scale));
  LZ_UNROLL  // A constant bound, here and below: what a number picks at run time is no register.
      for (int state = 0; state < kMaxStates; ++state) s[state] =
          state < num_states ? load_state<T>(call, state, range[kState] + along, segment.block)
                             : T(0);
  const bool has_ends = call.form == kFullForm && call.phase == kStepWithEnds;
  const bool last = has_ends && along >= range[kNumel] / 8 * 8;
  if (call.kind == kAdamW) {
    if (row.flag)
      adamw_of<T, true>(row, g, p, s, has_ends, last);
    else
      adamw_of<T, false>(row, g, p, s, has_ends, last);
  } else if (call.kind == kSgd) {
    if (last)
      sgd_element<T, true>(row, g, p, s[0]);
    else
      sgd_element<T, false>(row, g, p, s[0]);
  } else {
    lion_element<T>(row, g, p, s[0]);
  }
  if (call.phase == kMeasure) return;
  store_as<T>(call.main, call.dtype, place, p);
  if (call.copy != nullptr)
    store_as<T>(call.copy, call.copy_dtype, place, load_as<T>(call.main, call.dtype, place));
}

// What a lane keeps of a segment between the warp's two halves.
template <class T>
struct LaneStates {
  T values[kLaneNumel][kMaxStates];
  uint32_t largest[kMaxStates];  // bits of magnitudes
};

// A row without amsgrad or momentum, where another row has it, leaves that state alone.
LZ_BODY int states_of(const StepCall& call, const double* row) {
  if (call.kind == kAdamW) return row[kRowFlag] == 0.0 ? 2 : 3;
  return call.kind == kSgd && row[1] == 0.0 ? 0 : call.num_states;
}

// Steps this lane's elements of a segment. Float32, float64 and bfloat16 states are written.
template <class T>
LZ_BODY void step_lane(const StepCall& call, const double* values, const Segment& segment, int lane,
                       LaneStates<T>& kept) {
  const T factor = call.factor == nullptr ? T(1) : static_cast<T>(*call.factor);
  const StepRow<T> row = step_row<T>(values, factor);
  const int num_states = states_of(call, values);
  const bool keeps = call.form == kQuantForm || call.phase == kMeasure;
  const int64_t index = segment.range[kIndex] + segment.first;
  const StepKeys keys =
      step_keys(call.seed, segment.range[kKey], static_cast<int64_t>(values[kRowStep]), index);
  for (int state = 0; state < kMaxStates; ++state) kept.largest[state] = 0;
  LZ_UNROLL
  for (int j = 0; j < kLaneNumel; ++j) {
    const int i = lane + j * kWarpThreads;
    if (i >= segment.count) continue;
    T* const s = kept.values[j];
    step_element<T>(call, row, segment, i, num_states, s);
    const int64_t place = segment.range[kState] + segment.first + i;
    LZ_UNROLL
    for (int state = 0; state < kMaxStates; ++state) {
      if (state >= num_states) continue;
      if (keeps) {
        const uint32_t own = magnitude_bits(static_cast<float>(s[state]));
        if (own > kept.largest[state]) kept.largest[state] = own;
      } else if (call.form == kFullForm) {
        reinterpret_cast<T*>(call.states[state])[place] = s[state];
      } else {
        const uint32_t random = step_random(keys, static_cast<uint32_t>(index + i));
        reinterpret_cast<uint16_t*>(call.states[state])[place] =
            bfloat_at_random(static_cast<float>(s[state]), random_of_state(random, state));
      }
    }
  }
}

// After `kept.largest` is that of all lanes: writes codes and scales, or what was measured.
template <class T>
LZ_BODY void finish_lane(const StepCall& call, const double* values, const Segment& segment,
                         int lane, const LaneStates<T>& kept) {
  const int64_t edge = segment.range[kEdge];
  const int num_states = states_of(call, values);
  const int64_t index = segment.range[kIndex] + segment.first;
  const StepKeys keys =
      step_keys(call.seed, segment.range[kKey], static_cast<int64_t>(values[kRowStep]), index);
  LZ_UNROLL
  for (int state = 0; state < kMaxStates; ++state) {
    if (state >= num_states) continue;
    float scale = step_bits<float>(kept.largest[state]);
    if (call.phase == kMeasure) {
      if (lane == 0) call.edges[edge * call.num_states + state] = scale;
      continue;
    }
    if (edge >= 0) scale = call.edges[edge * call.num_states + state];
    if (lane == 0) call.scales[state][segment.block] = scale;
    auto* const codes =
        reinterpret_cast<uint8_t*>(call.states[state]) + segment.range[kState] + segment.first;
    const bool is_signed = state_is_signed(call.kind, state);
    const float inverse = quant_inverse(scale);
    LZ_UNROLL
    for (int j = 0; j < kLaneNumel; ++j) {
      const int i = lane + j * kWarpThreads;
      if (i >= segment.count) continue;
      const float value = static_cast<float>(kept.values[j][state]);
      const uint32_t random =
          random_of_state(step_random(keys, static_cast<uint32_t>(index + i)), state);
      codes[i] = is_signed ? quant_code<true>(value, inverse, random)
                           : quant_code<false>(value, inverse, random);
    }
  }
}

// The first range that ends after `position`.
LZ_BODY int64_t first_range(const StepCall& call, int64_t position) {
  int64_t low = 0;
  int64_t high = call.num_ranges;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t* const range = call.table + middle * kStepColumns;
    if (range[kMain] + range[kNumel] <= position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Calls `visit(segment, row)` for every segment that begins in [begin, end) of main and whose row
// this launch has. The same for all lanes of a warp.
template <class Visit>
LZ_BODY void visit_segments(const StepParams& params, int64_t begin, int64_t end, Visit&& visit) {
  const StepCall& call = params.call;
  for (int64_t i = first_range(call, begin); i < call.num_ranges; ++i) {
    const int64_t* const range = call.table + i * kStepColumns;
    if (range[kMain] >= end) break;
    const int64_t row = range[kRow] - params.row_begin;
    if (row < 0 || row >= params.num_rows) continue;
    const int64_t phase = range[kIndex] % kSegmentNumel;
    // The first start at or after `begin`, counted from the start of the range.
    int64_t first = 0;
    if (begin > range[kMain]) {
      const int64_t along = begin - range[kMain] + phase;
      first = (along + kSegmentNumel - 1) / kSegmentNumel * kSegmentNumel - phase;
    }
    while (first < range[kNumel] && range[kMain] + first < end) {
      const Segment segment = segment_of(range, first);
      visit(segment, params.rows + row * kRowColumns);
      first += segment.count;
    }
  }
}

}  // namespace layerzero
