// pack_ on the CPU: N tensors into one flat buffer, cast and scaled in one pass.
//
// segs [S + 1, 3] is the layout: rows (source or -1, offset in the source, offset in out) in rising
// order of the last column, which begins at 0 and ends, in a sentinel row, at out's numel. So each
// element of out belongs to one row, and the work is split over elements of out, not over tensors:
//
//     out   | 0 0 0 0 0 . . . 1 1 1 1 1 1 1 1 1 1 1 |      . row -1: zeros
//     segs    0,0,0     -1,0,5  1,0,8                 -1,0,19 (sentinel)
//     threads | first           | second            |
//
// Each thread writes one contiguous range, each byte of out once: bytes moved are those of the
// sources that are used, read once, and of out, written once.
//
// Note [Rows begin cold]: a processor fetches ahead within a run of addresses, and some lines past
// its end. Short rows that lie further apart than that each begin with a cache miss, and their
// distance is up to the allocator. So where a conversion writes fewer bytes than it reads, the next
// row is fetched by hand, a line at a time, while this one is converted: up to a sixth less time
// for rows of 1 to 4 KB. Longer rows, wider outputs and plain copies gain nothing.
// docs/internals/pad_copy.md.
#include <algorithm>

#include "checks.h"
#include "convert.h"
#include "ops.h"

namespace layerzero {

namespace {

constexpr int64_t kRow = 3;
// Waking the pool costs some microseconds: below this many elements one thread is faster.
constexpr int64_t kMinPerThread = 32768;
// Threads meet at whole cache lines of out: no line is written by two.
constexpr int64_t kUnit = 64;
// Of a row beside which the next one is fetched; see Note [Rows begin cold].
constexpr int64_t kAheadNbytes = 4096;
// Rows that are looked at for the next one with a source: between two there is at most padding.
constexpr int64_t kLookahead = 2;

struct Job {
  const void* const* sources;
  const int64_t* segs;
  int64_t num_segs;
  int64_t src_itemsize;
  int64_t out_itemsize;
  double scale;
  Copy copy;
};

// Memory of a row's source; null: the row becomes zeros.
const char* source_of(const Job& job, const int64_t* seg) {
  return seg[0] < 0 ? nullptr : static_cast<const char*>(job.sources[seg[0]]);
}

// What is read after `row`, before `end`; null: nothing, or not in order.
const void* ahead_of(const Job& job, int64_t row, int64_t end) {
  for (int64_t next = row + 1; next <= row + kLookahead; ++next) {
    const int64_t* const seg = job.segs + next * kRow;
    if (seg[2] >= end) break;  // the sentinel at the latest
    const char* const source = source_of(job, seg);
    if (source != nullptr) return source + seg[1] * job.src_itemsize;
  }
  return nullptr;
}

// Writes elements [begin, end) of out to `to`.
void pack_range(const Job& job, int64_t begin, int64_t end, char* to) {
  // The last row that begins at or before `begin`.
  int64_t low = 0;
  int64_t high = job.num_segs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (job.segs[middle * kRow + 2] <= begin)
      low = middle;
    else
      high = middle;
  }
  for (int64_t row = low; begin < end; ++row) {
    const int64_t* const seg = job.segs + row * kRow;
    const int64_t stop = std::min(end, seg[kRow + 2]);
    if (stop <= begin) continue;
    const int64_t count = stop - begin;
    const char* const source = source_of(job, seg);
    if (source == nullptr) {
      __builtin_memset(to, 0, count * job.out_itemsize);
    } else {
      const int64_t from = seg[1] + begin - seg[2];
      const bool fetches =
          job.out_itemsize < job.src_itemsize && count * job.src_itemsize <= kAheadNbytes;
      job.copy(source + from * job.src_itemsize, to, count, job.scale,
               fetches ? ahead_of(job, row, end) : nullptr);
    }
    begin = stop;
    to += count * job.out_itemsize;
  }
}

void check_segs(const int64_t* segs, int64_t num_segs, const std::vector<int64_t>& numels,
                int64_t out_numel) {
  const auto num_sources = static_cast<int64_t>(numels.size());
  if (segs[2] != 0) refuse("pack_: segs must begin at destination 0, row 0 begins at ", segs[2]);
  for (int64_t row = 0; row < num_segs; ++row) {
    const int64_t* const seg = segs + row * kRow;
    if (seg[kRow + 2] < seg[2])
      refuse("pack_: destinations of segs must rise, row ", row, " begins at ", seg[2], " and row ",
             row + 1, " at ", seg[kRow + 2]);
    if (seg[0] < 0) continue;
    if (seg[0] >= num_sources)
      refuse("pack_: row ", row, " of segs names source ", seg[0], ", there are ", num_sources,
             " sources");
    const int64_t numel = numels[seg[0]];
    const int64_t count = seg[kRow + 2] - seg[2];
    // Compared so that nothing can overflow.
    if (numel != 0 && (seg[1] < 0 || seg[1] > numel || count > numel - seg[1]))
      refuse("pack_: row ", row, " of segs reads ", count, " elements from ", seg[1], " of source ",
             seg[0], ", which has ", numel);
  }
  const int64_t end = segs[num_segs * kRow + 2];
  if (end != out_numel) refuse("pack_: segs cover ", end, " elements, out has ", out_numel);
}

}  // namespace

SegsShape check_segs_shape(const Handle& segs, const Output& out) {
  const int32_t dtype = scalar_type_of(segs);
  const bool contiguous = is_contiguous(segs);
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  check_call(aoti_torch_get_dim(segs.get(), &dim), "dim");
  check_call(aoti_torch_get_sizes(segs.get(), &sizes), "sizes");
  if (dtype != aoti_torch_dtype_int64() || dim != 2 || sizes[0] < 1 || sizes[1] != kRow ||
      !contiguous) {
    std::ostringstream shape;
    for (int64_t i = 0; i < dim; ++i) shape << (i ? ", " : "") << sizes[i];
    refuse("pack_: segs must be contiguous int64 [S + 1, 3], got scalar type ", dtype, " [",
           shape.str(), "]", contiguous ? "" : ", not contiguous");
  }
  const Device device = device_of(segs);
  if (!(device == out.device))
    refuse("pack_: segs are on ", name_of(device), ", out is on ", name_of(out.device),
           "; move them first");
  return {static_cast<const int64_t*>(data_of(segs)), sizes[0] - 1};
}

void pack_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  TensorList list(stack[1]);
  const Handle segs_tensor(unbox<AtenTensorHandle>(stack[2]));
  const auto past_cache = unbox<bool>(stack[4]);

  const Output out = check_output(out_tensor, "pack_");
  const SegsShape segs = check_segs_shape(segs_tensor, out);
  const Sources sources = check_sources(list, out, {"pack_", "source", false, -1});
  check_segs(segs.rows, segs.num_segs, sources.numels, out.numel);
  if (out.numel == 0) return;
  const Kernels& table = kernels();
  const Job job{sources.data.data(),
                segs.rows,
                segs.num_segs,
                size_of(sources.dtype),
                size_of(out.dtype),
                unbox<double>(stack[3]),
                (past_cache ? table.stream : table.copy)[sources.dtype][out.dtype]};
  auto* const memory = static_cast<char*>(out.data);
  parallel_units(out.numel, kUnit, kMinPerThread, [&](int64_t begin, int64_t end) {
    pack_range(job, begin, end, memory + begin * job.out_itemsize);
  });
}

}  // namespace layerzero
