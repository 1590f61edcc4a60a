// One optimizer step of flat parameters: what a lane does. Arithmetic: ../step_math.h.
//
// A warp owns a window of 1024 elements of a `main`, and steps the segments that begin in it.
// Segments are parts of a range: blocks of 256 of the whole parameter's elements, which 8-bit
// states share a scale over, less at the ends of the range.
//
//   main      | window 0        | window 1        | window 2        |
//   segments   |range 0 |range 1    :         :  |range 2   :           warp 0 steps three of them
//
// Of a whole segment whose parts are aligned, as layouts make them, a lane steps two groups of four
// elements, 16 bytes of float32 in one access; of another one every 32nd element. With 8-bit states
// it keeps the new states, the warp finds the largest, and the lane then writes codes;
// tests/ops/emulate.cpp takes the warp's part. Bytes moved: see ../step.cpp.
#pragma once

#include <type_traits>

#include "../step_math.h"
#include "elements.h"

namespace layerzero {

constexpr int kSegmentNumel = 256;
constexpr int kWindowNumel = 4 * kSegmentNumel;
constexpr int kLaneNumel = kSegmentNumel / kWarpThreads;
constexpr int kStepGroup = 4;
constexpr int kRowWindow = 32;   // rows that one launch carries in its parameters
constexpr int kFlatWindow = 32;  // and flat parameters
constexpr int kAny = -1;

// What all flat parameters of a launch share.
struct StepCall {
  const float* factor;  // null: 1
  int64_t seed;
  float grad_scale;
  int form;
  int dtype;
  int num_states;
};

// A flat parameter, and its rows on the host.
struct StepInput {
  StepFlat flat;
  const double* rows;
  int64_t num_rows;
};

template <class T>
struct StepOptions {
  StepRow<T> row;
  int64_t step;
};

template <class T>
struct StepParams {
  struct Entry {
    StepFlat flat;
    int64_t row_begin;  // the first of its rows that this launch has
    int num_rows;       // how many
    int rows_at;        // and where
    int64_t block_end;  // blocks of this entry and those before
  };
  StepCall call;
  int num_entries;
  int num_rows;
  Entry entries[kFlatWindow];
  StepOptions<T> rows[kRowWindow];
};
static_assert(sizeof(StepParams<double>) <= 32764, "more than a kernel may take");

// Calls `launch(params, blocks)`, which returns 0 or an error, for as few launches as hold all.
template <class T, class Launch>
inline int launch_steps(const StepCall& call, const StepInput* inputs, int64_t count,
                        Launch&& launch) {
  constexpr int64_t kBlockNumel = int64_t{kWindowNumel} * kBlockWarps;
  StepParams<T> params;
  params.call = call;
  params.num_entries = params.num_rows = 0;
  int64_t blocks = 0;
  const StepInput* last = nullptr;  // the one before, of this launch
  const auto flush = [&] {
    const int error = params.num_entries == 0 ? 0 : launch(params, blocks);
    params.num_entries = params.num_rows = 0;
    blocks = 0;
    return error;
  };
  for (int64_t i = 0; i < count; ++i) {
    const StepInput& input = inputs[i];
    const int64_t more = (input.flat.main_numel + kBlockNumel - 1) / kBlockNumel;
    if (more == 0 || input.flat.num_ranges == 0) continue;
    for (int64_t begin = 0; begin < input.num_rows; begin += kRowWindow) {
      const int64_t left = input.num_rows - begin;
      const int num_rows = static_cast<int>(left < kRowWindow ? left : kRowWindow);
      // Flat parameters of one optimizer mostly share their rows.
      bool shares = last != nullptr && input.num_rows <= kRowWindow && input.rows == last->rows &&
                    input.num_rows == last->num_rows;
      if (params.num_entries == kFlatWindow || blocks + more > INT32_MAX ||
          (!shares && params.num_rows + num_rows > kRowWindow)) {
        if (const int error = flush()) return error;
        shares = false;
      }
      const int at = shares ? params.entries[params.num_entries - 1].rows_at : params.num_rows;
      for (int r = 0; r < num_rows && !shares; ++r) {
        const double* const row = input.rows + (begin + r) * kRowColumns;
        StepOptions<T>& to = params.rows[params.num_rows++];
        for (int k = 0; k < 8; ++k) to.row.k[k] = static_cast<T>(row[k]);
        to.row.sign = static_cast<T>(row[kRowSign]);
        to.row.flag = row[kRowFlag] != 0.0;
        to.step = static_cast<int64_t>(row[kRowStep]);
      }
      blocks += more;
      last = &input;
      params.entries[params.num_entries++] = {input.flat, begin, num_rows, at, blocks};
    }
  }
  return flush();
}

// What a kernel is compiled for. kAny: it looks at the call, and takes elements one by one.
template <class Compute, int kForm, int kDtype>
struct StepOf {
  using T = Compute;
  static constexpr bool kIsAny = kForm == kAny;
  static constexpr int kMainDtype = kDtype;
  static constexpr int kStates = kIsAny ? kMaxStates : 2;
  static LZ_BODY int form(const StepCall& call) { return kIsAny ? call.form : kForm; }
  static LZ_BODY int dtype(const StepCall& call) { return kIsAny ? call.dtype : kDtype; }
};

template <int kDtype, class Launch>
int dispatch_form(const Launch& launch, const StepCall& call, const StepInput* inputs,
                  int64_t count) {
  switch (call.form) {
    case kFullForm:
      return launch.template run<StepOf<float, kFullForm, kDtype>>(call, inputs, count);
    case kBfloatForm:
      return launch.template run<StepOf<float, kBfloatForm, kDtype>>(call, inputs, count);
    default: return launch.template run<StepOf<float, kQuantForm, kDtype>>(call, inputs, count);
  }
}

// Calls `launch.run<Of>` with the kernel for a call: one of its own for what is trained with most,
// otherwise one that looks everything up.
template <class Launch>
int dispatch_step(const Launch& launch, const StepCall& call, const StepInput* inputs,
                  int64_t count) {
  if (call.dtype == LZ_FLOAT64)
    return launch.template run<StepOf<double, kAny, kAny>>(call, inputs, count);
  if (call.num_states == 2) {
    if (call.dtype == LZ_FLOAT32) return dispatch_form<LZ_FLOAT32>(launch, call, inputs, count);
    if (call.dtype == LZ_BFLOAT16) return dispatch_form<LZ_BFLOAT16>(launch, call, inputs, count);
  }
  return launch.template run<StepOf<float, kAny, kAny>>(call, inputs, count);
}

// Calls `visit(Format)` for a dtype that is known to the compiler, or looked up; float64 alone
// where kWithDouble.
template <int kDtype, bool kWithDouble = true, class Visit>
LZ_BODY void with_format(int dtype, Visit&& visit) {
  if constexpr (kDtype != kAny) {
    visit(Format<kDtype>());
  } else {
    switch (dtype) {
      case LZ_FLOAT64: visit(Format<LZ_FLOAT64>()); break;
      case LZ_FLOAT16: visit(Format<LZ_FLOAT16>()); break;
      case LZ_BFLOAT16: visit(Format<LZ_BFLOAT16>()); break;
      default: visit(Format<LZ_FLOAT32>());
    }
  }
}

// Where element `k` of a lane is in its segment.
template <bool kWide>
LZ_BODY int place_of(int lane, int k) {
  return kWide ? k / kStepGroup * (kStepGroup * kWarpThreads) + lane * kStepGroup + k % kStepGroup
               : k * kWarpThreads + lane;
}

LZ_BODY constexpr int access_of(int nbytes) { return nbytes < 16 ? nbytes : 16; }

// Calls `use(k, bits)` for the elements of a lane; `from`: the segment's first.
template <class Bits, bool kWide, class Use>
LZ_BODY void load_lane(const char* from, int lane, int count, Use&& use) {
  if constexpr (kWide) {
    constexpr int kBytes = kStepGroup * static_cast<int>(sizeof(Bits));
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; k += kStepGroup) {
      uint32_t words[kBytes / 4];
      load_words<kBytes, access_of(kBytes)>(words, from + place_of<true>(lane, k) * sizeof(Bits));
      LZ_UNROLL
      for (int i = 0; i < kStepGroup; ++i) use(k + i, get_element<Bits>(words, i));
    }
  } else {
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; ++k) {
      const int i = place_of<false>(lane, k);
      if (i < count) use(k, load_element<Bits>(from, i));
    }
  }
}

