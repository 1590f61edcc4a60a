// ordered_sum_ on the CPU: the sum of N tensors in the order of the list, scaled, rounded once.
//
// Elements are added in float32 (float64 for float64) in blocks that stay in the first cache, so
// the sum does not depend on the number of threads. Bytes moved: every part read once, out written
// once; out may be a part, because a block is read before it is written.
#include "checks.h"
#include "convert.h"
#include "ops.h"

namespace layerzero {

namespace {

constexpr int64_t kMinPerThread = 32768;
constexpr int64_t kUnit = 512;

}  // namespace

void ordered_sum_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  TensorList list(stack[1]);
  const auto scale = unbox<double>(stack[2]);
  const Output out = check_output(out_tensor, "ordered_sum_");
  if (list.tensors.empty()) refuse("ordered_sum_: expected at least one part, got none");
  const Sources parts = check_sources(list, out, {"ordered_sum_", "part", true, out.numel});
  if (out.numel == 0) return;
  const Sum sum = kernels().sum[parts.dtype][out.dtype];
  parallel_units(out.numel, kUnit, kMinPerThread, [&](int64_t begin, int64_t end) {
    sum(parts.data.data(), static_cast<int64_t>(parts.data.size()), begin, end - begin, out.data,
        scale);
  });
}

}  // namespace layerzero
