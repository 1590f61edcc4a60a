#include "tensors.h"

#include <array>

// Of Python's stable ABI; null where no Python runs in this process.
extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
}

namespace layerzero {

TensorList::~TensorList() {
  // A tensor that Python also holds asks for the interpreter's lock when the last other reference
  // goes. Taken once around all of them, that is a fifth of this op's time on 2000 small tensors.
  const bool python = PyGILState_Ensure != nullptr && Py_IsInitialized();
  const int state = python ? PyGILState_Ensure() : 0;
  copies.clear();
  tensors.clear();
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
  std::string name = device.type == aoti_torch_device_type_cuda()
                         ? "cuda"
                         : "device type " + std::to_string(device.type);
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

int32_t scalar_type_of(const Handle& tensor) {
  int32_t scalar_type = 0;
  check_call(aoti_torch_get_dtype(tensor.get(), &scalar_type), "dtype");
  return scalar_type;
}

bool is_contiguous(const Handle& tensor) {
  bool result = false;
  check_call(aoti_torch_is_contiguous(tensor.get(), &result), "is_contiguous");
  return result;
}

void* data_of(const Handle& tensor) {
  void* data = nullptr;
  check_call(aoti_torch_get_data_ptr(tensor.get(), &data), "data_ptr");
  return data;
}

const void* const_data_of(const Handle& tensor) {
  const void* data = nullptr;
  check_call(torch_get_const_data_ptr(tensor.get(), &data), "const_data_ptr");
  return data;
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

}  // namespace layerzero