// Writes the elements of a lane, `make(k)`.
template <class Bits, bool kWide, class Make>
LZ_BODY void store_lane(char* to, int lane, int count, Make&& make) {
  if constexpr (kWide) {
    constexpr int kBytes = kStepGroup * static_cast<int>(sizeof(Bits));
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; k += kStepGroup) {
      uint32_t words[kBytes / 4] = {};
      LZ_UNROLL
      for (int i = 0; i < kStepGroup; ++i) set_element<Bits>(words, i, make(k + i));
      store_words<kBytes, access_of(kBytes)>(to + place_of<true>(lane, k) * sizeof(Bits), words);
    }
  } else {
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; ++k) {
      const int i = place_of<false>(lane, k);
      if (i < count) reinterpret_cast<Bits*>(to)[i] = make(k);
    }
  }
}

// A part of a range, of one block: elements [first, first + count). What is in the table is looked
// up where it is used: it lies in the first cache, and registers are what bounds the warps in
// flight.
struct Segment {
  const int64_t* range;
  int64_t first;
  int count;
  int last_from;  // its elements from here on are the last of a tensor

  LZ_BODY int64_t at(int column) const { return range[column] + first; }  // kMain, kIndex, ...
  LZ_BODY int64_t block() const {
    return range[kBlock] + at(kIndex) / kQuantNumel - range[kIndex] / kQuantNumel;
  }
};

