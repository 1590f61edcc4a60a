// word_sums_ on the CPU: for each tensor the sum of its bytes as 64-bit words, modulo 2^64.
//
// Bytes moved: every tensor read once. The end of a tensor that is no whole word counts as one that
// zeros complete; big-endian machines sum other words, but all of a run sum the same.
#include "word_sums.h"

#include "convert.h"
#include "ops.h"

namespace layerzero {

namespace {

constexpr int64_t kUnit = 1 << 16;
constexpr int64_t kMinPerThread = 1 << 19;

struct Job {
  const uint8_t* data;
  uint64_t* sum;
};

int64_t size_of_element(const Handle& tensor) {
  int32_t dtype = 0;
  check_call(aoti_torch_get_dtype(tensor.get(), &dtype), "dtype");
  if (dtype == aoti_torch_dtype_float32()) return 4;
  if (dtype == aoti_torch_dtype_uint8()) return 1;
  if (dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float16()) return 2;
  if (dtype == aoti_torch_dtype_float64()) return 8;
  refuse("word_sums_: expected float32, float64, float16, bfloat16 or uint8, got dtype code ",
         dtype);
}

}  // namespace

uint64_t* check_sums(const Handle& sums, const char* op, int64_t count) {
  int32_t dtype = 0;
  void* pointer = nullptr;
  check_call(aoti_torch_get_dtype(sums.get(), &dtype), "dtype");
  if (dtype != aoti_torch_dtype_int64() || !is_contiguous(sums))
    refuse(op, ": checksums must be contiguous int64, got dtype code ", dtype);
  if (count >= 0 && numel_of(sums) != count)
    refuse(op, ": ", count, " tensors, but room for ", numel_of(sums), " checksums");
  check_call(aoti_torch_get_data_ptr(sums.get(), &pointer), "data_ptr");
  return static_cast<uint64_t*>(pointer);
}

void word_sums_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out(unbox<AtenTensorHandle>(stack[0]));
  const TensorList list(stack[1]);
  const auto count = static_cast<int64_t>(list.tensors.size());
  uint64_t* const sums = check_sums(out, "word_sums_", count);
  for (int64_t i = 0; i < count; ++i) {
    if (!is_contiguous(list.tensors[i])) refuse("word_sums_: tensor ", i, " is strided");
    size_of_element(list.tensors[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t nbytes = numel_of(list.tensors[i]) * size_of_element(list.tensors[i]);
    sums[i] = 0;
    if (nbytes == 0) continue;
    const Job job{static_cast<const uint8_t*>(const_data_of(list.tensors[i])), sums + i};
    parallel_units(nbytes, kUnit, kMinPerThread, &job,
                   [](const void* context, int64_t begin, int64_t end) {
                     const Job& work = *static_cast<const Job*>(context);
                     add_to(work.sum, kernels().sum_words(work.data + begin, end - begin));
                   });
  }
}

}  // namespace layerzero
