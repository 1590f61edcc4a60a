#include "step.h"

#define LZ_SET baseline
#define LZ_TARGET
#include "step.inc"
#undef LZ_SET
#undef LZ_TARGET

#if defined(__x86_64__)
#include <immintrin.h>

#define LZ_AVX
#define LZ_SET avx2
#define LZ_TARGET __attribute__((target("avx2,f16c,fma")))
#include "step.inc"
#undef LZ_SET
#undef LZ_TARGET

#define LZ_SET avx512
#define LZ_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma")))
#include "step.inc"
#endif

namespace layerzero {

const StepKernels& step_kernels() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                               __builtin_cpu_supports("fma");
  static const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !baseline_is_forced()) return avx512::step_table;
  if (has_avx2 && !baseline_is_forced()) return avx2::step_table;
#endif
  return baseline::step_table;
}

}  // namespace layerzero
