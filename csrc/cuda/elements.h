// What the kernel bodies are made of: element formats, and moving a few elements as words.
//
// nvcc compiles these headers for the device; g++ compiles them for tests/ops/emulate.cpp, which
// runs every thread on the CPU. No thread ever looks at another one, so calls are all it must
// emulate.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../dtypes.h"

#ifdef __CUDACC__
#define LZ_BODY __device__ __forceinline__
#define LZ_UNROLL _Pragma("unroll")
#else
#define LZ_BODY inline
#define LZ_UNROLL
#endif

namespace layerzero {

constexpr int kWarpThreads = 32;
constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;

// Bounds a thread to 64 registers: enough warps then share a multiprocessor to hide the memory.
constexpr int kBlocksPerMultiprocessor = 4;

template <class To, class From>
LZ_BODY To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Format<dtype>: how an element lies in memory (Bits) and what it is computed in (Compute).
// Rounding is to nearest even, overflow gives inf, and a NaN stays some NaN.
template <int kDtype>
struct Format;

template <>
struct Format<LZ_FLOAT32> {
  using Bits = uint32_t;
  using Compute = float;
  static LZ_BODY float decode(uint32_t bits) { return bits_as<float>(bits); }
  static LZ_BODY uint32_t encode(float value) { return bits_as<uint32_t>(value); }
  static LZ_BODY uint32_t encode(double value) { return encode(static_cast<float>(value)); }
};

template <>
struct Format<LZ_FLOAT64> {
  using Bits = uint64_t;
  using Compute = double;
  static LZ_BODY double decode(uint64_t bits) { return bits_as<double>(bits); }
  static LZ_BODY uint64_t encode(double value) { return bits_as<uint64_t>(value); }
};

// float64 to a 16-bit format goes through float32 because torch's own cast does, and the kernels
// promise the bits of torch.
template <>
struct Format<LZ_BFLOAT16> {
  using Bits = uint16_t;
  using Compute = float;
  static LZ_BODY float decode(uint16_t bits) {
    return bits_as<float>(static_cast<uint32_t>(bits) << 16);
  }
  static LZ_BODY uint16_t encode(double value) { return encode(static_cast<float>(value)); }
  static LZ_BODY uint16_t encode(float value) {
#ifdef __CUDA_ARCH__
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32_t bits = bits_as<uint32_t>(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
};

template <>
struct Format<LZ_FLOAT16> {
  using Bits = uint16_t;
  using Compute = float;
  static LZ_BODY float decode(uint16_t bits) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    if (magnitude < 0x0400u) {  // subnormal: a multiple of 2^-24
      const float value = static_cast<float>(magnitude) * 0x1p-24f;
      return sign ? -value : value;
    }
    if (magnitude >= 0x7C00u) return bits_as<float>(sign | 0x7F800000u | (magnitude << 13));
    return bits_as<float>(sign | ((magnitude << 13) + (112u << 23)));
#endif
  }
  static LZ_BODY uint16_t encode(double value) { return encode(static_cast<float>(value)); }
  static LZ_BODY uint16_t encode(float value) {
#ifdef __CUDA_ARCH__
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (magnitude > 0x7F800000u) {
      half = 0x7FFFu;
    } else if (magnitude >= 0x477FF000u) {  // 65520: halfway to what would follow 65504
      half = 0x7C00u;
    } else if (magnitude < 0x38800000u) {
      // Below 2^-14 a half counts in steps of 2^-24, which are the steps of a float at 0.5: the
      // addition rounds as wanted, and the low bits of the sum are the count.
      half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
    } else {
      const uint32_t rebiased = magnitude - (112u << 23);
      half = (rebiased + 0xFFFu + ((rebiased >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
#endif
  }
};

// Calls Launch::run<from, to>(call), or Launch::unknown_dtype(call) if one of them is no dtype.
template <class Launch, int kFrom, class Call>
auto dispatch_to(int to, const Call& call) {
  switch (to) {
    case LZ_FLOAT32: return Launch::template run<kFrom, LZ_FLOAT32>(call);
    case LZ_FLOAT16: return Launch::template run<kFrom, LZ_FLOAT16>(call);
    case LZ_BFLOAT16: return Launch::template run<kFrom, LZ_BFLOAT16>(call);
    case LZ_FLOAT64: return Launch::template run<kFrom, LZ_FLOAT64>(call);
    default: return Launch::unknown_dtype(call);
  }
}

template <class Launch, class Call>
auto dispatch(int from, int to, const Call& call) {
  switch (from) {
    case LZ_FLOAT32: return dispatch_to<Launch, LZ_FLOAT32>(to, call);
    case LZ_FLOAT16: return dispatch_to<Launch, LZ_FLOAT16>(to, call);
    case LZ_BFLOAT16: return dispatch_to<Launch, LZ_BFLOAT16>(to, call);
    case LZ_FLOAT64: return dispatch_to<Launch, LZ_FLOAT64>(to, call);
    default: return Launch::unknown_dtype(call);
  }
}

template <int kDtype>
constexpr int kElementSize = static_cast<int>(sizeof(typename Format<kDtype>::Bits));

// Elements that a lane moves together: 16 bytes of the wider side. The narrower side then moves 8
// or 4 bytes a lane; with 16 there as well, neighbouring lanes would be 32 bytes apart on the wider
// side, and each of its instructions would touch only half of every 32-byte sector.
template <int kFrom, int kTo>
constexpr int kGroupNumel =
    16 / (kElementSize<kFrom> > kElementSize<kTo> ? kElementSize<kFrom> : kElementSize<kTo>);

template <int kBytes>
struct alignas(kBytes) Packet {
  uint32_t words[kBytes / 4];
};

LZ_BODY bool is_aligned(uintptr_t address, int nbytes) {
  return (address & static_cast<uintptr_t>(nbytes - 1)) == 0;
}

LZ_BODY bool is_aligned(const void* pointer, int nbytes) {
  return is_aligned(reinterpret_cast<uintptr_t>(pointer), nbytes);
}

// The compiler cannot know where a pointer leads that it finds in an array, and would ask at each
// load whether it is shared or local memory.
LZ_BODY const char* in_global_memory(const char* pointer) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Elements are kept as the words they came in until they are converted. Every index below is a
// constant once loops are unrolled: the arrays are registers, which a build test proves (no stack).
template <class Bits>
LZ_BODY Bits get_element(const uint32_t* words, int i) {
  if constexpr (sizeof(Bits) < 4) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
    return static_cast<Bits>(words[i / kPerWord] >> (32 / kPerWord * (i % kPerWord)));
  } else if constexpr (sizeof(Bits) == 4) {
    return words[i];
  } else {
    return words[2 * i] | (static_cast<Bits>(words[2 * i + 1]) << 32);
  }
}

template <class Bits>
LZ_BODY void set_element(uint32_t* words, int i, Bits bits) {
  if constexpr (sizeof(Bits) < 4) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(Bits));
    constexpr uint32_t kOnes = static_cast<Bits>(~0u);
    const int shift = 32 / kPerWord * (i % kPerWord);
    uint32_t& word = words[i / kPerWord];
    word = (word & ~(kOnes << shift)) | (static_cast<uint32_t>(bits) << shift);
  } else if constexpr (sizeof(Bits) == 4) {
    words[i] = bits;
  } else {
    words[2 * i] = static_cast<uint32_t>(bits);
    words[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
  }
}

template <class Bits>
LZ_BODY Bits load_element(const char* from, int i) {
  return reinterpret_cast<const Bits*>(in_global_memory(from))[i];
}

// Reads kBytes from an address aligned to kWidth.
template <int kBytes, int kWidth>
LZ_BODY void load_words(uint32_t* words, const char* from) {
  from = in_global_memory(from);
  if constexpr (kWidth == 2) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    LZ_UNROLL
    for (int i = 0; i < kBytes / 4; ++i) {
      words[i] = halves[2 * i] | (static_cast<uint32_t>(halves[2 * i + 1]) << 16);
    }
  } else {
    const Packet<kWidth>* packets = reinterpret_cast<const Packet<kWidth>*>(from);
    LZ_UNROLL
    for (int i = 0; i < kBytes / kWidth; ++i) {
      const Packet<kWidth> packet = packets[i];
      LZ_UNROLL
      for (int j = 0; j < kWidth / 4; ++j) words[i * (kWidth / 4) + j] = packet.words[j];
    }
  }
}

// Writes kBytes to an address aligned to kWidth.
template <int kBytes, int kWidth>
LZ_BODY void store_words(char* to, const uint32_t* words) {
  LZ_UNROLL
  for (int i = 0; i < kBytes / kWidth; ++i) {
    Packet<kWidth> packet;
    LZ_UNROLL
    for (int j = 0; j < kWidth / 4; ++j) packet.words[j] = words[i * (kWidth / 4) + j];
    reinterpret_cast<Packet<kWidth>*>(to)[i] = packet;
  }
}

// Writes a group of kNumel elements; `whole` where all of it exists and `to` is aligned for it,
// otherwise the elements whose bit in `mask` is set, one by one.
template <class Bits, int kNumel>
LZ_BODY void store_elements(char* to, const uint32_t* words, bool whole, uint32_t mask) {
  constexpr int kBytes = kNumel * static_cast<int>(sizeof(Bits));
  if (whole) {
    store_words<kBytes, kBytes>(to, words);
  } else {
    LZ_UNROLL
    for (int i = 0; i < kNumel; ++i) {
      if (mask >> i & 1u) reinterpret_cast<Bits*>(to)[i] = get_element<Bits>(words, i);
    }
  }
}

}  // namespace layerzero
