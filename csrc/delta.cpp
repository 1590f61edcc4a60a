// find_changed on the CPU: which elements of a cast differ from a snapshot, in one pass.
//
// Blocks are cast into the first cache and compared there, 64 elements to a word of differing bits.
// Bytes moved: main and snapshot read once, up to where the search stops; indices and values
// written once for each element found; on request the lines of the snapshot that have one, while
// they are in the cache. It is one thread, because the result is in order.
//
// Where a few percent of the elements differ, branches that depend on single words cannot be
// predicted, and stall reading: usual words take none.
#include <algorithm>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "checks.h"
#include "convert.h"
#include "ops.h"

namespace layerzero {

namespace {

constexpr const char* kOp = "find_changed";
constexpr int64_t kBlock = 512;
constexpr int kWord = 64;
constexpr int kUsual = 3;
// A snapshot with these bits differs from everything: Note [One NaN] in
// layerzero/checkpoint/delta/scan.py.
constexpr int64_t kUnknown = -2;

struct Job {
  const char* main;
  int64_t itemsize;
  void* snapshot;
  bool update;
  int64_t numel;
  Copy cast;
  bool casts;
  int64_t nan;
  int64_t* indices;
  void* values;
  int64_t capacity;
  int64_t count;
  int64_t stop;
};

// What a comparison needs beside the elements.
template <class Bits>
struct Rules {
  Bits infinity;  // of a cast every greater magnitude becomes `nan`
  Bits nan;
};

// Gives the NaNs of a cast, or the one element that is kUnknown, the bits `nan`, and notes which of
// n elements differ from the snapshot.
template <class Bits, bool kCasts>
inline __attribute__((always_inline)) void note_differing(Bits* __restrict fresh,
                                                          const Bits* __restrict snapshot,
                                                          int64_t n, Rules<Bits> rules,
                                                          uint8_t* __restrict differ) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = fresh[i];
    const bool replaced = kCasts ? static_cast<Bits>(bits & kMagnitude) > rules.infinity
                                 : bits == static_cast<Bits>(kUnknown);
    const Bits now = replaced ? rules.nan : bits;
    fresh[i] = now;
    differ[i] = now != snapshot[i] ? 255 : 0;
  }
}

template <class Bits, bool kCasts>
void compare(Bits* fresh, const Bits* snapshot, int64_t n, Rules<Bits> rules, uint8_t* differ) {
  note_differing<Bits, kCasts>(fresh, snapshot, n, rules, differ);
}

#if defined(__x86_64__)
// The same code for another instruction set.
template <class Bits, bool kCasts>
__attribute__((target("avx2"))) void compare_avx2(Bits* fresh, const Bits* snapshot, int64_t n,
                                                  Rules<Bits> rules, uint8_t* differ) {
  note_differing<Bits, kCasts>(fresh, snapshot, n, rules, differ);
}
#endif

// A bit for each of 64 bytes that are 0 or 255.
inline uint64_t word_of(const uint8_t* differ) {
  uint64_t word = 0;
#if defined(__SSE2__)
  for (int i = 0; i < kWord; i += 16) {
    const auto bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(differ + i));
    word |= static_cast<uint64_t>(_mm_movemask_epi8(bytes)) << i;
  }
#else
  for (int i = 0; i < kWord; ++i) word |= static_cast<uint64_t>(differ[i] & 1) << i;
#endif
  return word;
}

template <class Bits>
struct Output {
  int64_t* indices;
  Bits* values;
  int64_t count;
};

// Writes the elements of a word's bits, of which `fresh` is the first and `begin` its index; they
// fit, and up to kUsual more. Few words have more than kUsual bits, so few branches are
// mispredicted.
template <class Bits>
inline void write_found(uint64_t word, const Bits* fresh, int64_t begin, Output<Bits>& out) {
  constexpr uint64_t kLast = uint64_t{1} << (kWord - 1);
  const auto write = [&] {
    const int64_t i = __builtin_ctzll(word | kLast);
    out.indices[out.count] = begin + i;
    out.values[out.count] = fresh[i];
    out.count += word != 0;
    word &= word - 1;
  };
  for (int k = 0; k < kUsual; ++k) write();
  while (word != 0) write();
}

// Copies the cache lines of 64 elements in which a word has a bit; the others go to a line that
// nobody reads, so that there is no branch.
template <class Bits>
inline void update_lines(uint64_t word, const Bits* fresh, Bits* snapshot) {
  constexpr int kLine = 64 / sizeof(Bits);
  constexpr uint64_t kMask = ~uint64_t{0} >> (kWord - kLine);
  alignas(64) Bits unread[kLine];
  for (int i = 0; i < kWord; i += kLine) {
    Bits* const to = (word >> i & kMask) != 0 ? snapshot + i : unread;
    __builtin_memcpy(to, fresh + i, 64);
  }
}

