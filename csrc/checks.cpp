#include "checks.h"

namespace layerzero {

namespace {

// "source 3"; -1 is for a noun that stands alone.
std::string numbered(const char* noun, int64_t index) {
  return index < 0 ? noun : noun + (" " + std::to_string(index));
}

// A view outlives its bytes when the storage is resized, which the engine does all the time.
void check_storage(const Handle& tensor, int64_t extent_nbytes, int64_t itemsize, const char* op,
                   const char* noun, int64_t index) {
  int64_t storage_nbytes = 0;
  int64_t offset = 0;
  check_call(aoti_torch_get_storage_size(tensor.get(), &storage_nbytes), "storage_size");
  check_call(aoti_torch_get_storage_offset(tensor.get(), &offset), "storage_offset");
  const int64_t needed = offset * itemsize + extent_nbytes;
  if (storage_nbytes < needed)
    refuse(op, ": the storage of ", numbered(noun, index), " holds ", storage_nbytes,
           " bytes, the tensor needs ", needed, "; its memory was freed");
}

// Bytes from the first to behind the last element; strides of a tensor are never negative.
int64_t extent_nbytes(const Handle& tensor, int64_t itemsize) {
  int64_t dim = 0;
  check_call(aoti_torch_get_dim(tensor.get(), &dim), "dim");
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_call(aoti_torch_get_sizes(tensor.get(), &sizes), "sizes");
  check_call(aoti_torch_get_strides(tensor.get(), &strides), "strides");
  int64_t last = 0;
  for (int64_t i = 0; i < dim; ++i) last += (sizes[i] - 1) * strides[i];
  return (last + 1) * itemsize;
}

}  // namespace

layerzero_dtype dtype_of(const Handle& tensor, const char* op, const char* noun, int64_t index) {
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float64()};
  const int32_t scalar_type = scalar_type_of(tensor);
  for (int i = 0; i < 4; ++i)
    if (scalar_type == codes[i]) return static_cast<layerzero_dtype>(i);
  refuse(op, ": ", numbered(noun, index),
         " must be float32, float16, bfloat16 or float64, got scalar type ", scalar_type);
}

Output check_output(const Handle& out, const char* op) {
  Output result{};
  result.dtype = dtype_of(out, op, "out", -1);
  result.device = device_of(out);
  result.numel = numel_of(out);
  result.data = memory_of(out, op, "out", result.device);
  return result;
}

void* memory_of(const Handle& tensor, const char* op, const char* noun, Device device) {
  if (!is_contiguous(tensor)) refuse(op, ": ", noun, " must be contiguous");
  const int64_t numel = numel_of(tensor);
  if (numel == 0) return nullptr;
  const Device own = device_of(tensor);
  if (!(own == device))
    refuse(op, ": ", noun, " is on ", name_of(own), ", expected ", name_of(device));
  const auto itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(scalar_type_of(tensor)));
  check_storage(tensor, numel * itemsize, itemsize, op, noun, -1);
  return data_of(tensor);
}

Sources check_sources(TensorList& list, const Output& out, const SourceRules& rules) {
  Sources sources;
  sources.data.resize(list.tensors.size());
  sources.numels.resize(list.tensors.size());
  int64_t first = -1;
  int32_t scalar_type = 0;
  int64_t itemsize = 0;
  const char* const out_begin = static_cast<const char*>(out.data);
  const char* const out_end = out_begin + out.nbytes();
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const Handle& tensor = list.tensors[i];
    const int64_t numel = sources.numels[i] = numel_of(tensor);
    if (rules.numel >= 0 && numel != rules.numel)
      refuse(rules.op, ": ", rules.noun, " ", i, " has ", numel, " elements, out has ",
             rules.numel);
    if (numel == 0) continue;
    const Device device = device_of(tensor);
    if (!(device == out.device))
      refuse(rules.op, ": ", rules.noun, " ", i, " is on ", name_of(device), ", out is on ",
             name_of(out.device), "; move it first");
    if (first < 0) {
      first = static_cast<int64_t>(i);
      scalar_type = scalar_type_of(tensor);
      sources.dtype = dtype_of(tensor, rules.op, rules.noun, i);
      itemsize = size_of(sources.dtype);
    } else if (scalar_type_of(tensor) != scalar_type) {
      const layerzero_dtype dtype = dtype_of(tensor, rules.op, rules.noun, i);
      refuse(rules.op, ": one call takes one source dtype, got ", name_of(sources.dtype), " (",
             rules.noun, " ", first, ") and ", name_of(dtype), " (", rules.noun, " ", i,
             "); call once for each dtype");
    }
    const bool in_order = is_contiguous(tensor);
    const int64_t extent = in_order ? numel * itemsize : extent_nbytes(tensor, itemsize);
    check_storage(tensor, extent, itemsize, rules.op, rules.noun, i);
    sources.data[i] = const_data_of(tensor);
    const char* const begin = static_cast<const char*>(sources.data[i]);
    if (begin < out_end && out_begin < begin + extent) {
      const bool same =
          rules.may_be_output && in_order && begin == out_begin && sources.dtype == out.dtype;
      if (!same)
        refuse(rules.op, ": out overlaps ", rules.noun, " ", i, ": bytes [",
               static_cast<const void*>(out_begin), ", ", static_cast<const void*>(out_end),
               ") and [", sources.data[i], ", ", static_cast<const void*>(begin + extent),
               "); pass an output of its own");
    }
    if (in_order) continue;
    Handle copy = contiguous(tensor);
    sources.data[i] = const_data_of(copy);
    list.copies.push_back(std::move(copy));
  }
  return sources;
}

}  // namespace layerzero
