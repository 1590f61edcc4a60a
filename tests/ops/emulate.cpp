// Runs the kernel bodies on the CPU, every thread of every block in turn, against plain references.
//
// For g++ with -fsanitize=address,undefined. Sources and outputs are heap blocks of their exact
// size, so an access past an end is reported; the bytes before a skewed start are canaries. What
// this cannot see: the launch, the device's conversions (they are single instructions), and time.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "ordered_sum_body.h"
#include "pack_body.h"

namespace {

using namespace layerzero;

std::mt19937_64 rng(0);
int64_t num_launches = 0;
int64_t num_checked = 0;

int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }

[[noreturn]] void fail(const char* what, int from, int to, int64_t at, uint64_t got,
                       uint64_t want) {
  std::printf("FAILED: %s, dtype %d to %d, at %lld: got bits %llx, expected %llx\n", what, from, to,
              static_cast<long long>(at), static_cast<unsigned long long>(got),
              static_cast<unsigned long long>(want));
  std::exit(1);
}

// --- Values of elements, by the conversions of elements.h: those of the device are instructions

template <int kDtype>
double decoded(uint64_t bits) {
  return Format<kDtype>::decode(static_cast<typename Format<kDtype>::Bits>(bits));
}

// `value` as it is computed: already rounded to float32 unless the source is float64.
template <int kDtype>
uint64_t encoded(double value) {
  return Format<kDtype>::encode(static_cast<typename Format<kDtype>::Compute>(value));
}

template <int kDtype>
uint64_t bits_at(const char* data, int64_t i) {
  return reinterpret_cast<const typename Format<kDtype>::Bits*>(data)[i];
}

template <int kDtype>
void expect(const char* what, int from, const char* out, int64_t i, double value) {
  const uint64_t got = bits_at<kDtype>(out, i);
  const uint64_t want = encoded<kDtype>(value);
  ++num_checked;
  if (got == want || (std::isnan(decoded<kDtype>(got)) && std::isnan(value))) return;
  fail(what, from, kDtype, i, got, want);
}

// --- Buffers

constexpr char kCanary = 0x5A;

// A heap block that ends where the elements end; they start `skew` elements into it.
struct Buffer {
  std::unique_ptr<char[]> block;
  char* data;
  int64_t skew_bytes;

  Buffer(int64_t numel, int64_t size, int64_t skew)
      : block(new char[(numel + skew) * size]), skew_bytes(skew * size) {
    data = block.get() + skew_bytes;
    std::fill(block.get(), data + numel * size, kCanary);
  }

  bool start_is_intact() const {
    return std::all_of(block.get(), data, [](char byte) { return byte == kCanary; });
  }
};

// Values that reach every branch of the conversions: any bits, halves of steps, and the usual.
template <int kDtype>
typename Format<kDtype>::Bits random_bits() {
  const uint64_t random = rng();
  const float usual = std::ldexp(static_cast<float>(below(1 << 24)) / (1 << 24) - 0.5f,
                                 static_cast<int>(below(50)) - 30);
  const int kind = static_cast<int>(random >> 60);
  if (kind < 4) return static_cast<typename Format<kDtype>::Bits>(random);
  if (kDtype == LZ_FLOAT32 && kind < 8) {
    const uint32_t step = kind < 6 ? 0x1FFFu : 0xFFFFu;
    return static_cast<typename Format<kDtype>::Bits>((bits_as<uint32_t>(usual) & ~step) |
                                                      (step / 2 + 1));
  }
  if (kDtype == LZ_FLOAT64 && kind < 8) {
    return static_cast<typename Format<kDtype>::Bits>(
        bits_as<uint64_t>(static_cast<double>(usual)) + random % 3);
  }
  return static_cast<typename Format<kDtype>::Bits>(encoded<kDtype>(usual));
}

template <int kDtype>
Buffer random_buffer(int64_t numel, int64_t skew) {
  Buffer buffer(numel, kElementSize<kDtype>, skew);
  for (int64_t i = 0; i < numel; ++i) {
    reinterpret_cast<typename Format<kDtype>::Bits*>(buffer.data)[i] = random_bits<kDtype>();
  }
  return buffer;
}