template <class Bits>
void search(Job& job, uint64_t infinity) {
  alignas(64) Bits fresh[kBlock];
  Bits* const snapshot = static_cast<Bits*>(job.snapshot);
  const Rules<Bits> rules{static_cast<Bits>(infinity), static_cast<Bits>(job.nan)};
  auto run = job.casts ? compare<Bits, true> : compare<Bits, false>;
#if defined(__x86_64__)
  if (kernels().avx2) run = job.casts ? compare_avx2<Bits, true> : compare_avx2<Bits, false>;
#endif
  alignas(64) uint8_t differ[kBlock] = {};
  Output<Bits> out{job.indices, static_cast<Bits*>(job.values), job.count};
  for (int64_t begin = job.stop; begin < job.numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, job.numel - begin);
    const bool is_usual = n == kBlock && job.capacity - out.count >= kBlock + kUsual;
    job.cast(job.main + begin * job.itemsize, fresh, n, 1.0, nullptr);
    std::fill(differ + n, differ + kBlock, 0);
    run(fresh, snapshot + begin, n, rules, differ);
    for (int64_t first = 0; first < n; first += kWord) {
      Bits* const known = snapshot + begin + first;
      const Bits* const now = fresh + first;
      uint64_t word = word_of(differ + first);
      if (is_usual) {
        write_found(word, now, begin + first, out);
        if (job.update) update_lines(word, now, known);
        continue;
      }
      for (; word != 0; word &= word - 1) {
        const int64_t i = __builtin_ctzll(word);
        out.indices[out.count] = begin + first + i;
        out.values[out.count] = now[i];
        if (job.update) known[i] = now[i];
        if (++out.count == job.capacity) {
          job.count = out.count;
          job.stop = begin + first + i + 1;
          return;
        }
      }
    }
  }
  job.count = out.count;
  job.stop = job.numel;
}

void* check_vector(const Handle& tensor, const char* noun, int64_t numel, const char* other) {
  int64_t dim = 0;
  check_call(aoti_torch_get_dim(tensor.get(), &dim), "dim");
  if (dim != 1) refuse(kOp, ": ", noun, " must be contiguous and 1-D");
  if (numel_of(tensor) != numel)
    refuse(kOp, ": ", other, " has ", numel, " elements, ", noun, " has ", numel_of(tensor));
  return memory_of(tensor, kOp, noun, {aoti_torch_device_type_cpu(), 0});
}

}  // namespace

void find_changed_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle indices(unbox<AtenTensorHandle>(stack[0]));
  const Handle values(unbox<AtenTensorHandle>(stack[1]));
  const Handle main(unbox<AtenTensorHandle>(stack[2]));
  const Handle snapshot(unbox<AtenTensorHandle>(stack[3]));
  const auto start = unbox<int64_t>(stack[4]);
  const auto update = unbox<bool>(stack[5]);
  const auto nan = unbox<int64_t>(stack[6]);

  const layerzero_dtype from = dtype_of(main, kOp, "main", -1);
  const layerzero_dtype to = dtype_of(snapshot, kOp, "snapshot", -1);
  const int64_t numel = numel_of(main);
  const int64_t capacity = numel_of(indices);
  if (scalar_type_of(indices) != aoti_torch_dtype_int64() || capacity == 0 ||
      scalar_type_of(values) != scalar_type_of(snapshot))
    refuse(kOp, ": indices must be int64 with at least one element, and values have the dtype of ",
           "snapshot, got scalar type ", scalar_type_of(indices), " [", capacity, "], ",
           scalar_type_of(values), " and ", scalar_type_of(snapshot));
  if (start < 0 || start > numel)
    refuse(kOp, ": start ", start, " is outside of ", numel, " elements");
  Job job{
      static_cast<const char*>(check_vector(main, "main", numel, "main")),
      size_of(from),
      check_vector(snapshot, "snapshot", numel, "main"),
      update,
      numel,
      kernels().copy[from][to],
      from != to,
      nan,
      static_cast<int64_t*>(check_vector(indices, "indices", capacity, "indices")),
      check_vector(values, "values", capacity, "indices"),
      capacity,
      0,
      start,
  };
  switch (to) {
    case LZ_FLOAT32: search<uint32_t>(job, 0x7F800000u); break;
    case LZ_FLOAT16: search<uint16_t>(job, 0x7C00u); break;
    case LZ_BFLOAT16: search<uint16_t>(job, 0x7F80u); break;
    case LZ_FLOAT64: search<uint64_t>(job, 0x7FF0000000000000u); break;
  }
  stack[0] = box(job.count);
  stack[1] = box(job.stop);
}

}  // namespace layerzero
