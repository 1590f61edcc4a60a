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

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "checks.h"
#include "convert.h"
#include "ops.h"

namespace layerzero {

namespace {

constexpr const char* kOp = "find_changed";
constexpr int64_t kBlock = 512;
constexpr int64_t kWord = 64;
constexpr int kUsual = 3;
// A snapshot with these bits differs from everything; layerzero/ops/delta.py, Note [One NaN].
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

template <layerzero_dtype kDtype>
struct Format;
template <>
struct Format<LZ_FLOAT32> {
  using Bits = uint32_t;
  static constexpr Bits kInfinity = 0x7F800000u;
};
template <>
struct Format<LZ_FLOAT16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7C00u;
};
template <>
struct Format<LZ_BFLOAT16> {
  using Bits = uint16_t;
  static constexpr Bits kInfinity = 0x7F80u;
};
template <>
struct Format<LZ_FLOAT64> {
  using Bits = uint64_t;
  static constexpr Bits kInfinity = 0x7FF0000000000000u;
};

// What a comparison needs beside the elements.
template <class Bits>
struct Rules {
  Bits infinity;  // of a cast every greater magnitude becomes `nan`
  Bits nan;
};

// Gives the NaNs of a cast, or the one element that is kUnknown, the bits `nan`; returns a word
// with a bit for each of the n <= 64 elements that differ from the snapshot.
template <class Bits, bool kCasts>
inline uint64_t differing(Bits* fresh, const Bits* snapshot, int64_t n, Rules<Bits> rules) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  uint64_t word = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = fresh[i];
    const bool replaced = kCasts ? static_cast<Bits>(bits & kMagnitude) > rules.infinity
                                 : bits == static_cast<Bits>(kUnknown);
    fresh[i] = replaced ? rules.nan : bits;
    word |= static_cast<uint64_t>(fresh[i] != snapshot[i]) << i;
  }
  return word;
}

#if defined(__x86_64__)
#define LZ_AVX2_TARGET __attribute__((target("avx2")))

template <class Bits>
LZ_AVX2_TARGET inline __m256i all_of(Bits bits) {
  if constexpr (sizeof(Bits) == 2)
    return _mm256_set1_epi16(static_cast<int16_t>(bits));
  else
    return _mm256_set1_epi32(static_cast<int32_t>(bits));
}

// One vector: all ones in the elements that equal the snapshot's. Magnitudes are not negative, so a
// signed comparison serves.
template <class Bits, bool kCasts>
LZ_AVX2_TARGET inline __m256i equal(Bits* fresh, const Bits* snapshot, Rules<Bits> rules) {
  constexpr bool kIs16 = sizeof(Bits) == 2;
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  __m256i* const at = reinterpret_cast<__m256i*>(fresh);
  const __m256i bits = _mm256_load_si256(at);
  const __m256i was = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(snapshot));
  __m256i replaced;
  if constexpr (kCasts) {
    const __m256i magnitude = _mm256_and_si256(bits, all_of<Bits>(kMagnitude));
    const __m256i infinity = all_of<Bits>(rules.infinity);
    replaced =
        kIs16 ? _mm256_cmpgt_epi16(magnitude, infinity) : _mm256_cmpgt_epi32(magnitude, infinity);
  } else {
    const __m256i unknown = all_of<Bits>(static_cast<Bits>(kUnknown));
    replaced = kIs16 ? _mm256_cmpeq_epi16(bits, unknown) : _mm256_cmpeq_epi32(bits, unknown);
  }
  const __m256i now = _mm256_blendv_epi8(bits, all_of<Bits>(rules.nan), replaced);
  _mm256_store_si256(at, now);
  return kIs16 ? _mm256_cmpeq_epi16(now, was) : _mm256_cmpeq_epi32(now, was);
}

// `differing` of 64 elements.
template <class Bits, bool kCasts>
LZ_AVX2_TARGET uint64_t differing_avx2(Bits* fresh, const Bits* snapshot, Rules<Bits> rules) {
  constexpr int kNumel = 32 / sizeof(Bits);
  uint64_t word = 0;
  for (int i = 0; i < 64; i += 2 * kNumel) {
    const __m256i low = equal<Bits, kCasts>(fresh + i, snapshot + i, rules);
    const __m256i high = equal<Bits, kCasts>(fresh + i + kNumel, snapshot + i + kNumel, rules);
    uint64_t same = 0;
    if constexpr (sizeof(Bits) == 2) {
      // The pack works within 128-bit lanes, so the middle quarters come out swapped.
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
      same = static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
    } else {
      same = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(low))) |
             static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(high))) << kNumel;
    }
    word |= same << i;
  }
  return ~word;
}
#endif

