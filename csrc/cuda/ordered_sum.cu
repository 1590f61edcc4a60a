// Kernel and launcher of the deterministic reduction's sum; what a thread does is in
// ordered_sum_body.h, the contract in launch.h.
#include <cuda_runtime_api.h>

#include "launch.h"
#include "ordered_sum_body.h"

namespace layerzero {
namespace {

template <int kFrom, int kTo>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    ordered_sum_kernel(const __grid_constant__ SumParams<typename Format<kFrom>::Compute> params) {
  ordered_sum_thread<kFrom, kTo>(params.job, params.parts, blockIdx.x, threadIdx.x);
}

struct SumCall {
  char* out;
  int64_t numel;
  const void* const* parts;
  int num_parts;
  double scale;
  cudaStream_t stream;
};

struct LaunchSum {
  template <int kFrom, int kTo>
  static cudaError_t run(const SumCall& call) {
    using Compute = typename Format<kFrom>::Compute;
    const int64_t blocks = sum_blocks<kFrom, kTo>(call.numel);
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    SumParams<Compute> params;
    params.job = {call.out, call.numel, call.num_parts, static_cast<Compute>(call.scale)};
    for (int i = 0; i < call.num_parts; ++i) params.parts[i] = call.parts[i];
    void* args[] = {&params};
    const cudaError_t error = cudaLaunchKernel(
        reinterpret_cast<const void*>(ordered_sum_kernel<kFrom, kTo>),
        dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), args, 0, call.stream);
    if (error != cudaSuccess) cudaGetLastError();  // the caller reports it, and nobody else
    return error;
  }
  static cudaError_t unknown_dtype(const SumCall&) { return cudaErrorInvalidValue; }
};

}  // namespace
}  // namespace layerzero

int layerzero_cuda_ordered_sum(void* out, int out_dtype, int64_t numel, const void* const* parts,
                               int64_t num_parts, int part_dtype, double scale, void* stream) {
  if (numel == 0) return cudaSuccess;
  if (out == nullptr || numel < 0 || num_parts < 0) return cudaErrorInvalidValue;
  if (num_parts > layerzero::kMaxParts) return cudaErrorInvalidValue;
  for (int64_t i = 0; i < num_parts; ++i) {
    if (parts[i] == nullptr) return cudaErrorInvalidValue;
  }
  layerzero::SumCall call{};
  call.out = static_cast<char*>(out);
  call.numel = numel;
  call.parts = parts;
  call.num_parts = static_cast<int>(num_parts);
  call.scale = scale;
  call.stream = static_cast<cudaStream_t>(stream);
  return layerzero::dispatch<layerzero::LaunchSum>(part_dtype, out_dtype, call);
}
