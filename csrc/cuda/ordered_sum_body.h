// The sum of the deterministic reduction: the parts of all ranks, added in the order of the ranks.
//
// Each lane owns one group of elements and adds the parts to it one after the other, so the result
// does not depend on the launch or the device. Bytes moved: each part once, `out` once.
#pragma once

#include "elements.h"

namespace layerzero {

constexpr int kMaxParts = 4000;

// Parts whose loads are in flight together; their additions still follow one another.
constexpr int kPartsAtOnce = 4;

template <class Compute>
struct SumJob {
  char* out;
  int64_t numel;
  int num_parts;
  Compute scale;
};

template <class Compute>
struct SumParams {
  SumJob<Compute> job;
  const void* parts[kMaxParts];
};
static_assert(sizeof(SumParams<double>) <= 32764, "more than a kernel may take");

template <int kFrom, int kTo>
inline int64_t sum_blocks(int64_t numel) {
  constexpr int64_t kBlockNumel = int64_t{kBlockThreads} * kGroupNumel<kFrom, kTo>;
  return numel / kBlockNumel + (numel % kBlockNumel != 0);
}

// All that thread `thread` of block `block` does. A lane reads its elements of every part before it
// writes them, which is what makes `out` being one of the parts harmless.
template <int kFrom, int kTo>
LZ_BODY void ordered_sum_thread(const SumJob<typename Format<kFrom>::Compute>& job,
                                const void* const* parts, int64_t block, int thread) {
  using From = typename Format<kFrom>::Bits;
  using To = typename Format<kTo>::Bits;
  using Compute = typename Format<kFrom>::Compute;
  constexpr int kNumel = kGroupNumel<kFrom, kTo>;
  constexpr int kFromBytes = kNumel * static_cast<int>(sizeof(From));
  constexpr int kToBytes = kNumel * static_cast<int>(sizeof(To));

  const int64_t begin = (block * kBlockThreads + thread) * kNumel;
  if (begin >= job.numel) return;
  const int count = job.numel - begin < kNumel ? static_cast<int>(job.numel - begin) : kNumel;

  // -0 is the zero that changes nothing: 0 + -0 would lose the sign of a first part of -0.
  Compute sums[kNumel];
  LZ_UNROLL
  for (int i = 0; i < kNumel; ++i) sums[i] = job.num_parts > 0 ? Compute(-0.0) : Compute(0);

  for (int first = 0; first < job.num_parts; first += kPartsAtOnce) {
    uint32_t words[kPartsAtOnce][kFromBytes / 4] = {};
    LZ_UNROLL
    for (int p = 0; p < kPartsAtOnce; ++p) {
      if (first + p >= job.num_parts) break;
      const char* from =
          static_cast<const char*>(parts[first + p]) + begin * static_cast<int64_t>(sizeof(From));
      if (count == kNumel && is_aligned(parts[first + p], kFromBytes)) {
        load_words<kFromBytes, kFromBytes>(words[p], from);
      } else {
        LZ_UNROLL
        for (int i = 0; i < kNumel; ++i) {
          if (i < count) set_element<From>(words[p], i, load_element<From>(from, i));
        }
      }
    }
    LZ_UNROLL
    for (int p = 0; p < kPartsAtOnce; ++p) {
      if (first + p >= job.num_parts) break;
      LZ_UNROLL
      for (int i = 0; i < kNumel; ++i) {
        sums[i] += Format<kFrom>::decode(get_element<From>(words[p], i));
      }
    }
  }

  uint32_t result[kToBytes / 4] = {};
  LZ_UNROLL
  for (int i = 0; i < kNumel; ++i) {
    set_element<To>(result, i, Format<kTo>::encode(job.scale * sums[i]));
  }
  store_elements<To, kNumel>(job.out + begin * static_cast<int64_t>(sizeof(To)), result,
                             count == kNumel && is_aligned(job.out, kToBytes), (1u << count) - 1);
}

}  // namespace layerzero