template <class Visit>
void for_each_dtype(Visit visit) {
  visit(std::integral_constant<int, LZ_FLOAT32>());
  visit(std::integral_constant<int, LZ_FLOAT16>());
  visit(std::integral_constant<int, LZ_BFLOAT16>());
  visit(std::integral_constant<int, LZ_FLOAT64>());
}

// --- Pad-copy

enum Presence { kPresent, kNull, kEmpty };

struct Row {
  int64_t src, src_offset, offset;
};

struct Layout {
  struct Source {
    int64_t numel;
    int64_t skew;
    Presence presence;
  };
  std::vector<Source> sources;
  std::vector<Row> rows;  // without the sentinel
  int64_t numel = 0;

  void add_zeros(int64_t count) {
    if (count == 0) return;
    rows.push_back({-1, 0, numel});
    numel += count;
  }

  void add_source(int64_t count, int64_t skew, Presence presence, int64_t alignment) {
    add_zeros((alignment - numel % alignment) % alignment);
    if (count > 0) rows.push_back({static_cast<int64_t>(sources.size()), 0, numel});
    sources.push_back({count, skew, presence});
    numel += count;
  }

  // The part of the last source that a rank owns, instead of all of it.
  void keep_part_of_last(int64_t begin, int64_t end) {
    if (sources.back().numel == 0) return;
    numel += end - begin - sources.back().numel;
    rows.back().src_offset = begin;
    if (begin == end) rows.pop_back();
  }
};

Layout random_layout(int num_sources, int64_t max_numel) {
  Layout layout;
  constexpr int64_t kAlignments[] = {1, 4, 16};
  const int64_t alignment = kAlignments[below(3)];
  layout.add_zeros(below(3) == 0 ? below(40) : 0);
  for (int i = 0; i < num_sources; ++i) {
    const int64_t kind = below(20);
    const int64_t numel = kind == 0 ? 0 : 1 + below(kind == 1 ? max_numel : 1 + max_numel / 16);
    const int64_t skew = below(2) == 0 ? 0 : below(8);
    const Presence presence = kind == 2 ? kNull : kind == 3 ? kEmpty : kPresent;
    layout.add_source(numel, skew, presence, alignment);
    if (kind == 4) {
      const int64_t begin = below(numel + 1);
      layout.keep_part_of_last(begin, begin + below(numel - begin + 1));
    }
  }
  layout.add_zeros(below(3) == 0 ? 0 : below(600));
  return layout;
}

std::unique_ptr<int64_t[]> segs_of(const std::vector<Row>& rows, int64_t numel) {
  std::unique_ptr<int64_t[]> segs(new int64_t[3 * (rows.size() + 1)]);
  int64_t* at = segs.get();
  for (const Row& row : rows) {
    *at++ = row.src;
    *at++ = row.src_offset;
    *at++ = row.offset;
  }
  at[0] = -1;
  at[1] = 0;
  at[2] = numel;
  return segs;
}

template <int kFrom, int kTo, int kCapacity>
void launch(const PackJob& job, const std::vector<const void*>& srcs,
            const std::vector<int64_t>& numels) {
  auto params = std::make_unique<PackParams<kCapacity>>();
  params->job = job;
  int64_t window = 0;
  do {
    fill_window(*params, srcs.data(), numels.data(), window);
    // Exact copies: an index past the window's end is an error here, not a stale pointer.
    const int64_t count = params->job.num_window;
    std::unique_ptr<const void*[]> window_srcs(new const void*[count]);
    std::unique_ptr<int64_t[]> window_numels(new int64_t[count]);
    std::copy_n(params->srcs, count, window_srcs.get());
    std::copy_n(params->numels, count, window_numels.get());
    for (int64_t block = 0; block < pack_blocks<kFrom, kTo>(job.out_numel); ++block) {
      for (int thread = 0; thread < kBlockThreads; ++thread) {
        pack_thread<kFrom, kTo>(params->job, window_srcs.get(), window_numels.get(), block, thread);
      }
    }
    ++num_launches;
    window += kCapacity;
  } while (window < job.num_srcs);
}

// Windows of 7 sources stand for any number of launches.
enum Windows { kAsLaunched, kOfSeven };

