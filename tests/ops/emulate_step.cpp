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

int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }

struct Memory {
  std::vector<char> main, grad, copy, states[3];
  std::vector<float> scales[3], edges;
};

std::vector<char> values_of(int dtype, int64_t numel, int size) {
  std::vector<char> bytes(static_cast<size_t>(numel * size));
  for (int64_t i = 0; i < numel; ++i)
    store_as<double>(bytes.data(), dtype, i, static_cast<double>(below(2001) - 1000) / 100.0);
  return bytes;
}

struct Setting {
  int kind, form, dtype, copy_dtype, phase;
};

StepCall call_of(const Setting& setting, Memory& memory, const std::vector<int64_t>& table,
                 const float* factor, int64_t numel, int num_states) {
  StepCall call{};
  call.main = memory.main.data();
  call.grad = memory.grad.data();
  call.copy = setting.copy_dtype < 0 ? nullptr : memory.copy.data();
  for (int i = 0; i < num_states; ++i) {
    call.states[i] = memory.states[i].data();
    call.scales[i] = memory.scales[i].data();
  }
  call.edges = memory.edges.data();
  call.table = table.data();
  call.factor = factor;
  call.main_numel = numel;
  call.num_ranges = static_cast<int64_t>(table.size()) / kStepColumns;
  call.seed = 5;
  call.grad_scale = 2.0f;
  call.kind = setting.kind;
  call.form = setting.form;
  call.dtype = setting.dtype;
  call.copy_dtype = setting.copy_dtype < 0 ? 0 : setting.copy_dtype;
  call.num_states = num_states;
  call.phase = setting.phase;
  return call;
}

template <class T>
void run_kernel(const StepCall& call, const std::vector<double>& rows) {
  const auto num_rows = static_cast<int64_t>(rows.size()) / kRowColumns;
  for (int64_t begin = 0; begin < num_rows; begin += kRowWindow) {
    StepParams params;
    params.call = call;
    params.row_begin = begin;
    params.num_rows = num_rows - begin < kRowWindow ? num_rows - begin : kRowWindow;
    memcpy(params.rows, rows.data() + begin * kRowColumns,
           sizeof(double) * static_cast<size_t>(params.num_rows * kRowColumns));
    ++num_launches;
    for (int64_t warp = 0; warp < step_blocks(call.main_numel) * kBlockWarps; ++warp) {
      const int64_t first = warp * kSegmentNumel;
      if (first >= call.main_numel) continue;
      visit_segments(params, first, first + kSegmentNumel,
                     [&](const Segment& segment, const double* row) {
                       std::vector<LaneStates<T>> lanes(kWarpThreads);
                       uint32_t largest[kMaxStates] = {};
                       for (int lane = 0; lane < kWarpThreads; ++lane) {
                         step_lane<T>(call, row, segment, lane, lanes[lane]);
                         for (int state = 0; state < kMaxStates; ++state)
                           if (lanes[lane].largest[state] > largest[state])
                             largest[state] = lanes[lane].largest[state];
                       }
                       if (call.form != kQuantForm && call.phase != kMeasure) return;
                       for (int lane = 0; lane < kWarpThreads; ++lane) {
                         memcpy(lanes[lane].largest, largest, sizeof(largest));
                         finish_lane<T>(call, row, segment, lane, lanes[lane]);
                       }
                     });
    }
  }
}

// The same, range by range and block by block.
template <class T>
void run_plain(const StepCall& call, const std::vector<double>& rows) {
  for (int64_t r = 0; r < call.num_ranges; ++r) {
    const int64_t* const range = call.table + r * kStepColumns;
    const double* const row = rows.data() + range[kRow] * kRowColumns;
    const StepRow<T> options =
        step_row<T>(row, call.factor == nullptr ? T(1) : static_cast<T>(*call.factor));
    const int num_states = states_of(call, row);
    for (int64_t begin = 0; begin < range[kNumel];) {
      const Segment segment = segment_of(range, begin);
      std::vector<T> now(static_cast<size_t>(segment.count) * kMaxStates);
      uint32_t largest[kMaxStates] = {};
      for (int i = 0; i < segment.count; ++i) {
        step_element<T>(call, options, segment, i, num_states, &now[i * kMaxStates]);
        for (int s = 0; s < num_states; ++s) {
          const uint32_t own = magnitude_bits(static_cast<float>(now[i * kMaxStates + s]));
          if (own > largest[s]) largest[s] = own;
        }
      }
      for (int s = 0; s < num_states; ++s) {
        float scale = step_bits<float>(largest[s]);
        if (call.phase == kMeasure) {
          call.edges[range[kEdge] * call.num_states + s] = scale;
          continue;
        }
        if (call.form == kQuantForm) {
          if (range[kEdge] >= 0) scale = call.edges[range[kEdge] * call.num_states + s];
          call.scales[s][segment.block] = scale;
        }
        for (int i = 0; i < segment.count; ++i) {
          const int64_t index = range[kIndex] + begin + i;
          const int64_t place = range[kState] + begin + i;
          const T value = now[i * kMaxStates + s];
          const StepKeys keys =
              step_keys(call.seed, range[kKey], static_cast<int64_t>(row[kRowStep]), index);
          const uint32_t random =
              random_of_state(step_random(keys, static_cast<uint32_t>(index)), s);
          if (call.form == kFullForm)
            reinterpret_cast<T*>(call.states[s])[place] = value;
          else if (call.form == kBfloatForm)
            reinterpret_cast<uint16_t*>(call.states[s])[place] =
                bfloat_at_random(static_cast<float>(value), random);
          else
            reinterpret_cast<uint8_t*>(call.states[s])[place] =
                state_is_signed(call.kind, s)
                    ? quant_code<true>(static_cast<float>(value), quant_inverse(scale), random)
                    : quant_code<false>(static_cast<float>(value), quant_inverse(scale), random);
        }
      }
      begin += segment.count;
    }
  }
}

