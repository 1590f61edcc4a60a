// Launchers of the CUDA kernels, as plain C without torch or CUDA headers: pack_cuda.cpp is built
// by the host compiler, the .cu files by nvcc alone, and a test loads the result by ctypes.
//
// All pointers to data are device pointers and belong to the device that is current in the calling
// thread. A launcher issues kernels on `stream` and returns: no allocation, no synchronization, so
// it may be captured into a CUDA graph. It returns a cudaError_t as int, 0 for success; an error
// that a kernel meets while running shows up at the caller's next synchronization. Dtypes are those
// of dtypes.h, as int.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// out[d] = cast(float32(src[s]) * scale), float64 sources in float64, for every row of `segs`.
//
// srcs, src_numels  host arrays [num_srcs]; they may be freed once the call returns. A null pointer
//                   or a numel of 0 is a missing source and reads as zeros.
// segs              device, [num_segs + 1, 3]: (source index or -1 for zeros, source offset,
//                   destination offset), sorted by destination, the last a sentinel at out_numel.
//
// The rows live on the device, so nobody checks them here. Rows that are nonsense give nonsense,
// but nothing outside of `out` and the sources is touched: what a source lacks reads as zeros.
// `out` must not overlap a source. More sources than one launch carries (see
// layerzero_cuda_launches) become several launches, each of which writes its own sources' rows.
int layerzero_cuda_pack(void* out, int out_dtype, int64_t out_numel, const void* const* srcs,
                        const int64_t* src_numels, int64_t num_srcs, int src_dtype,
                        const int64_t* segs, int64_t num_segs, double scale, void* stream);

// out = cast(scale * (parts[0] + parts[1] + ...)), added in this order in float32 (float64 for
// float64 parts). `parts` is a host array [num_parts] of device pointers to numel elements each;
// no parts give zeros, more than 4000 cudaErrorInvalidValue. `out` may be exactly one of the parts
// where both have one dtype; any other overlap is an error nobody notices.
int layerzero_cuda_ordered_sum(void* out, int out_dtype, int64_t numel, const void* const* parts,
                               int64_t num_parts, int part_dtype, double scale, void* stream);

// One optimizer step; `step_call` is a layerzero::StepCall, `step_inputs` are `count` of
// layerzero::StepInput (step_body.h) whose rows lie on the host and may be freed once the call
// returns. One launch for 32 flat parameters with 32 different rows in all. Tables lie on the
// device, and nobody checks them here.
int layerzero_cuda_step(const void* step_call, const void* step_inputs, int64_t count,
                        void* stream);

// Name and description of a code that a launcher returned; static memory.
const char* layerzero_cuda_error(int code);

// How many kernels layerzero_cuda_pack launches for so many sources (and a non-empty `out`).
int layerzero_cuda_launches(int64_t num_srcs);

#ifdef __cplusplus
}
#endif
