// What every op needs at its border: owned handles, dtypes, and refusals with values.
//
// Only torch's stable C interface is used, so one binary serves torch 2.11 and newer. A refusal is
// std::invalid_argument, which reaches Python as ValueError; it comes before anything is written.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include "cuda/launch.h"

namespace layerzero {

template <class... Parts>
[[noreturn]] inline void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline void check_call(AOTITorchError code, const char* what) {
  if (code != TORCH_SUCCESS) throw std::runtime_error(std::string("torch refused a call of layerzero: ") + what);
}

// A tensor that this call owns: the dispatcher hands its inputs over.
class Handle {
 public:
  explicit Handle(AtenTensorHandle handle) : handle_(handle) {}
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { reset(); }
  void reset() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(std::exchange(handle_, nullptr));
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

template <class T>
inline T unbox(StableIValue value) {
  static_assert(sizeof(T) <= sizeof(StableIValue), "wider than a slot");
  T result;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  __builtin_memcpy(&result, &value, sizeof(T));
#else
  __builtin_memcpy(&result, reinterpret_cast<const char*>(&value) + sizeof(value) - sizeof(T), sizeof(T));
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

// Refuses what is not float32, float16, bfloat16 or float64. The text names it by `op`, `noun` and,
// unless that is -1, `index`.
layerzero_dtype dtype_of(const Handle& tensor, const char* op, const char* noun, int64_t index);

// The output of an op: contiguous, of a dtype that the kernels know.
struct Output {
  void* data;
  int64_t numel;
  layerzero_dtype dtype;
  Device device;
  int64_t nbytes() const { return numel * size_of(dtype); }
};
Output check_output(const Handle& out, const char* op);

// Memory of one source. `rows` and `cols` are set where the source is the transpose of a contiguous
// matrix [cols, rows]; 0 where it is contiguous.
struct Source {
  const void* data = nullptr;
  int64_t numel = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

// All sources of a launch, checked: one dtype, the output's device, apart from the output's memory.
struct Sources {
  std::vector<Source> items;
  layerzero_dtype dtype = LZ_FLOAT32;
};

struct SourceRules {
  const char* op;
  const char* noun;         // what the op calls a source
  bool keep_transposed;     // the kernel reads transposed matrices itself
  bool may_be_output;       // a source may be exactly the output
  int64_t numel;            // that every source must have; -1: any
};

// Sources that the kernel cannot read in place are copied first; the copies live as long as `list`. Empty sources may have any dtype and device: nothing of them is read.
Sources check_sources(TensorList& list, const Output& out, const SourceRules& rules);

}  // namespace layerzero