template <int kFrom, int kTo>
void launch(const PackJob& job, const std::vector<const void*>& srcs,
            const std::vector<int64_t>& numels, Windows windows) {
  if (windows == kOfSeven) {
    launch<kFrom, kTo, 7>(job, srcs, numels);
  } else if (job.num_srcs <= kSmallWindow) {
    launch<kFrom, kTo, kSmallWindow>(job, srcs, numels);
  } else {
    const int64_t before = num_launches;
    launch<kFrom, kTo, kLargeWindow>(job, srcs, numels);
    if (num_launches - before != pack_launches(job.num_srcs)) {
      fail("number of launches", kFrom, kTo, job.num_srcs, num_launches - before,
           pack_launches(job.num_srcs));
    }
  }
}

template <int kFrom, int kTo>
void check_pack(const Layout& layout, double scale, int64_t out_skew, Windows windows) {
  std::vector<Buffer> buffers;
  std::vector<const void*> srcs;
  std::vector<int64_t> numels;
  for (const Layout::Source& source : layout.sources) {
    const int64_t numel = source.presence == kPresent ? source.numel : 0;
    buffers.push_back(random_buffer<kFrom>(numel, source.skew));
    srcs.push_back(source.presence == kNull ? nullptr : buffers.back().data);
    numels.push_back(source.presence == kEmpty ? 0 : source.numel);
  }
  const auto segs = segs_of(layout.rows, layout.numel);
  Buffer out(layout.numel, kElementSize<kTo>, out_skew);
  PackJob job{out.data,
              layout.numel,
              segs.get(),
              static_cast<int>(layout.rows.size()),
              static_cast<int64_t>(srcs.size()),
              0,
              0,
              scale};
  launch<kFrom, kTo>(job, srcs, numels, windows);

  for (size_t r = 0; r < layout.rows.size(); ++r) {
    const Row& row = layout.rows[r];
    const int64_t end = segs[3 * (r + 1) + 2];
    const bool zeros = row.src < 0 || layout.sources[row.src].presence != kPresent;
    for (int64_t i = row.offset; i < end; ++i) {
      double value = 0;
      if (!zeros) {
        const int64_t from = row.src_offset + i - row.offset;
        value = decoded<kFrom>(bits_at<kFrom>(buffers[row.src].data, from));
        value = kFrom == LZ_FLOAT64 ? value * scale
                                    : static_cast<float>(value) * static_cast<float>(scale);
      }
      expect<kTo>("pack", kFrom, out.data, i, value);
    }
  }
  if (!out.start_is_intact()) fail("bytes before the output", kFrom, kTo, -1, 0, 0);
}

double random_scale() {
  constexpr double kScales[] = {1.0, 0.125, 1.0 / 3, -0.5};  // -0.5: of a zero it makes -0
  return kScales[below(4)];
}

template <int kFrom, int kTo>
void check_packs() {
  constexpr int64_t kSizes[] = {1,   2,   3,   5,   7,   8,   15,  16,   17,   31,   33,   127,
                                128, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 4097};
  for (int64_t numel : kSizes) {
    Layout one;
    one.add_source(numel, below(2), kPresent, 1);
    check_pack<kFrom, kTo>(one, random_scale(), below(2), kAsLaunched);
  }
  for (int64_t skew = 0; skew < 9; ++skew) {  // every alignment of a source that fills whole chunks
    for (int64_t start : {int64_t{0}, int64_t{1}, int64_t{16}}) {
      Layout large;
      large.add_zeros(start);
      large.add_source(2600, skew, kPresent, 1);
      large.add_zeros(16 - large.numel % 16);
      check_pack<kFrom, kTo>(large, random_scale(), 0, kAsLaunched);
    }
  }
  for (int num_sources : {0, 1, 33, 33, 33}) {
    check_pack<kFrom, kTo>(random_layout(num_sources, 1500), random_scale(), 0, kAsLaunched);
    check_pack<kFrom, kTo>(random_layout(num_sources, 1500), random_scale(), 1, kOfSeven);
  }
  check_pack<kFrom, kTo>(random_layout(449, 600), random_scale(), 0, kAsLaunched);
}