LZ_BODY Segment segment_of(const int64_t* range, int64_t first) {
  const int64_t left = kSegmentNumel - (range[kIndex] + first) % kSegmentNumel;
  const int64_t rest = range[kNumel] - first;
  const int64_t whole = range[kNumel] / 8 * 8 - first;
  return {range, first, static_cast<int>(left < rest ? left : rest),
          static_cast<int>(whole < kSegmentNumel ? whole : kSegmentNumel)};
}

LZ_BODY StepKeys keys_of(const StepCall& call, int64_t step, const Segment& segment) {
  return step_keys(call.seed, segment.range[kKey], step, segment.at(kIndex));
}

// What a lane keeps of a segment between the warp's two halves.
template <class Of>
struct LaneStates {
  typename Of::T values[Of::kStates][kLaneNumel];
  uint32_t largest[Of::kStates];  // bits of magnitudes
};

// A row without amsgrad, where another row has it, leaves that state alone; a kernel without it has
// no row with it.
template <class Of>
LZ_BODY int states_of(const StepRow<typename Of::T>& row) {
  return Of::kIsAny && row.flag ? 3 : 2;
}

LZ_BODY int state_size(int form, int full) {
  return form == kFullForm ? full : 2 - (form == kQuantForm);
}
LZ_BODY int dtype_size(int dtype) { return dtype == LZ_FLOAT64 ? 8 : dtype == LZ_FLOAT32 ? 4 : 2; }

// Whether all groups of a whole segment are aligned.
template <class Of>
LZ_BODY bool is_wide(const StepCall& call, const StepFlat& flat,
                     const StepOptions<typename Of::T>& options, const Segment& segment) {
  if (Of::kIsAny || segment.count < kSegmentNumel) return false;
  const int num_states = states_of<Of>(options.row);
  const int size = dtype_size(Of::dtype(call));
  const int held = state_size(Of::form(call), sizeof(typename Of::T));
  const auto is_fine = [](const void* memory, int64_t place, int nbytes) {
    return is_aligned(reinterpret_cast<uintptr_t>(memory) + place * nbytes,
                      access_of(nbytes * kStepGroup));
  };
  bool fine =
      is_fine(flat.main, segment.at(kMain), size) && is_fine(flat.grad, segment.at(kGrad), size);
  LZ_UNROLL
  for (int s = 0; s < Of::kStates; ++s)
    if (s < num_states) fine = fine && is_fine(flat.states[s], segment.at(kState), held);
  return fine;
}

template <class Of, bool kWide>
LZ_BODY void load_state(const StepCall& call, const StepFlat& flat, const Segment& segment,
                        int lane, int state, typename Of::T* values) {
  using T = typename Of::T;
  const int form = Of::form(call);
  const char* const memory = flat.states[state] + segment.at(kState) * state_size(form, sizeof(T));
  if (form == kFullForm) {
    using Own = Format<sizeof(T) == 8 ? LZ_FLOAT64 : LZ_FLOAT32>;
    load_lane<typename Own::Bits, kWide>(
        memory, lane, segment.count,
        [&](int k, typename Own::Bits bits) { values[k] = Own::decode(bits); });
  } else if constexpr (sizeof(T) == 4) {
    if (form == kBfloatForm) {
      load_lane<uint16_t, kWide>(memory, lane, segment.count,
                                 [&](int k, uint16_t bits) { values[k] = bfloat_value(bits); });
    } else {
      const float scale = flat.scales[state][segment.block()];
      const bool is_signed = state_is_signed(state);
      load_lane<uint8_t, kWide>(memory, lane, segment.count, [&](int k, uint8_t code) {
        values[k] = is_signed ? quant_value<true>(code, scale) : quant_value<false>(code, scale);
      });
    }
  }
}

