// Registers the CUDA kernels: checks, the device, the current stream, then the launchers of
// cuda/launch.h. Compiled only when nvcc is there, and loadable on a machine without a GPU.
//
// No synchronisation: segs lie on the device and are not read here. layerzero.ops checks them
// against the sources on the host, where they were made; whoever calls the op itself with rows that
// are nonsense gets zeros, not a touch outside of the tensors.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include "cuda/launch.h"
#include "cuda/step_body.h"
#include "ops.h"
#include "step_arguments.h"

namespace layerzero {

namespace {

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) {
    check_call(aoti_torch_create_device_guard(index, &guard_), "create_device_guard");
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(guard_); }

 private:
  DeviceGuardHandle guard_ = nullptr;
};

constexpr size_t kMaxParts = 4000;  // pointers that one launch carries; cuda/launch.h

using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);

// libtorch_cuda is there whenever a tensor is on a GPU, but a CPU build of torch has none to link
// against; and it is loaded without RTLD_GLOBAL, so a lookup must name it.
GetStream find_get_stream() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

void* current_stream(int32_t device_index) {
  static const GetStream get_stream = find_get_stream();
  if (get_stream == nullptr)
    throw std::runtime_error(
        "layerzero: libtorch_cuda.so is not loaded, or has no current stream to give");
  void* stream = nullptr;
  check_call(get_stream(device_index, &stream), "get_current_cuda_stream");
  return stream;
}

void check_launch(int code, const char* op) {
  if (code != 0) throw std::runtime_error(std::string(op) + ": " + layerzero_cuda_error(code));
}

void check_is_cuda(const Output& out, const char* op) {
  if (out.device.type != aoti_torch_device_type_cuda())
    refuse(op, ": out is on ", name_of(out.device), ", another argument on a GPU; move it first");
}

void pack_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  TensorList list(stack[1]);
  const Handle segs_tensor(unbox<AtenTensorHandle>(stack[2]));
  const auto scale = unbox<double>(stack[3]);

  const Output out = check_output(out_tensor, "pack_");
  check_is_cuda(out, "pack_");
  const SegsShape segs = check_segs_shape(segs_tensor, out);
  const DeviceGuard guard(out.device.index);
  const Sources sources = check_sources(list, out, {"pack_", "source", false, -1});
  if (out.numel == 0) return;
  check_launch(layerzero_cuda_pack(out.data, out.dtype, out.numel, sources.data.data(),
                                   sources.numels.data(), static_cast<int64_t>(sources.data.size()),
                                   sources.dtype, segs.rows, segs.num_segs, scale,
                                   current_stream(out.device.index)),
               "pack_");
}

void ordered_sum_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  TensorList list(stack[1]);
  const auto scale = unbox<double>(stack[2]);

  const Output out = check_output(out_tensor, "ordered_sum_");
  check_is_cuda(out, "ordered_sum_");
  if (list.tensors.empty()) refuse("ordered_sum_: expected at least one part, got none");
  if (list.tensors.size() > kMaxParts)
    refuse("ordered_sum_: on a GPU one call takes at most ", kMaxParts, " parts, got ",
           list.tensors.size());
  const DeviceGuard guard(out.device.index);
  const Sources parts = check_sources(list, out, {"ordered_sum_", "part", true, out.numel});
  if (out.numel == 0) return;
  check_launch(layerzero_cuda_ordered_sum(out.data, out.dtype, out.numel, parts.data.data(),
                                          static_cast<int64_t>(parts.data.size()), parts.dtype,
                                          scale, current_stream(out.device.index)),
               "ordered_sum_");
}

void flat_step_cuda(StableIValue* stack, uint64_t, uint64_t) {
  const StepArguments arguments(stack);
  if (arguments.flats.empty()) return;
  const StepFlatArguments& first = arguments.flats[0];
  const Device device = first.main.device;
  StepCall call{arguments.factor, first.job.seed,  first.job.grad_scale,
                first.job.form,   first.job.dtype, first.job.num_states};
  std::vector<StepInput> inputs;
  const DeviceGuard guard(device.index);
  const auto launch = [&] {
    check_launch(layerzero_cuda_step(&call, inputs.data(), static_cast<int64_t>(inputs.size()),
                                     current_stream(device.index)),
                 "flat_step_");
    inputs.clear();
  };
  for (const StepFlatArguments& flat : arguments.flats) {
    const StepJob& job = flat.job;
    check_is_cuda(flat.main, "flat_step_");
    if (!(flat.main.device == device))
      refuse("flat_step_: main is on ", name_of(device), " and on ", name_of(flat.main.device));
    if (job.form != call.form || job.dtype != call.dtype) {
      launch();
      call.form = job.form;
      call.dtype = job.dtype;
    }
    inputs.push_back({job, job.rows, flat.num_rows});
  }
  launch();
}

}  // namespace

}  // namespace layerzero

STABLE_TORCH_LIBRARY_IMPL(layerzero, CUDA, m) {
  m.impl("pack_", &layerzero::pack_cuda);
  m.impl("ordered_sum_", &layerzero::ordered_sum_cuda);
  m.impl("flat_step_", &layerzero::flat_step_cuda);
}

// For a test, and exported because nothing else reaches the lookup where torch has CUDA but the
// machine no GPU, as on machines that build wheels: a name that torch changed is found there, not
// in a run.
extern "C" __attribute__((visibility("default"))) int layerzero_finds_current_stream() {
  return layerzero::find_get_stream() != nullptr;
}
