#include "convert.h"

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LZ_SET baseline
#define LZ_TARGET
#define LZ_AVX2 0
#include "convert.inc"
#undef LZ_SET
#undef LZ_TARGET
#undef LZ_AVX2

#if defined(__x86_64__)
// Not by -march: the library must load on any processor of its kind.
#define LZ_SET avx2
#define LZ_TARGET __attribute__((target("avx2,f16c")))
#define LZ_AVX2 1
#include "convert.inc"
#endif

namespace layerzero {

static std::atomic<bool> baseline_forced{false};

bool baseline_is_forced() { return baseline_forced.load(std::memory_order_relaxed); }

const Kernels& kernels() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (has_avx2 && !baseline_is_forced()) return avx2::table;
#endif
  return baseline::table;
}

}  // namespace layerzero

// For tests, and exported because of what they show: that the binary which ships gives the same
// bits on a processor without AVX2, where no test machine may be one. Returns what was set before.
extern "C" __attribute__((visibility("default"))) int layerzero_force_baseline(int forced) {
  return layerzero::baseline_forced.exchange(forced != 0);
}
