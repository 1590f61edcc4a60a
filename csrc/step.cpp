// flat_step_ on the CPU: one optimizer step of a flat parameter, in one pass over its memory.
//
// Bytes moved for AdamW with float32 states: 16 read (parameter, gradient, two states) and 12
// written (parameter, states) an element; 12 and 8 with bfloat16 states, 10
// and 8 with 8-bit ones.
#include <algorithm>

#include "ops.h"
#include "step_arguments.h"

namespace layerzero {

namespace {

constexpr int64_t kMinPerThread = 16384;

// Where a run may begin inside a range: float32 states take eight elements at a time from the start
// of the range, others go by the index in the whole parameter.
int64_t cut(const StepJob& job, const int64_t* range, int64_t position) {
  const int64_t offset = position - range[kMain];
  if (offset <= 0) return 0;
  const int64_t phase = job.form == kFullForm ? 0 : range[kIndex] % kQuantNumel;
  const int64_t up = (offset + phase + kQuantNumel - 1) / kQuantNumel * kQuantNumel;
  return std::min(up - phase, range[kNumel]);
}

void step_run(const StepJob& job, const int64_t* range, int64_t first, int64_t last) {
  const int64_t chunk = kStepChunk;
  const int64_t phase = job.form == kFullForm ? 0 : range[kIndex] % chunk;
  const StepChunk run = step_kernels().chunk;
  while (first < last) {
    const int64_t next = std::min(last, ((first + phase) / chunk + 1) * chunk - phase);
    run(job, range, first, next - first);
    first = next;
  }
}

void check_ranges(const StepFlatArguments& flat) {
  const StepJob& job = flat.job;
  int64_t end = 0;
  for (int64_t i = 0; i < job.num_ranges; ++i) {
    const int64_t* const range = job.table + i * kStepColumns;
    const int64_t numel = range[kNumel];
    if (numel < 0 || range[kMain] < end || numel > job.main_numel - range[kMain] ||
        range[kGrad] < 0 || numel > flat.grad_numel - range[kGrad] || range[kIndex] < 0 ||
        range[kState] < 0 || (job.num_states > 0 && numel > flat.state_numel - range[kState]) ||
        range[kRow] < 0 || range[kRow] >= flat.num_rows || range[kBlock] < 0)
      refuse("flat_step_: range ", i, " [", range[kMain], ", ", range[kMain] + numel,
             ") of main does not rise, or leaves main, grad (from ", range[kGrad],
             "), the states (from ", range[kState], ") or rows (", range[kRow], ")");
    end = range[kMain] + numel;
    const int64_t first_block = range[kIndex] / kQuantNumel;
    const int64_t blocks =
        numel == 0 ? 0 : (range[kIndex] + numel - 1) / kQuantNumel - first_block + 1;
    if (job.form == kQuantForm)
      for (int s = 0; s < job.num_states; ++s)
        if (blocks > flat.scale_numels[s] - range[kBlock])
          refuse("flat_step_: range ", i, " needs scales up to ", range[kBlock] + blocks,
                 ", there are ", flat.scale_numels[s]);
  }
}

void step_flat(const StepJob& job) {
  parallel_units(job.main_numel, kStepChunk, kMinPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t low = first_range(job, begin); low < job.num_ranges; ++low) {
      const int64_t* const range = job.table + low * kStepColumns;
      if (range[kMain] >= end) break;
      step_run(job, range, cut(job, range, begin), cut(job, range, end));
    }
  });
}

}  // namespace

void flat_step_cpu(StableIValue* stack, uint64_t, uint64_t) {
  StepArguments arguments(stack);
  for (const StepFlatArguments& flat : arguments.flats) check_ranges(flat);
  for (StepFlatArguments& flat : arguments.flats) {
    if (flat.job.main_numel == 0 || flat.job.num_ranges == 0) continue;
    if (arguments.factor != nullptr) flat.job.factor = *arguments.factor;
    flat.job.kernels = &kernels();
    step_flat(flat.job);
  }
}

// out[0] = the sum of x * x in float64. Bytes moved: x once.
void sum_squares_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  const Handle x(unbox<AtenTensorHandle>(stack[1]));
  const Output out = check_output(out_tensor, "sum_squares_");
  if (out.dtype != LZ_FLOAT64 || out.numel != 1)
    refuse("sum_squares_: out must be one float64, got ", out.numel, " of ", name_of(out.dtype));
  const auto* const memory =
      static_cast<const char*>(memory_of(x, "sum_squares_", "x", out.device));
  const layerzero_dtype dtype = dtype_of(x, "sum_squares_", "x", -1);
  const int64_t numel = numel_of(x);
  const int64_t chunks = (numel + kSquaresChunk - 1) / kSquaresChunk;
  std::vector<double> sums(static_cast<size_t>(chunks));
  parallel_units(numel, kSquaresChunk, 65536, [&](int64_t begin, int64_t end) {
    const SquaresChunk squares = step_kernels().squares;
    for (int64_t at = begin; at < end; at += kSquaresChunk)
      sums[at / kSquaresChunk] =
          squares(memory + at * size_of(dtype), dtype, std::min(kSquaresChunk, end - at));
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  *static_cast<double*>(out.data) = total;
}

}  // namespace layerzero
