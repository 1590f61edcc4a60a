// Runs the body of flat_step_ on the CPU, every lane of every warp in turn, against a plain loop.
//
// For g++ with -fsanitize=address,undefined; every tensor is a heap block of its exact size. The
// loop shares the arithmetic of one element (step_math.h), which tests/ops/test_flat_step.py
// compares with torch; what is checked here is which element goes where, once, with which scale.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "step_body.h"

namespace {

using namespace layerzero;

std::mt19937_64 rng(0);
int64_t num_launches = 0;
int64_t num_checked = 0;
int64_t num_wide = 0;

int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }

template <class T>
T load_as(const char* memory, int dtype, int64_t i) {
  T value = T(0);
  with_format<kAny>(dtype, [&](auto format) {
    using Own = decltype(format);
    value = static_cast<T>(Own::decode(reinterpret_cast<const typename Own::Bits*>(memory)[i]));
  });
  return value;
}

template <class T>
void store_as(char* memory, int dtype, int64_t i, T value) {
  with_format<kAny>(dtype, [&](auto format) {
    using Own = decltype(format);
    reinterpret_cast<typename Own::Bits*>(memory)[i] = Own::encode(value);
  });
}

// `skew` elements before the first: where parts begin decides how lanes move them.
struct Block {
  std::vector<char> bytes;
  size_t skew = 0;

  void resize(int64_t numel, int size, int64_t skewed) {
    skew = static_cast<size_t>(skewed * size);
    bytes.assign(skew + static_cast<size_t>(numel * size), 0);
  }
  char* data() { return bytes.data() + skew; }
};

struct Memory {
  Block main, grad, states[3];
  std::vector<float> scales[3];
};

void fill(Block& block, int dtype, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i)
    store_as<double>(block.data(), dtype, i, static_cast<double>(below(2001) - 1000) / 100.0);
}

struct Setting {
  int form, dtype, num_states;
};

StepFlat flat_of(const Setting& setting, Memory& memory, const std::vector<int64_t>& table,
                 int64_t numel) {
  StepFlat flat{};
  flat.main = memory.main.data();
  flat.grad = memory.grad.data();
  for (int i = 0; i < setting.num_states; ++i) {
    flat.states[i] = memory.states[i].data();
    flat.scales[i] = memory.scales[i].data();
  }
  flat.table = table.data();
  flat.main_numel = numel;
  flat.num_ranges = static_cast<int64_t>(table.size()) / kStepColumns;
  return flat;
}

template <class Of>
void run_warp(const StepCall& call, const StepFlat& flat, const Segment& segment,
              const StepOptions<typename Of::T>& options) {
  std::vector<LaneStates<Of>> lanes(kWarpThreads);
  uint32_t largest[Of::kStates] = {};
  const bool wide = is_wide<Of>(call, flat, options, segment);
  num_wide += wide;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    step_lane<Of>(call, flat, options, segment, wide, lane, lanes[lane]);
    for (int state = 0; state < Of::kStates; ++state)
      if (lanes[lane].largest[state] > largest[state]) largest[state] = lanes[lane].largest[state];
  }
  if (Of::form(call) != kQuantForm) return;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    memcpy(lanes[lane].largest, largest, sizeof(largest));
    finish_lane<Of>(call, flat, options, segment, wide, lane, lanes[lane]);
  }
}

// As step.cu launches it.
struct RunKernel {
  template <class Of>
  int run(const StepCall& call, const StepInput* inputs, int64_t count) const {
    using T = typename Of::T;
    return launch_steps<T>(call, inputs, count, [&](StepParams<T>& params, int64_t blocks) {
      ++num_launches;
      for (int64_t block = 0; block < blocks; ++block)
        for (int warp = 0; warp < kBlockWarps; ++warp)
          visit_segments(
              params, block, warp,
              [&](const StepFlat& flat, const Segment& segment, const StepOptions<T>& options) {
                run_warp<Of>(call, flat, segment, options);
              });
      return 0;
    });
  }
};