template <class T>
bool same(const std::vector<T>& left, const std::vector<T>& right) {
  num_checked += static_cast<int64_t>(left.size());
  return left.size() == right.size() &&
         (left.empty() || memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0);
}

template <class T>
void check(const Setting& setting, int num_ranges, int num_rows) {
  static const int kSizes[] = {4, 2, 2, 8};
  const int num_states = setting.kind == kAdamW ? 3 : 1;
  const int state_size = setting.form == kQuantForm    ? 1
                         : setting.form == kBfloatForm ? 2
                                                       : sizeof(T);
  std::vector<int64_t> table;
  int64_t numel = 0, grads = 0, places = 0, blocks = 0, edges = 0;
  for (int r = 0; r < num_ranges; ++r) {
    const bool is_edge = setting.form == kQuantForm && (setting.phase == kMeasure || below(4) == 0);
    numel += below(40);
    int64_t index = below(2) ? below(2000) : (int64_t{1} << 32) - 300;
    int64_t count = 1 + below(900);
    if (setting.phase == kMeasure || is_edge) count = 1 + below(kQuantNumel - index % kQuantNumel);
    table.insert(table.end(), {numel, grads, places, count, below(num_rows), index, below(1000),
                               blocks, is_edge || setting.phase == kMeasure ? edges : -1});
    edges += is_edge || setting.phase == kMeasure;
    blocks += (index + count - 1) / kQuantNumel - index / kQuantNumel + 1;
    numel += count;
    grads += count;
    places += count;
  }
  std::vector<double> rows;
  for (int r = 0; r < num_rows; ++r) {
    const double values[kRowColumns] = {0.99,
                                        0.1,
                                        0.9,
                                        0.1,
                                        -0.01,
                                        0.9,
                                        r % 2 ? 0.0 : 1e-8,
                                        1.25,
                                        r % 2 ? 1.0 : -1.0,
                                        static_cast<double>(r % 3 == 0),
                                        static_cast<double>(r + 1)};
    rows.insert(rows.end(), values, values + kRowColumns);
  }
  Memory one;
  one.main = values_of(setting.dtype, numel, kSizes[setting.dtype]);
  one.grad = values_of(setting.dtype, grads, kSizes[setting.dtype]);
  if (setting.copy_dtype >= 0)
    one.copy.resize(static_cast<size_t>(numel * kSizes[setting.copy_dtype]));
  for (int s = 0; s < num_states; ++s) {
    one.states[s].resize(static_cast<size_t>(places * state_size));
    one.scales[s].assign(static_cast<size_t>(blocks), 0.5f);
  }
  one.edges.assign(static_cast<size_t>(edges * num_states), 1000.0f);
  Memory two = one;
  const float factor = 0.25f;
  run_kernel<T>(call_of(setting, one, table, &factor, numel, num_states), rows);
  run_plain<T>(call_of(setting, two, table, &factor, numel, num_states), rows);
  bool good = same(one.main, two.main) && same(one.copy, two.copy) && same(one.edges, two.edges);
  for (int s = 0; s < num_states; ++s)
    good = good && same(one.states[s], two.states[s]) && same(one.scales[s], two.scales[s]);
  if (!good) {
    std::printf("FAILED: kind %d, form %d, dtype %d, copy %d, phase %d\n", setting.kind,
                setting.form, setting.dtype, setting.copy_dtype, setting.phase);
    std::exit(1);
  }
}

}  // namespace

int main() {
  for (int kind = kAdamW; kind <= kLion; ++kind)
    for (int form = kFullForm; form <= kQuantForm; ++form)
      for (int dtype : {LZ_FLOAT32, LZ_FLOAT16, LZ_BFLOAT16})
        for (int copy : {-1, static_cast<int>(LZ_BFLOAT16), static_cast<int>(LZ_FLOAT32)})
          for (int phase = 0; phase <= kMeasure; ++phase)
            check<float>({kind, form, dtype, copy, phase}, 1 + static_cast<int>(below(12)),
                         phase == 0 ? 70 : 3);
  for (int kind = kAdamW; kind <= kLion; ++kind)
    check<double>({kind, kFullForm, LZ_FLOAT64, LZ_BFLOAT16, 0}, 9, 3);
  std::printf("emulated %lld launches, checked %lld elements\n",
              static_cast<long long>(num_launches), static_cast<long long>(num_checked));
  return 0;
}