// Rows no layout has: whatever they say, nothing outside of the buffers is touched. The sources end
// early, so rows also point past them.
template <int kFrom, int kTo>
void check_nonsense() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (int round = 0; round < 40; ++round) {
    std::vector<Buffer> buffers;
    std::vector<const void*> srcs;
    std::vector<int64_t> numels;
    for (int i = 0; i < 9; ++i) {
      numels.push_back(below(300));
      buffers.push_back(random_buffer<kFrom>(numels.back(), below(8)));
      srcs.push_back(buffers.back().data);
    }
    const int64_t numel = 1 + below(3000);
    std::vector<Row> rows;
    for (int64_t i = below(30); i > 0; --i) {
      const int64_t wild[] = {static_cast<int64_t>(rng()), kMax, -kMax - 1, -1, kMax - below(300)};
      Row row{below(12) - 1, below(400) - 50, below(numel + 100) - 50};
      if (below(4) == 0) row.src = wild[below(5)];
      if (below(4) == 0) row.src_offset = wild[below(5)];
      if (below(4) == 0) row.offset = wild[below(5)];
      rows.push_back(row);
    }
    if (round % 2 == 0) {
      std::sort(rows.begin(), rows.end(),
                [](const Row& a, const Row& b) { return a.offset < b.offset; });
    }
    const auto segs = segs_of(rows, round % 3 == 0 ? kMax : numel);
    Buffer out(numel, kElementSize<kTo>, below(2));
    PackJob job{out.data, numel, segs.get(), static_cast<int>(rows.size()), 9, 0, 0, 1.0f};
    launch<kFrom, kTo>(job, srcs, numels, round % 4 == 0 ? kOfSeven : kAsLaunched);
    if (!out.start_is_intact()) fail("nonsense rows", kFrom, kTo, round, 0, 0);
  }
}

// --- Ordered sum

template <int kFrom, int kTo>
void launch_sum(char* out, int64_t numel, const std::vector<const void*>& parts, double scale) {
  using Compute = typename Format<kFrom>::Compute;
  const SumJob<Compute> job{out, numel, static_cast<int>(parts.size()),
                            static_cast<Compute>(scale)};
  for (int64_t block = 0; block < sum_blocks<kFrom, kTo>(numel); ++block) {
    for (int thread = 0; thread < kBlockThreads; ++thread) {
      ordered_sum_thread<kFrom, kTo>(job, parts.data(), block, thread);
    }
  }
  ++num_launches;
}

// `in_place`: index of the part that is the output too, or -1.
template <int kFrom, int kTo>
void check_sum(int64_t numel, int num_parts, double scale, int64_t out_skew, int in_place) {
  using Compute = typename Format<kFrom>::Compute;
  std::vector<Buffer> buffers;
  std::vector<const void*> parts;
  for (int i = 0; i < num_parts; ++i) {
    buffers.push_back(random_buffer<kFrom>(numel, below(2) == 0 ? 0 : below(8)));
    parts.push_back(buffers.back().data);
  }
  std::vector<double> expected;
  for (int64_t i = 0; i < numel; ++i) {
    Compute sum = 0;
    for (int p = 0; p < num_parts; ++p) {
      const auto value = static_cast<Compute>(decoded<kFrom>(bits_at<kFrom>(buffers[p].data, i)));
      sum = p == 0 ? value : sum + value;
    }
    expected.push_back(static_cast<Compute>(scale) * sum);
  }
  Buffer separate(in_place < 0 ? numel : 0, kElementSize<kTo>, out_skew);
  Buffer& out = in_place < 0 ? separate : buffers[in_place];
  launch_sum<kFrom, kTo>(out.data, numel, parts, scale);
  for (int64_t i = 0; i < numel; ++i) expect<kTo>("sum", kFrom, out.data, i, expected[i]);
  if (!out.start_is_intact()) fail("bytes before the sum", kFrom, kTo, -1, 0, 0);
}

template <int kFrom, int kTo>
void check_sums() {
  int round = 0;
  for (int64_t numel : {1, 7, 8, 33, 1023, 4097}) {
    for (int num_parts : {0, 1, 2, 3, 4, 5, 8, 9}) {
      check_sum<kFrom, kTo>(numel, num_parts, num_parts == 2 ? 1.0 : 1.0 / 3, round % 2, -1);
      if (kFrom == kTo && num_parts > 0) {
        check_sum<kFrom, kTo>(numel, num_parts, 0.25, 0, round % num_parts);
      }
      ++round;
    }
  }
}

