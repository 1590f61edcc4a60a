// ordered_sum_ on the CPU: the sum of N tensors in the order of the list, scaled, rounded once.
//
// Elements are added in float32 (float64 for float64) in blocks that stay in the first cache, so
// the sum does not depend on the number of threads. Bytes moved: every part read once, out written
// once; out may be a part, because a block is read before it is written. checked_sum_ also takes
// the checksums of the parts, from blocks that the sum then finds in the first cache.
#include <algorithm>

#include "checks.h"
#include "convert.h"
#include "ops.h"
#include "word_sums.h"

namespace layerzero {

namespace {

constexpr int64_t kMinPerThread = 32768;
constexpr int64_t kUnit = 512;
// Elements of each part between two looks at their checksums.
constexpr int64_t kBlock = 2048;

struct Job {
  const void* const* parts;
  int64_t num_parts;
  void* out;
  double scale;
  Sum sum;
  int64_t part_itemsize;
  uint64_t* sums;  // of each part; null: none are taken
  int64_t skip;    // the part that needs none
};

void sum_checked(const Job& job, int64_t begin, int64_t end) {
  const SumWords sum_words = kernels().sum_words;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    for (int64_t part = 0; part < job.num_parts; ++part) {
      if (part == job.skip) continue;
      const auto* const from = static_cast<const char*>(job.parts[part]);
      add_to(job.sums + part,
             sum_words(from + begin * job.part_itemsize, count * job.part_itemsize));
    }
    job.sum(job.parts, job.num_parts, begin, count, job.out, job.scale);
  }
}

void add_up(const char* op, const Handle& out_tensor, TensorList& list, double scale,
            uint64_t* sums, int64_t skip) {
  const Output out = check_output(out_tensor, op);
  if (list.tensors.empty()) refuse(op, ": expected at least one part, got none");
  const Sources parts = check_sources(list, out, {op, "part", true, out.numel});
  if (sums != nullptr) std::fill_n(sums, list.tensors.size(), 0);
  if (out.numel == 0) return;

  const Job job{parts.data.data(),
                static_cast<int64_t>(parts.data.size()),
                out.data,
                scale,
                kernels().sum[parts.dtype][out.dtype],
                size_of(parts.dtype),
                sums,
                skip};
  parallel_units(out.numel, kUnit, kMinPerThread, [&](int64_t begin, int64_t end) {
    if (sums != nullptr)
      sum_checked(job, begin, end);
    else
      job.sum(job.parts, job.num_parts, begin, end - begin, job.out, job.scale);
  });
}

}  // namespace

void ordered_sum_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out(unbox<AtenTensorHandle>(stack[0]));
  TensorList parts(stack[1]);
  add_up("ordered_sum_", out, parts, unbox<double>(stack[2]), nullptr, -1);
}

void checked_sum_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out(unbox<AtenTensorHandle>(stack[0]));
  const Handle sums(unbox<AtenTensorHandle>(stack[1]));
  TensorList parts(stack[2]);
  const auto count = static_cast<int64_t>(parts.tensors.size());
  add_up("checked_sum_", out, parts, unbox<double>(stack[3]),
         check_sums(sums, "checked_sum_", count), unbox<int64_t>(stack[4]));
}

}  // namespace layerzero