template <class Of>
LZ_BODY void update(const StepCall& call, const StepRow<typename Of::T>& row, bool last,
                    typename Of::T g, typename Of::T& p, typename Of::T** s) {
  using T = typename Of::T;
  const bool has_ends = Of::form(call) == kFullForm;
  if (Of::kIsAny && row.flag) {
    if (has_ends)
      adamw_element<T, true, false>(row, g, p, *s[0], *s[1], *s[2], last);
    else
      adamw_element<T, true, true>(row, g, p, *s[0], *s[1], *s[2], false);
  } else {
    if (has_ends)
      adamw_element<T, false, false>(row, g, p, *s[0], *s[1], *s[2], last);
    else
      adamw_element<T, false, true>(row, g, p, *s[0], *s[1], *s[2], false);
  }
}

template <class Of, bool kWide>
LZ_BODY void step_elements(const StepCall& call, const StepFlat& flat,
                           const StepOptions<typename Of::T>& options, const Segment& segment,
                           int lane, LaneStates<Of>& kept) {
  using T = typename Of::T;
  StepRow<T> row = options.row;
  if (call.factor != nullptr) row.sign = mul(row.sign, static_cast<T>(*call.factor));
  const int num_states = states_of<Of>(row);
  const int form = Of::form(call);
  const int size = dtype_size(Of::dtype(call));
  const int count = segment.count;
  char* const main = flat.main + segment.at(kMain) * size;
  T p[kLaneNumel] = {};
  T g[kLaneNumel] = {};
  with_format<Of::kMainDtype>(call.dtype, [&](auto format) {
    using Own = decltype(format);
    using Bits = typename Own::Bits;
    load_lane<Bits, kWide>(main, lane, count,
                           [&](int k, Bits bits) { p[k] = static_cast<T>(Own::decode(bits)); });
    load_lane<Bits, kWide>(flat.grad + segment.at(kGrad) * size, lane, count,
                           [&](int k, Bits bits) { g[k] = static_cast<T>(Own::decode(bits)); });
  });
  LZ_UNROLL
  for (int s = 0; s < Of::kStates; ++s) {
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; ++k) kept.values[s][k] = T(0);
    kept.largest[s] = 0;
    if (s < num_states) load_state<Of, kWide>(call, flat, segment, lane, s, kept.values[s]);
  }
  if (call.grad_scale != 1.0f) {
    const T scale = static_cast<T>(call.grad_scale);
    LZ_UNROLL
    for (int k = 0; k < kLaneNumel; ++k) g[k] = div(g[k], scale);
  }
  LZ_UNROLL
  for (int k = 0; k < kLaneNumel; ++k) {
    const int i = place_of<kWide>(lane, k);
    if (!kWide && i >= count) continue;
    T none = T(0);
    T* s[kMaxStates] = {&none, &none, &none};
    LZ_UNROLL
    for (int state = 0; state < Of::kStates; ++state) s[state] = &kept.values[state][k];
    update<Of>(call, row, i >= segment.last_from, g[k], p[k], s);
    if (form == kQuantForm) {
      LZ_UNROLL
      for (int state = 0; state < Of::kStates; ++state) {
        const uint32_t own = magnitude_bits(static_cast<float>(*s[state]));
        if (own > kept.largest[state]) kept.largest[state] = own;
      }
    }
  }
  with_format<Of::kMainDtype>(call.dtype, [&](auto format) {
    using Own = decltype(format);
    store_lane<typename Own::Bits, kWide>(main, lane, count,
                                          [&](int k) { return Own::encode(p[k]); });
  });
  if (form == kQuantForm) return;
  const StepKeys keys = keys_of(call, options.step, segment);
  LZ_UNROLL
  for (int state = 0; state < Of::kStates; ++state) {
    if (state >= num_states) continue;
    const T* const values = kept.values[state];
    char* const to = flat.states[state] + segment.at(kState) * state_size(form, sizeof(T));
    if (form == kFullForm) {
      using Own = Format<sizeof(T) == 8 ? LZ_FLOAT64 : LZ_FLOAT32>;
      store_lane<typename Own::Bits, kWide>(to, lane, count,
                                            [&](int k) { return Own::encode(values[k]); });
    } else {
      store_lane<uint16_t, kWide>(to, lane, count, [&](int k) {
        const auto low = static_cast<uint32_t>(segment.at(kIndex) + place_of<kWide>(lane, k));
        return bfloat_at_random(static_cast<float>(values[k]),
                                random_of_state(step_random(keys, low), state));
      });
    }
  }
}

