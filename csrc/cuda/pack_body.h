// The pad-copy: many tensors, zeros between them, into one buffer; cast and scaled on the way.
//
// Work is split over the *output*, so any mix of sizes is balanced and each byte is written once:
//
//   out    | chunk 0            | chunk 1            | chunk 2       |    a warp owns a chunk
//   rows   | source 0    |0| source 1 | 2 |0| source 3         | 0   |    it finds its first row by
//                                                                         bisection and walks on
//   chunk    = 4 group rows of 32 groups, one group a lane
//   group    = what a lane moves in one access (16 bytes of the wider dtype)
//
// Bytes moved: each source once, `out` once, and the few rows of `segs` that a chunk looks at,
// which stay in the caches.
#pragma once

#include "elements.h"

namespace layerzero {

// A lane has four loads in flight before its first store: what it takes to keep the memory busy.
constexpr int kGroups = 4;

// Sources that one launch carries in its parameters: a pointer and a numel each. The larger window
// fills the 32764 bytes that a kernel may take; copying those costs each launch a few microseconds,
// so a layer, which has tens of tensors, takes the smaller one.
constexpr int kSmallWindow = 240;
constexpr int kLargeWindow = 2040;

struct PackJob {
  char* out;
  int64_t out_numel;
  const int64_t* segs;
  int num_segs;
  int64_t num_srcs;    // of all launches
  int64_t window;      // index of the first source that this launch has
  int64_t num_window;  // and how many it has
  double scale;
};

template <int kCapacity>
struct PackParams {
  PackJob job;
  const void* srcs[kCapacity];
  int64_t numels[kCapacity];
};
static_assert(sizeof(PackParams<kLargeWindow>) <= 32764, "more than a kernel may take");

inline int64_t pack_launches(int64_t num_srcs) {
  return num_srcs <= kLargeWindow ? 1 : (num_srcs + kLargeWindow - 1) / kLargeWindow;
}

// Hands `params` the sources from `window` on, as many as fit.
template <int kCapacity>
inline void fill_window(PackParams<kCapacity>& params, const void* const* srcs,
                        const int64_t* numels, int64_t window) {
  const int64_t left = params.job.num_srcs - window;
  params.job.window = window;
  params.job.num_window = left < kCapacity ? left : kCapacity;
  for (int64_t i = 0; i < params.job.num_window; ++i) {
    params.srcs[i] = srcs[window + i];
    params.numels[i] = srcs[window + i] == nullptr ? 0 : numels[window + i];
  }
}

template <int kFrom, int kTo>
constexpr int64_t kChunkNumel = int64_t{kGroups} * kWarpThreads * kGroupNumel<kFrom, kTo>;

template <int kFrom, int kTo>
inline int64_t pack_blocks(int64_t out_numel) {
  constexpr int64_t kBlockNumel = kChunkNumel<kFrom, kTo> * kBlockWarps;
  return out_numel / kBlockNumel + (out_numel % kBlockNumel != 0);
}

// The last row that starts at or before `position`, or the first row.
LZ_BODY int find_row(const int64_t* segs, int num_segs, int64_t position) {
  int low = 0;
  int high = num_segs;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (segs[3 * int64_t{middle} + 2] <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 ? low - 1 : 0;
}

// What one row asks of one chunk, in elements from the chunk's start: [begin, readable) come from
// `from`, which is the address of the first of them, and [readable, end) become zeros.
struct Span {
  int begin;
  int readable;
  int end;
  const char* from;
};

// The part of `row` inside the chunk [begin, end) of `out`, empty where another launch writes it.
// Reads past the ends of a source are cut off here, so that no row can make a thread leave a
// buffer; the sum is unsigned because a nonsense offset may overflow it.
template <int kFrom>
LZ_BODY Span clip_row(const PackJob& job, const void* const* srcs, const int64_t* numels,
                      const int64_t* row, int64_t begin, int64_t end) {
  const int64_t src = row[0];
  const uint64_t src_offset = static_cast<uint64_t>(row[1]);
  const int64_t row_begin = row[2];
  const int64_t row_end = row[5];
  const int64_t first = row_begin > begin ? row_begin : begin;
  const int64_t last = row_end < end ? row_end : end;
  Span span{0, 0, 0, nullptr};
  if (first >= last) return span;
  const bool zeros = src < 0 || src >= job.num_srcs;
  const bool mine = zeros ? job.window == 0  // the first launch writes the zeros
                          : src >= job.window && src - job.window < job.num_window;
  if (!mine) return span;
  span.begin = static_cast<int>(first - begin);
  span.end = static_cast<int>(last - begin);
  span.readable = span.begin;
  if (zeros) return span;
  const uint64_t numel = static_cast<uint64_t>(numels[src - job.window]);
  const uint64_t start =
      src_offset + static_cast<uint64_t>(first) - static_cast<uint64_t>(row_begin);
  if (start < numel) {
    const uint64_t left = numel - start;
    const int length = span.end - span.begin;
    span.readable += left < static_cast<uint64_t>(length) ? static_cast<int>(left) : length;
    span.from = static_cast<const char*>(srcs[src - job.window]) + start * kElementSize<kFrom>;
  }
  return span;
}

// A lane's groups of a chunk that one source fills, in accesses of the width its address allows.
// The branches are the same for all lanes.
template <int kFrom, int kTo, int kWidth>
LZ_BODY void load_chunk(uint32_t (*words)[kGroupNumel<kFrom, kTo> * kElementSize<kFrom> / 4],
                        const char* from) {
  constexpr int kGroupBytes = kGroupNumel<kFrom, kTo> * kElementSize<kFrom>;
  if constexpr (kWidth > kElementSize<kFrom>) {
    if (!is_aligned(from, kWidth)) {
      load_chunk<kFrom, kTo, kWidth / 2>(words, from);
      return;
    }
  }
  LZ_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    load_words<kGroupBytes, kWidth>(words[g], from + g * (kWarpThreads * kGroupBytes));
  }
}

// All that thread `thread` of block `block` does.
template <int kFrom, int kTo>
LZ_BODY void pack_thread(const PackJob& job, const void* const* srcs, const int64_t* numels,
                         int64_t block, int thread) {
  using From = typename Format<kFrom>::Bits;
  using To = typename Format<kTo>::Bits;
  using Compute = typename Format<kFrom>::Compute;
  constexpr int kNumel = kGroupNumel<kFrom, kTo>;
  constexpr int kFromBytes = kNumel * static_cast<int>(sizeof(From));
  constexpr int kToBytes = kNumel * static_cast<int>(sizeof(To));
  constexpr uint32_t kWholeGroup = (1u << kNumel) - 1;

  constexpr int kChunk = static_cast<int>(kChunkNumel<kFrom, kTo>);

  const int64_t begin = (block * kBlockWarps + thread / kWarpThreads) * kChunk;
  if (begin >= job.out_numel) return;
  const int64_t end = job.out_numel - begin < kChunk ? job.out_numel : begin + kChunk;
  const int lane_begin = thread % kWarpThreads * kNumel;

  uint32_t words[kGroups][kFromBytes / 4] = {};
  uint32_t mask = 0;  // the elements to write, kNumel bits a group
  uint32_t read = 0;  // those that come from a source; the others are 0, whatever the scale

  for (int row = find_row(job.segs, job.num_segs, begin); row < job.num_segs; ++row) {
    const int64_t* segs = job.segs + 3 * int64_t{row};
    if (segs[2] >= end) break;
    const Span span = clip_row<kFrom>(job, srcs, numels, segs, begin, end);
    if (span.begin == 0 && span.readable == kChunk) {
      load_chunk<kFrom, kTo, kFromBytes>(words, span.from + lane_begin * sizeof(From));
      read = mask = ~0u;
      break;
    }
    // Groups start at multiples of their size in `out`, so one answer holds for all of them.
    const bool aligned =
        is_aligned(reinterpret_cast<uintptr_t>(span.from) - span.begin * sizeof(From), kFromBytes);
    LZ_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int at = lane_begin + g * (kWarpThreads * kNumel);
      if (at >= span.end || at + kNumel <= span.begin) continue;
      if (aligned && at >= span.begin && at + kNumel <= span.readable) {
        load_words<kFromBytes, kFromBytes>(words[g], span.from + (at - span.begin) * sizeof(From));
        mask |= kWholeGroup << (g * kNumel);
        read |= kWholeGroup << (g * kNumel);
        continue;
      }
      LZ_UNROLL
      for (int i = 0; i < kNumel; ++i) {
        if (at + i < span.begin || at + i >= span.end) continue;
        const uint32_t bit = 1u << (g * kNumel + i);
        mask |= bit;
        if (at + i >= span.readable) continue;
        set_element<From>(words[g], i, load_element<From>(span.from, at + i - span.begin));
        read |= bit;
      }
    }
  }

  char* const to = job.out + (begin + lane_begin) * static_cast<int64_t>(sizeof(To));
  const bool aligned_out = is_aligned(job.out, kToBytes);
  const auto scale = static_cast<Compute>(job.scale);
  LZ_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t group_mask = mask >> (g * kNumel) & kWholeGroup;
    if (group_mask == 0) continue;
    uint32_t result[kToBytes / 4] = {};
    LZ_UNROLL
    for (int i = 0; i < kNumel; ++i) {
      if (!(read >> (g * kNumel + i) & 1u)) continue;
      const Compute value = Format<kFrom>::decode(get_element<From>(words[g], i)) * scale;
      set_element<To>(result, i, Format<kTo>::encode(value));
    }
    store_elements<To, kNumel>(to + g * (kWarpThreads * kToBytes), result,
                               aligned_out && group_mask == kWholeGroup, group_mask);
  }
}

}  // namespace layerzero
