// Kernels and launcher of flat_step_; what a lane does is in step_body.h.
#include <cuda_runtime_api.h>

#include "launch.h"
#include "step_body.h"

namespace layerzero {
namespace {

template <class Of>
__global__ void __launch_bounds__(kBlockThreads,
                                  Of::kIsAny ? (sizeof(typename Of::T) == 8 ? 1 : 2) : 3)
    step_kernel(const __grid_constant__ StepParams<typename Of::T> params) {
  using T = typename Of::T;
  const int lane = threadIdx.x % kWarpThreads;
  const StepCall& call = params.call;
  visit_segments(params, blockIdx.x, threadIdx.x / kWarpThreads,
                 [&](const StepFlat& flat, const Segment& segment, const StepOptions<T>& options) {
                   LaneStates<Of> kept;
                   const bool wide = is_wide<Of>(call, flat, options, segment);
                   step_lane<Of>(call, flat, options, segment, wide, lane, kept);
                   if (Of::form(call) != kQuantForm) return;
                   LZ_UNROLL
                   for (int state = 0; state < Of::kStates; ++state)
                     for (int step = kWarpThreads / 2; step > 0; step /= 2) {
                       const uint32_t other =
                           __shfl_xor_sync(0xFFFFFFFFu, kept.largest[state], step);
                       if (other > kept.largest[state]) kept.largest[state] = other;
                     }
                   finish_lane<Of>(call, flat, options, segment, wide, lane, kept);
                 });
}

struct LaunchStep {
  cudaStream_t stream;

  template <class Of>
  int run(const StepCall& call, const StepInput* inputs, int64_t count) const {
    using T = typename Of::T;
    return launch_steps<T>(call, inputs, count, [&](StepParams<T>& params, int64_t blocks) -> int {
      if (blocks > INT32_MAX) return cudaErrorInvalidValue;
      void* args[] = {&params};
      const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(step_kernel<Of>),
                                                 dim3(static_cast<unsigned>(blocks)),
                                                 dim3(kBlockThreads), args, 0, stream);
      if (error != cudaSuccess) cudaGetLastError();  // the caller reports it
      return error;
    });
  }
};

}  // namespace
}  // namespace layerzero

int layerzero_cuda_step(const void* step_call, const void* step_inputs, int64_t count,
                        void* stream) {
  using namespace layerzero;
  return dispatch_step(LaunchStep{static_cast<cudaStream_t>(stream)},
                       *static_cast<const StepCall*>(step_call),
                       static_cast<const StepInput*>(step_inputs), count);
}
