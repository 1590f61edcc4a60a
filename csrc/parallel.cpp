#include <algorithm>

#include "ops.h"

namespace layerzero {

namespace {

struct Units {
  int64_t numel;
  int64_t unit;
  const void* context;
  Work work;
};

}  // namespace

void parallel_units(int64_t numel, int64_t unit, int64_t min_per_thread, const void* context,
                    Work work) {
  if (numel < 2 * min_per_thread) {
    work(context, 0, numel);
    return;
  }
  Units units{numel, unit, context, work};
  // The stable ABI's parallel_for, not at::parallel_for: that one is inline in a header and,
  // without -fopenmp, silently serial.
  check_call(torch_parallel_for(
                 0, (numel + unit - 1) / unit, min_per_thread / unit,
                 [](int64_t begin, int64_t end, void* pointer) {
                   const Units& all = *static_cast<const Units*>(pointer);
                   all.work(all.context, begin * all.unit, std::min(end * all.unit, all.numel));
                 },
                 &units),
             "parallel_for");
}

}  // namespace layerzero
