#include "step.h"

#define LZ_SET baseline
#define LZ_TARGET
#include "step.inc"
#undef LZ_SET
#undef LZ_TARGET

#if defined(__x86_64__)
#define LZ_SET avx2
#define LZ_TARGET __attribute__((target("avx2,f16c,fma")))
#include "step.inc"
#endif

namespace layerzero {

const StepKernels& step_kernels() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                               __builtin_cpu_supports("fma");
  if (has_avx2 && !baseline_is_forced()) return avx2::step_table;
#endif
  return baseline::step_table;
}

}  // namespace layerzero
