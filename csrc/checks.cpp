#include "checks.h"

#include <array>

// Of Python's stable ABI; null where no Python runs in this process.
extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
}

namespace layerzero {

namespace {

// "source 3"; -1 is for a noun that stands alone.
std::string numbered(const char* noun, int64_t index) {
  return index < 0 ? noun : noun + (" " + std::to_string(index));
}

bool has_strides_of_a_transpose(const Handle& tensor, Source& source) {
  int64_t dim = 0;
  check_call(aoti_torch_get_dim(tensor.get(), &dim), "dim");
  if (dim != 2) return false;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_call(aoti_torch_get_sizes(tensor.get(), &sizes), "sizes");
  check_call(aoti_torch_get_strides(tensor.get(), &strides), "strides");
  if (strides[0] != 1 || strides[1] != sizes[0]) return false;
  source.rows = sizes[0];
  source.cols = sizes[1];
  return true;
}

Handle contiguous(const Handle& tensor) {
  // The dispatcher takes its arguments over, so it gets a handle of its own.
  AtenTensorHandle alias = nullptr;
  check_call(aoti_torch_new_tensor_handle(tensor.get(), &alias), "new_tensor_handle");
  std::array<StableIValue, 2> stack{};
  __builtin_memcpy(&stack[0], &alias, sizeof(alias));
  const int32_t format = aoti_torch_memory_format_contiguous_format();
  __builtin_memcpy(&stack[1], &format, sizeof(format));
  check_call(torch_call_dispatcher("aten::contiguous", "", stack.data(), TORCH_ABI_VERSION),
             "aten::contiguous");
  return Handle(unbox<AtenTensorHandle>(stack[0]));
}

bool is_contiguous(const Handle& tensor) {
  bool result = false;
  check_call(aoti_torch_is_contiguous(tensor.get(), &result), "is_contiguous");
  return result;
}

// Of a tensor that is only read: asking for memory to write would copy one that is shared lazily.
const void* data_of(const Handle& tensor) {
  const void* data = nullptr;
  check_call(torch_get_const_data_ptr(tensor.get(), &data), "const_data_ptr");
  return data;
}

int32_t scalar_type_of(const Handle& tensor) {
  int32_t scalar_type = 0;
  check_call(aoti_torch_get_dtype(tensor.get(), &scalar_type), "dtype");
  return scalar_type;
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
    refuse(op, ": the storage of ", numbered(noun, index), " holds ", storage_nbytes, " bytes, the tensor needs ", needed,
           "; its memory was freed");
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

TensorList::~TensorList() {
  // A tensor that Python also holds asks for the interpreter's lock when the last other reference
  // goes. Taken once around all of them, that is a fifth of this op's time on 2000 small tensors.
  const bool python = PyGILState_Ensure != nullptr && Py_IsInitialized();
  const int state = python ? PyGILState_Ensure() : 0;
  copies.clear();
  // Handles lie where the allocator had room, and packing has driven them and what they point at out of
  // the near caches. A handle is the address of a torch::Tensor, whose one member is the address of
  // its reference count; were it not, useless lines would be fetched and nothing else happen.
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + 24 < tensors.size()) __builtin_prefetch(tensors[i + 24].get(), 1);
    if (i + 12 < tensors.size()) __builtin_prefetch(*reinterpret_cast<void* const*>(tensors[i + 12].get()), 1);
    tensors[i].reset();
  }
  torch_delete_list(list_);
  if (python) PyGILState_Release(state);
}

TensorList::TensorList(StableIValue value) : list_(unbox<StableListHandle>(value)) {
  size_t size = 0;
  check_call(torch_list_size(list_, &size), "list_size");
  tensors.reserve(size);
  for (size_t i = 0; i < size; ++i) {
    StableIValue element{};
    check_call(torch_list_get_item(list_, i, &element), "list_get_item");
    tensors.emplace_back(unbox<AtenTensorHandle>(element));
  }
}

const char* name_of(layerzero_dtype dtype) {
  static const char* const names[] = {"float32", "float16", "bfloat16", "float64"};
  return names[dtype];
}

int64_t size_of(layerzero_dtype dtype) {
  static const int64_t sizes[] = {4, 2, 2, 8};
  return sizes[dtype];
}

std::string name_of(Device device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  std::string name =
      device.type == aoti_torch_device_type_cuda() ? "cuda" : "device type " + std::to_string(device.type);
  return name + ":" + std::to_string(device.index);
}

Device device_of(const Handle& tensor) {
  Device device{};
  check_call(aoti_torch_get_device_type(tensor.get(), &device.type), "device_type");
  // The index of the CPU may be -1 or 0; it has no meaning.
  if (device.type != aoti_torch_device_type_cpu())
    check_call(aoti_torch_get_device_index(tensor.get(), &device.index), "device_index");
  return device;
}

int64_t numel_of(const Handle& tensor) {
  int64_t numel = 0;
  check_call(aoti_torch_get_numel(tensor.get(), &numel), "numel");
  return numel;
}

layerzero_dtype dtype_of(const Handle& tensor, const char* op, const char* noun, int64_t index) {
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float64()};
  const int32_t scalar_type = scalar_type_of(tensor);
  for (int i = 0; i < 4; ++i)
    if (scalar_type == codes[i]) return static_cast<layerzero_dtype>(i);
  refuse(op, ": ", numbered(noun, index), " must be float32, float16, bfloat16 or float64, got scalar type ",
         scalar_type);
}