// Steps this lane's elements of a segment. States of 8 bits are not written yet.
template <class Of>
LZ_BODY void step_lane(const StepCall& call, const StepFlat& flat,
                       const StepOptions<typename Of::T>& options, const Segment& segment,
                       bool wide, int lane, LaneStates<Of>& kept) {
  if constexpr (!Of::kIsAny) {
    if (wide) return step_elements<Of, true>(call, flat, options, segment, lane, kept);
  }
  step_elements<Of, false>(call, flat, options, segment, lane, kept);
}

// After `kept.largest` is that of all lanes: writes codes and scales of states of 8 bits.
template <class Of>
LZ_BODY void finish_lane(const StepCall& call, const StepFlat& flat,
                         const StepOptions<typename Of::T>& options, const Segment& segment,
                         bool wide, int lane, const LaneStates<Of>& kept) {
  const int num_states = states_of<Of>(options.row);
  const StepKeys keys = keys_of(call, options.step, segment);
  LZ_UNROLL
  for (int state = 0; state < Of::kStates; ++state) {
    if (state >= num_states) continue;
    const float scale = step_bits<float>(kept.largest[state]);
    if (lane == 0) flat.scales[state][segment.block()] = scale;
    const bool is_signed = state_is_signed(state);
    const float inverse = quant_inverse(scale);
    const auto store = [&](auto is_wide) {
      constexpr bool kWide = decltype(is_wide)::value;
      store_lane<uint8_t, kWide>(
          flat.states[state] + segment.at(kState), lane, segment.count, [&](int k) {
            const float value = static_cast<float>(kept.values[state][k]);
            const auto low = static_cast<uint32_t>(segment.at(kIndex) + place_of<kWide>(lane, k));
            const uint32_t random = random_of_state(step_random(keys, low), state);
            return is_signed ? quant_code<true>(value, inverse, random)
                             : quant_code<false>(value, inverse, random);
          });
    };
    if (!Of::kIsAny && wide)
      store(std::true_type());
    else
      store(std::false_type());
  }
}

// Calls `visit(flat, segment, options)` for every segment that begins in the window of a warp, and
// whose row this launch has. The same for all lanes of the warp.
template <class T, class Visit>
LZ_BODY void visit_segments(const StepParams<T>& params, int64_t block, int warp, Visit&& visit) {
  int e = 0;
  while (block >= params.entries[e].block_end) ++e;
  const auto& entry = params.entries[e];
  const StepFlat& flat = entry.flat;
  if (e > 0) block -= params.entries[e - 1].block_end;
  const int64_t begin = (block * kBlockWarps + warp) * kWindowNumel;
  const int64_t end = begin + kWindowNumel;
  if (begin >= flat.main_numel) return;
  const int64_t* range = flat.table + first_range(flat, begin) * kStepColumns;
  for (; range < flat.table + flat.num_ranges * kStepColumns; range += kStepColumns) {
    if (range[kMain] >= end) break;
    const int64_t row = range[kRow] - entry.row_begin;
    if (row < 0 || row >= entry.num_rows) continue;
    const StepOptions<T>& options = params.rows[entry.rows_at + row];
    const int64_t phase = range[kIndex] % kSegmentNumel;
    // The first start at or after `begin`, counted from the start of the range.
    int64_t first = 0;
    if (begin > range[kMain]) {
      const int64_t along = begin - range[kMain] + phase;
      first = (along + kSegmentNumel - 1) / kSegmentNumel * kSegmentNumel - phase;
    }
    while (first < range[kNumel] && range[kMain] + first < end) {
      const Segment segment = segment_of(range, first);
      visit(flat, segment, options);
      first += segment.count;
    }
  }
}

}  // namespace layerzero