// The same, range by range and block by block.
template <class T>
void run_plain(const StepCall& call, const StepFlat& flat, const std::vector<double>& rows) {
  for (int64_t r = 0; r < flat.num_ranges; ++r) {
    const int64_t* const range = flat.table + r * kStepColumns;
    const double* const options = rows.data() + range[kRow] * kRowColumns;
    const StepRow<T> row =
        step_row<T>(options, call.factor == nullptr ? T(1) : static_cast<T>(*call.factor));
    const int num_states = row.flag ? 3 : 2;
    const bool has_ends = call.form == kFullForm;
    for (int64_t begin = 0; begin < range[kNumel];) {
      const int64_t block =
          range[kBlock] + (range[kIndex] + begin) / kQuantNumel - range[kIndex] / kQuantNumel;
      std::vector<T> now;
      uint32_t largest[kMaxStates] = {};
      int64_t end = begin;
      for (; end < range[kNumel]; ++end) {
        if (end > begin && (range[kIndex] + end) % kQuantNumel == 0) break;
        T s[kMaxStates] = {};
        for (int state = 0; state < num_states; ++state) {
          const int64_t place = range[kState] + end;
          const char* const memory = flat.states[state];
          if (call.form == kFullForm) {
            s[state] = reinterpret_cast<const T*>(memory)[place];
          } else if (call.form == kBfloatForm) {
            s[state] = bfloat_value(reinterpret_cast<const uint16_t*>(memory)[place]);
          } else {
            const auto code = static_cast<uint8_t>(memory[place]);
            const float scale = flat.scales[state][block];
            s[state] =
                state == 0 ? quant_value<true>(code, scale) : quant_value<false>(code, scale);
          }
        }
        T p = load_as<T>(flat.main, call.dtype, range[kMain] + end);
        T g = load_as<T>(flat.grad, call.dtype, range[kGrad] + end);
        if (call.grad_scale != 1.0f) g = g / static_cast<T>(call.grad_scale);
        const bool last = has_ends && end >= range[kNumel] / 8 * 8;
        if (has_ends) {
          if (row.flag)
            adamw_element<T, true, false>(row, g, p, s[0], s[1], s[2], last);
          else
            adamw_element<T, false, false>(row, g, p, s[0], s[1], s[2], last);
        } else {
          if (row.flag)
            adamw_element<T, true, true>(row, g, p, s[0], s[1], s[2], false);
          else
            adamw_element<T, false, true>(row, g, p, s[0], s[1], s[2], false);
        }
        for (int state = 0; state < num_states; ++state) {
          const uint32_t own = magnitude_bits(static_cast<float>(s[state]));
          if (own > largest[state]) largest[state] = own;
        }
        now.insert(now.end(), s, s + kMaxStates);
        store_as<T>(flat.main, call.dtype, range[kMain] + end, p);
      }
      for (int s = 0; s < num_states; ++s) {
        const float scale = step_bits<float>(largest[s]);
        if (call.form == kQuantForm) flat.scales[s][block] = scale;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t index = range[kIndex] + i;
          const int64_t place = range[kState] + i;
          const T value = now[(i - begin) * kMaxStates + s];
          const StepKeys keys =
              step_keys(call.seed, range[kKey], static_cast<int64_t>(options[kRowStep]), index);
          const uint32_t random =
              random_of_state(step_random(keys, static_cast<uint32_t>(index)), s);
          if (call.form == kFullForm)
            reinterpret_cast<T*>(flat.states[s])[place] = value;
          else if (call.form == kBfloatForm)
            reinterpret_cast<uint16_t*>(flat.states[s])[place] =
                bfloat_at_random(static_cast<float>(value), random);
          else
            reinterpret_cast<uint8_t*>(flat.states[s])[place] =
                s == 0 ? quant_code<true>(static_cast<float>(value), quant_inverse(scale), random)
                       : quant_code<false>(static_cast<float>(value), quant_inverse(scale), random);
        }
      }
      begin = end;
    }
  }
}

template <class T>
bool same(const std::vector<T>& left, const std::vector<T>& right) {
  num_checked += static_cast<int64_t>(left.size());
  return left.size() == right.size() &&
         (left.empty() || memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0);
}

bool same(const Block& left, const Block& right) { return same(left.bytes, right.bytes); }

// A flat parameter of random ranges; where `aligned`, as layouts make them: all starts are
// multiples of 16 elements.
struct Case {
  std::vector<int64_t> table;
  std::vector<double> rows;
  Memory one, two;
  int64_t numel = 0;
  const std::vector<double>* used = nullptr;

