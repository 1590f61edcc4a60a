// Kernel and launcher of flat_step_; what a lane does is in step_body.h.
#include <cuda_runtime_api.h>

#include "launch.h"
#include "step_body.h"

namespace layerzero {
namespace {

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    step_kernel(const __grid_constant__ StepParams params) {
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t warp = int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarpThreads;
  const int64_t begin = warp * kSegmentNumel;
  if (begin >= params.call.main_numel) return;  // The whole warp.
  const StepCall& call = params.call;
  visit_segments(
      params, begin, begin + kSegmentNumel, [&](const Segment& segment, const double* row) {
        LaneStates<T> kept;
        step_lane<T>(call, row, segment, lane, kept);
        if (call.form != kQuantForm && call.phase != kMeasure) return;
        LZ_UNROLL
        for (int state = 0; state < kMaxStates; ++state)
          for (int step = kWarpThreads / 2; step > 0; step /= 2) {
            const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, kept.largest[state], step);
            if (other > kept.largest[state]) kept.largest[state] = other;
          }
        finish_lane<T>(call, row, segment, lane, kept);
      });
}

}  // namespace
}  // namespace layerzero

int layerzero_cuda_step(const void* step_call, const double* rows, int64_t num_rows, void* stream) {
  using namespace layerzero;
  StepParams params;
  params.call = *static_cast<const StepCall*>(step_call);
  const int64_t blocks = step_blocks(params.call.main_numel);
  if (blocks == 0 || params.call.num_ranges == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const void* const kernel = params.call.dtype == LZ_FLOAT64
                                 ? reinterpret_cast<const void*>(step_kernel<double>)
                                 : reinterpret_cast<const void*>(step_kernel<float>);
  void* args[] = {&params};
  for (int64_t begin = 0; begin < num_rows; begin += kRowWindow) {
    params.row_begin = begin;
    params.num_rows = num_rows - begin < kRowWindow ? num_rows - begin : kRowWindow;
    memcpy(params.rows, rows + begin * kRowColumns,
           sizeof(double) * static_cast<size_t>(params.num_rows * kRowColumns));
    const cudaError_t error =
        cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), args, 0,
                         static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      cudaGetLastError();  // the caller reports it
      return error;
    }
  }
  return cudaSuccess;
}