template <class Bits, bool kCasts>
uint64_t word_of(Bits* fresh, const Bits* snapshot, int64_t n, Rules<Bits> rules,
                 [[maybe_unused]] bool avx2) {
#if defined(__x86_64__)
  if constexpr (sizeof(Bits) < 8) {
    if (avx2 && n == kWord) return differing_avx2<Bits, kCasts>(fresh, snapshot, rules);
  }
#endif
  return differing<Bits, kCasts>(fresh, snapshot, n, rules);
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

template <layerzero_dtype kDtype>
void search(Job& job) {
  using Bits = typename Format<kDtype>::Bits;
  alignas(64) Bits fresh[kBlock];
  Bits* const snapshot = static_cast<Bits*>(job.snapshot);
  const Rules<Bits> rules{Format<kDtype>::kInfinity, static_cast<Bits>(job.nan)};
  const auto compare = job.casts ? word_of<Bits, true> : word_of<Bits, false>;
  const bool avx2 = kernels().avx2;
  Output<Bits> out{job.indices, static_cast<Bits*>(job.values), job.count};
  for (int64_t begin = job.stop; begin < job.numel; begin += kBlock) {
    const int64_t n = std::min(kBlock, job.numel - begin);
    const bool is_usual = n == kBlock && job.capacity - out.count >= kBlock + kUsual;
    job.cast(job.main + begin * job.itemsize, fresh, n, 1.0, nullptr);
    for (int64_t first = 0; first < n; first += kWord) {
      Bits* const known = snapshot + begin + first;
      const Bits* const now = fresh + first;
      uint64_t word = compare(fresh + first, known, std::min(kWord, n - first), rules, avx2);
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

void* check_vector(const Handle& tensor, const char* noun, int64_t numel, const char* other,
                   int64_t itemsize) {
  int64_t dim = 0;
  check_call(aoti_torch_get_dim(tensor.get(), &dim), "dim");
  if (dim != 1 || !is_contiguous(tensor)) refuse(kOp, ": ", noun, " must be contiguous and 1-D");
  const Device device = device_of(tensor);
  if (device.type != aoti_torch_device_type_cpu())
    refuse(kOp, ": ", noun, " is on ", name_of(device), ", main on cpu");
  if (numel_of(tensor) != numel)
    refuse(kOp, ": ", other, " has ", numel, " elements, ", noun, " has ", numel_of(tensor));
  int64_t storage_nbytes = 0;
  int64_t offset = 0;
  check_call(aoti_torch_get_storage_size(tensor.get(), &storage_nbytes), "storage_size");
  check_call(aoti_torch_get_storage_offset(tensor.get(), &offset), "storage_offset");
  const int64_t needed = numel == 0 ? 0 : (offset + numel) * itemsize;
  if (storage_nbytes < needed)
    refuse(kOp, ": the storage of ", noun, " holds ", storage_nbytes, " bytes, the tensor needs ",
           needed, "; its memory was freed");
  void* data = nullptr;
  check_call(aoti_torch_get_data_ptr(tensor.get(), &data), "data_ptr");
  return data;
}

StableIValue boxed(int64_t value) {
  StableIValue slot{};
  __builtin_memcpy(&slot, &value, sizeof(value));
  return slot;
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
      static_cast<const char*>(check_vector(main, "main", numel, "main", size_of(from))),
      size_of(from),
      check_vector(snapshot, "snapshot", numel, "main", size_of(to)),
      update,
      numel,
      kernels().copy[from][to],
      from != to,
      nan,
      static_cast<int64_t*>(check_vector(indices, "indices", capacity, "indices", sizeof(int64_t))),
      check_vector(values, "values", capacity, "indices", size_of(to)),
      capacity,
      0,
      start,
  };
  switch (to) {
    case LZ_FLOAT32: search<LZ_FLOAT32>(job); break;
    case LZ_FLOAT16: search<LZ_FLOAT16>(job); break;
    case LZ_BFLOAT16: search<LZ_BFLOAT16>(job); break;
    case LZ_FLOAT64: search<LZ_FLOAT64>(job); break;
  }
  stack[0] = boxed(job.count);
  stack[1] = boxed(job.stop);
}

}  // namespace layerzero