  Case(const Setting& setting, int num_ranges, int num_rows, bool aligned, int full_size) {
    static const int kSizes[] = {4, 2, 2, 8};
    const int state_size = setting.form == kQuantForm    ? 1
                           : setting.form == kBfloatForm ? 2
                                                         : full_size;
    int64_t grads = 0, places = 0, blocks = 0;
    const auto round = [&](int64_t at) { return aligned ? (at + 15) / 16 * 16 : at; };
    for (int r = 0; r < num_ranges; ++r) {
      numel = round(numel + below(40));
      const int64_t index = round(below(2) ? below(2000) : (int64_t{1} << 32) - 300);
      const int64_t count = 1 + below(aligned ? 3000 : 900);
      table.insert(table.end(),
                   {numel, grads, places, count, below(num_rows), index, below(1000), blocks});
      blocks += (index + count - 1) / kQuantNumel - index / kQuantNumel + 1;
      numel += count;
      grads = round(grads + count);
      places = round(places + count);
    }
    for (int r = 0; r < num_rows; ++r) {
      const double values[kRowColumns] = {
          0.99 - 0.01 * static_cast<double>(below(9)),
          0.1,
          0.9,
          0.1,
          -0.01,
          0.9,
          r % 2 ? 0.0 : 1e-8,
          1.25,
          r % 2 ? 1.0 : -1.0,
          static_cast<double>(setting.num_states == 3 && r % 3 == 0),
          static_cast<double>(r + 1)};
      rows.insert(rows.end(), values, values + kRowColumns);
    }
    one.main.resize(numel, kSizes[setting.dtype], aligned ? 0 : below(4));
    one.grad.resize(grads, kSizes[setting.dtype], aligned ? 0 : below(4));
    fill(one.main, setting.dtype, numel);
    fill(one.grad, setting.dtype, grads);
    for (int s = 0; s < setting.num_states; ++s) {
      one.states[s].resize(places, state_size, aligned ? 0 : below(4));
      one.scales[s].assign(static_cast<size_t>(blocks), 0.5f);
    }
    two = one;
  }
};

// Several flat parameters at once, so many that they take more than one launch.
template <class T>
void check(const Setting& setting, int num_flats, int num_ranges, int num_rows) {
  const float factor = 0.25f;
  const StepCall call{&factor, 5, 2.0f, setting.form, setting.dtype, setting.num_states};
  std::vector<Case> cases;
  for (int i = 0; i < num_flats; ++i)
    cases.emplace_back(setting, num_ranges, num_rows, i % 2 == 0, sizeof(T));
  std::vector<StepInput> inputs;
  for (size_t i = 0; i < cases.size(); ++i) {
    Case& each = cases[i];
    // Some flat parameters share rows, others have their own.
    const std::vector<double>& rows = i % 5 < 3 ? cases[i - i % 5].rows : each.rows;
    each.used = &rows;
    inputs.push_back({flat_of(setting, each.one, each.table, each.numel), rows.data(),
                      static_cast<int64_t>(rows.size()) / kRowColumns});
    // One without ranges, which is left out, has the rows that come next.
    const std::vector<double>& next = i + 1 < cases.size() ? cases[i + 1].rows : rows;
    StepInput none = inputs.back();
    none.flat.num_ranges = 0;
    none.rows = next.data();
    if (i % 5 == 2) inputs.push_back(none);
  }
  dispatch_step(RunKernel(), call, inputs.data(), static_cast<int64_t>(inputs.size()));
  for (Case& each : cases) {
    run_plain<T>(call, flat_of(setting, each.two, each.table, each.numel), *each.used);
    Memory& one = each.one;
    Memory& two = each.two;
    bool good = same(one.main, two.main);
    for (int s = 0; s < setting.num_states; ++s)
      good = good && same(one.states[s], two.states[s]) && same(one.scales[s], two.scales[s]);
    if (good) continue;
    std::printf("FAILED: form %d, dtype %d, %d states\n", setting.form, setting.dtype,
                setting.num_states);
    std::exit(1);
  }
}

}  // namespace

int main() {
  int turn = 0;
  for (int form = kFullForm; form <= kQuantForm; ++form)
    for (int num_states : {2, 3}) {
      const int dtypes[] = {LZ_FLOAT32, LZ_FLOAT16, LZ_BFLOAT16};
      for (int dtype : dtypes)
        check<float>({form, dtype, num_states}, 2, 1 + static_cast<int>(below(12)), 70);
      check<float>({form, dtypes[turn++ % 3], num_states}, 40, 1 + static_cast<int>(below(3)), 3);
    }
  check<double>({kFullForm, LZ_FLOAT64, 3}, 2, 9, 3);
  std::printf("emulated %lld launches, checked %lld elements, %lld segments in wide accesses\n",
              static_cast<long long>(num_launches), static_cast<long long>(num_checked),
              static_cast<long long>(num_wide));
  return 0;
}