Output check_output(const Handle& out, const char* op) {
  Output result{};
  result.dtype = dtype_of(out, op, "out", -1);
  result.device = device_of(out);
  result.numel = numel_of(out);
  if (!is_contiguous(out)) refuse(op, ": out must be contiguous; pass a contiguous buffer");
  if (result.numel > 0) check_storage(out, result.nbytes(), size_of(result.dtype), op, "out", -1);
  check_call(aoti_torch_get_data_ptr(out.get(), &result.data), "data_ptr");
  return result;
}

Sources check_sources(TensorList& list, const Output& out, const SourceRules& rules) {
  Sources sources;
  sources.items.resize(list.tensors.size());
  int64_t first = -1;
  int32_t scalar_type = 0;
  int64_t itemsize = 0;
  const char* const out_begin = static_cast<const char*>(out.data);
  const char* const out_end = out_begin + out.nbytes();
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const Handle& tensor = list.tensors[i];
    Source& source = sources.items[i];
    source.numel = numel_of(tensor);
    if (rules.numel >= 0 && source.numel != rules.numel)
      refuse(rules.op, ": ", rules.noun, " ", i, " has ", source.numel, " elements, out has ", rules.numel);
    if (source.numel == 0) continue;
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
      refuse(rules.op, ": one call takes one source dtype, got ", name_of(sources.dtype), " (", rules.noun,
             " ", first, ") and ", name_of(dtype), " (", rules.noun, " ", i, "); call once for each dtype");
    }
    const bool in_order = is_contiguous(tensor);
    const int64_t extent = in_order ? source.numel * itemsize : extent_nbytes(tensor, itemsize);
    check_storage(tensor, extent, itemsize, rules.op, rules.noun, i);
    source.data = data_of(tensor);
    const char* const begin = static_cast<const char*>(source.data);
    if (begin < out_end && out_begin < begin + extent) {
      const bool same = rules.may_be_output && in_order && begin == out_begin && sources.dtype == out.dtype;
      if (!same)
        refuse(rules.op, ": out overlaps ", rules.noun, " ", i, ": bytes [", static_cast<const void*>(out_begin),
               ", ", static_cast<const void*>(out_end), ") and [", source.data, ", ",
               static_cast<const void*>(begin + extent), "); pass an output of its own");
    }
    if (in_order || (rules.keep_transposed && has_strides_of_a_transpose(tensor, source))) continue;
    Handle copy = contiguous(tensor);
    source.data = data_of(copy);
    list.copies.push_back(std::move(copy));
  }
  return sources;
}

}  // namespace layerzero
