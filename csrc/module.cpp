// Registers the CPU kernels. The schemas are in layerzero/ops/schema.py, so that everything works,
// slower, without this library; it has no Python module of its own and is loaded by
// torch.ops.load_library.
#include <torch/csrc/stable/library.h>

#include "ops.h"

// layerzero/ops/native.py finds it in the file.
__attribute__((used)) static const char kBuiltFor[] = "layerzero ops " LAYERZERO_OPS;

STABLE_TORCH_LIBRARY_IMPL(layerzero, CPU, m) {
  m.impl("pack_", &layerzero::pack_cpu);
  m.impl("ordered_sum_", &layerzero::ordered_sum_cpu);
  m.impl("flat_step_", &layerzero::flat_step_cpu);
  m.impl("sum_squares_", &layerzero::sum_squares_cpu);
  m.impl("crc32", &layerzero::crc32_cpu);
  m.impl("copy_crc32_", &layerzero::copy_crc32_cpu);
  m.impl("word_sums_", &layerzero::word_sums_cpu);
  m.impl("find_changed_", &layerzero::find_changed_cpu);
}
