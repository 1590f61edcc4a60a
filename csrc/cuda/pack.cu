// Kernel and launcher of the pad-copy. pack_body.h has what a thread does, launch.h the contract.
#include <cuda_runtime_api.h>

#include "launch.h"
#include "pack_body.h"

namespace layerzero {
namespace {

// The sources travel in the parameters: no copy to the device, nothing to keep alive, and a
// captured graph holds its own. __grid_constant__ lets a thread index them where they are; without
// it each thread would copy them to its stack.
template <int kFrom, int kTo, int kCapacity>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor)
    pack_kernel(const __grid_constant__ PackParams<kCapacity> params) {
  pack_thread<kFrom, kTo>(params.job, params.srcs, params.numels, blockIdx.x, threadIdx.x);
}

template <int kFrom, int kTo, int kCapacity>
cudaError_t launch_windows(PackParams<kCapacity>& params, const void* const* srcs,
                           const int64_t* numels, cudaStream_t stream) {
  const int64_t blocks = pack_blocks<kFrom, kTo>(params.job.out_numel);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const void* kernel = reinterpret_cast<const void*>(pack_kernel<kFrom, kTo, kCapacity>);
  void* args[] = {&params};
  int64_t window = 0;
  do {
    fill_window(params, srcs, numels, window);
    const cudaError_t error = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                               dim3(kBlockThreads), args, 0, stream);
    if (error != cudaSuccess) {
      cudaGetLastError();  // the caller reports it; the next one to ask must not find it again
      return error;
    }
    window += kCapacity;
  } while (window < params.job.num_srcs);
  return cudaSuccess;
}

struct PackCall {
  PackJob job;
  const void* const* srcs;
  const int64_t* numels;
  cudaStream_t stream;
};

struct LaunchPack {
  template <int kFrom, int kTo>
  static cudaError_t run(const PackCall& call) {
    if (call.job.num_srcs <= kSmallWindow) {
      PackParams<kSmallWindow> params;
      params.job = call.job;
      return launch_windows<kFrom, kTo>(params, call.srcs, call.numels, call.stream);
    }
    PackParams<kLargeWindow> params;
    params.job = call.job;
    return launch_windows<kFrom, kTo>(params, call.srcs, call.numels, call.stream);
  }
  static cudaError_t unknown_dtype(const PackCall&) { return cudaErrorInvalidValue; }
};

}  // namespace
}  // namespace layerzero

int layerzero_cuda_pack(void* out, int out_dtype, int64_t out_numel, const void* const* srcs,
                        const int64_t* src_numels, int64_t num_srcs, int src_dtype,
                        const int64_t* segs, int64_t num_segs, double scale, void* stream) {
  if (out_numel == 0) return cudaSuccess;
  if (out == nullptr || out_numel < 0 || num_srcs < 0 || num_segs < 0) return cudaErrorInvalidValue;
  if (num_segs > INT32_MAX || (num_segs > 0 && segs == nullptr)) return cudaErrorInvalidValue;
  layerzero::PackCall call{};
  call.job.out = static_cast<char*>(out);
  call.job.out_numel = out_numel;
  call.job.segs = segs;
  call.job.num_segs = static_cast<int>(num_segs);
  call.job.num_srcs = num_srcs;
  call.job.scale = scale;
  call.srcs = srcs;
  call.numels = src_numels;
  call.stream = static_cast<cudaStream_t>(stream);
  return layerzero::dispatch<layerzero::LaunchPack>(src_dtype, out_dtype, call);
}

int layerzero_cuda_launches(int64_t num_srcs) {
  return static_cast<int>(layerzero::pack_launches(num_srcs));
}

const char* layerzero_cuda_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
