// ordered_sum_squares_ on the CPU: ordered_sum_, and the sum of squares of what it writes.
//
// The bits are those of ordered_sum_ and of sum_squares_ after it. Bytes moved: those of
// ordered_sum_. Squares are taken of values that are in registers; for other dtypes and many parts,
// of kSquaresChunk elements in the first cache.
#include <algorithm>

#include "checks.h"
#include "convert.h"
#include "ops.h"
#include "step.h"

namespace layerzero {

namespace {

constexpr int64_t kMinPerThread = 32768;
constexpr int64_t kMaxStreams = 8;  // parts read side by side; a core prefetches few more

struct Job {
  const void* const* parts;
  int64_t num_parts;
  char* out;
  layerzero_dtype dtype;
  double scale;
  bool is_float;  // parts and out are float32
  Sum sum;
  double* sums;  // of each chunk
};

double sum_chunk(const Job& job, int64_t at, int64_t n) {
  if (job.is_float && job.num_parts <= kMaxStreams)
    return step_kernels().sum_squares(reinterpret_cast<const float* const*>(job.parts),
                                      job.num_parts, at, n, reinterpret_cast<float*>(job.out),
                                      static_cast<float>(job.scale));
  job.sum(job.parts, job.num_parts, at, n, job.out, job.scale);
  return step_kernels().squares(job.out + at * size_of(job.dtype), job.dtype, n);
}

}  // namespace

void ordered_sum_squares_cpu(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "ordered_sum_squares_";
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  const Handle squares_tensor(unbox<AtenTensorHandle>(stack[1]));
  TensorList list(stack[2]);
  const auto scale = unbox<double>(stack[3]);

  const Output out = check_output(out_tensor, kOp);
  const Output squares = check_output(squares_tensor, kOp);
  if (squares.dtype != LZ_FLOAT64 || squares.numel != 1 || !(squares.device == out.device))
    refuse(kOp, ": squares must be one float64 on out's device, got ", squares.numel, " of ",
           name_of(squares.dtype), " on ", name_of(squares.device));
  if (list.tensors.empty()) refuse(kOp, ": expected at least one part, got none");
  const Sources parts = check_sources(list, out, {kOp, "part", false, true, out.numel});

  std::vector<const void*> pointers;
  pointers.reserve(parts.items.size());
  for (const Source& part : parts.items) pointers.push_back(part.data);
  std::vector<double> sums(static_cast<size_t>((out.numel + kSquaresChunk - 1) / kSquaresChunk));
  const Job job{pointers.data(),
                static_cast<int64_t>(pointers.size()),
                static_cast<char*>(out.data),
                out.dtype,
                scale,
                parts.dtype == LZ_FLOAT32 && out.dtype == LZ_FLOAT32,
                kernels().sum[parts.dtype][out.dtype],
                sums.data()};
  const auto run = [](const void* context, int64_t begin, int64_t end) {
    const Job& own = *static_cast<const Job*>(context);
    for (int64_t at = begin; at < end; at += kSquaresChunk)
      own.sums[at / kSquaresChunk] = sum_chunk(own, at, std::min(kSquaresChunk, end - at));
  };
  if (out.numel > 0) parallel_units(out.numel, kSquaresChunk, kMinPerThread, &job, run);
  double total = 0;
  for (const double sum : sums) total += sum;
  *static_cast<double*>(squares.data) = total;
}

}  // namespace layerzero
