// torch's tensors as a kernel gets them: owned handles, lists of them, and what can be asked of
// one.
//
// Only torch's stable C interface is used, so one binary serves torch 2.11 and newer.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"

namespace layerzero {

inline void check_call(AOTITorchError code, const char* what) {
  if (code != TORCH_SUCCESS)
    throw std::runtime_error(std::string("torch refused a call of layerzero: ") + what);
}

// A tensor that this call owns: the dispatcher hands its inputs over.
class Handle {
 public:
  explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_;
};

// A Tensor[] argument. Boxed by hand: torch's own boxing of a tensor list is several times slower.
class TensorList {
 public:
  explicit TensorList(StableIValue value);
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;
  ~TensorList();
  std::vector<Handle> tensors;
  std::vector<Handle> copies;  // of tensors that a kernel cannot read in place

 private:
  StableListHandle list_;
};

inline StableIValue box(int64_t value) {
  StableIValue slot{};
  __builtin_memcpy(&slot, &value, sizeof(value));
  return slot;
}

template <class T>
inline T unbox(StableIValue value) {
  static_assert(sizeof(T) <= sizeof(StableIValue), "wider than a slot");
  T result;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  __builtin_memcpy(&result, &value, sizeof(T));
#else
  __builtin_memcpy(&result, reinterpret_cast<const char*>(&value) + sizeof(value) - sizeof(T),
                   sizeof(T));
#endif
  return result;
}

struct Device {
  int32_t type;
  int32_t index;
  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

std::string name_of(Device device);
const char* name_of(layerzero_dtype dtype);
int64_t size_of(layerzero_dtype dtype);
Device device_of(const Handle& tensor);
int64_t numel_of(const Handle& tensor);
int32_t scalar_type_of(const Handle& tensor);
bool is_contiguous(const Handle& tensor);
void* data_of(const Handle& tensor);

// Of a tensor that is only read: asking for memory to write would copy one that is shared lazily.
const void* const_data_of(const Handle& tensor);
Handle contiguous(const Handle& tensor);

}  // namespace layerzero
