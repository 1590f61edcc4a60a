// word_sums_ on the CPU: for each tensor the sum of its bytes as 64-bit words, modulo 2^64.
//
// Bytes moved: every tensor read once. The end of a tensor that is no whole word counts as one that
// zeros complete; big-endian machines sum other words, but all of a run sum the same.
#include "convert.h"
#include "ops.h"
#include "tensors.h"

namespace layerzero {

namespace {

constexpr int64_t kUnit = 1 << 16;
constexpr int64_t kMinPerThread = 1 << 19;

}  // namespace

void word_sums_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out(unbox<AtenTensorHandle>(stack[0]));
  const TensorList list(stack[1]);
  const auto count = static_cast<int64_t>(list.tensors.size());
  if (scalar_type_of(out) != aoti_torch_dtype_int64() || !is_contiguous(out) ||
      numel_of(out) != count)
    refuse("word_sums_: expected room for ", count, " contiguous int64 checksums, got ",
           numel_of(out), " of dtype code ", scalar_type_of(out));
  auto* const sums = static_cast<uint64_t*>(data_of(out));
  for (int64_t i = 0; i < count; ++i)
    if (!is_contiguous(list.tensors[i])) refuse("word_sums_: tensor ", i, " is strided");
  for (int64_t i = 0; i < count; ++i) {
    const Handle& tensor = list.tensors[i];
    const auto itemsize =
        static_cast<int64_t>(aoti_torch_dtype_element_size(scalar_type_of(tensor)));
    const int64_t nbytes = numel_of(tensor) * itemsize;
    sums[i] = 0;
    if (nbytes == 0) continue;
    const auto* const data = static_cast<const uint8_t*>(const_data_of(tensor));
    parallel_units(nbytes, kUnit, kMinPerThread, [&](int64_t begin, int64_t end) {
      // Threads add in any order: the sum is the same.
      const uint64_t own = kernels().sum_words(data + begin, end - begin);
      __atomic_fetch_add(sums + i, own, __ATOMIC_RELAXED);
    });
  }
}

}  // namespace layerzero