// --- Offsets beyond 2^31, on pages that exist only where they are touched

char* map_sparse(int64_t nbytes) {
  void* data = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

void check_beyond_31_bits() {
  constexpr int64_t kNumel = (int64_t{1} << 32) + 77;
  constexpr int64_t kStart = 5;  // of the source in the output, so that nothing is aligned
  char* const src = map_sparse(kNumel * 2);
  char* const out = map_sparse(kNumel * 2);
  if (src == nullptr || out == nullptr) {
    std::puts("left out: offsets beyond 2^31, no room for 16 GB of addresses");
    return;
  }
  const auto segs = segs_of({{-1, 0, 0}, {0, 0, kStart}}, kNumel);
  PackJob job{out, kNumel, segs.get(), 2, 1, 0, 1, 1.0f};
  const void* srcs[] = {src};
  const int64_t numels[] = {kNumel - kStart};
  const int64_t last = pack_blocks<LZ_BFLOAT16, LZ_BFLOAT16>(kNumel) - 1;
  const int64_t middle = (int64_t{1} << 31) / (kBlockWarps * kChunkNumel<LZ_BFLOAT16, LZ_BFLOAT16>);
  for (int64_t block : {int64_t{0}, middle - 1, middle, last - 1, last}) {
    const int64_t begin = block * kBlockWarps * kChunkNumel<LZ_BFLOAT16, LZ_BFLOAT16>;
    const int64_t end =
        std::min(kNumel, begin + kBlockWarps * kChunkNumel<LZ_BFLOAT16, LZ_BFLOAT16>);
    for (int64_t i = std::max(begin, kStart); i < end; ++i) {
      reinterpret_cast<uint16_t*>(src)[i - kStart] = static_cast<uint16_t>(1 + i % 30000);
    }
    for (int thread = 0; thread < kBlockThreads; ++thread) {
      pack_thread<LZ_BFLOAT16, LZ_BFLOAT16>(job, srcs, numels, block, thread);
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t want = static_cast<uint16_t>(i < kStart ? 0 : 1 + i % 30000);
      const uint64_t got = bits_at<LZ_BFLOAT16>(out, i);
      if (got != want) fail("beyond 2^31", LZ_BFLOAT16, LZ_BFLOAT16, i, got, want);
    }
    num_checked += end - begin;
  }
  const SumJob<float> sum{out, kNumel, 1, 1.0f};
  for (int64_t block = sum_blocks<LZ_BFLOAT16, LZ_BFLOAT16>(kNumel) - 2;
       block < sum_blocks<LZ_BFLOAT16, LZ_BFLOAT16>(kNumel); ++block) {
    for (int thread = 0; thread < kBlockThreads; ++thread) {
      ordered_sum_thread<LZ_BFLOAT16, LZ_BFLOAT16>(sum, srcs, block, thread);
    }
  }
  for (int64_t i = kNumel - 2000; i < kNumel - kStart; ++i) {
    expect<LZ_BFLOAT16>("sum beyond 2^31", LZ_BFLOAT16, out, i,
                        decoded<LZ_BFLOAT16>(bits_at<LZ_BFLOAT16>(src, i)));
  }
}

}  // namespace

int main() {
  for_each_dtype([](auto from) {
    constexpr int kFrom = decltype(from)::value;
    for_each_dtype([](auto to) {
      constexpr int kTo = decltype(to)::value;
      check_packs<kFrom, kTo>();
      check_sums<kFrom, kTo>();
    });
    check_nonsense<kFrom, kFrom>();
  });
  check_nonsense<LZ_FLOAT32, LZ_BFLOAT16>();
  check_nonsense<LZ_BFLOAT16, LZ_FLOAT32>();
  for (int num_sources : {kLargeWindow, 2000, 4001, 10000}) {
    const Layout layout = random_layout(num_sources, 60);
    check_pack<LZ_FLOAT32, LZ_BFLOAT16>(layout, 1.0f, 0, kAsLaunched);
    check_pack<LZ_BFLOAT16, LZ_FLOAT32>(layout, 0.5f, 0, kAsLaunched);
  }
  check_beyond_31_bits();
  std::printf("emulated %lld launches, checked %lld elements\n",
              static_cast<long long>(num_launches), static_cast<long long>(num_checked));
  return 0;
}
