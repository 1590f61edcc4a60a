// crc32 on the CPU: the CRC-32 of zlib, gzip and PNG, at memory speed where there is a carry-less
// multiplication. One pass over the bytes, in this thread.
//
// Folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009): 64 bytes, as four polynomials of degree 127, are multiplied by x^512
// modulo P and added to the next 64; what is left at the end is reduced. Elsewhere, and for what is
// not a multiple of 16 bytes, eight tables take eight bytes a step (M. Kounavis and F. Berry,
// "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation", 2008).
#include <array>
#include <cstring>

#include "checks.h"
#include "ops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace layerzero {

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // the lowest coefficient in the highest bit

using Tables = std::array<std::array<uint32_t, 256>, 8>;

Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t table = 1; table < tables.size(); ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

// `state` here and below is the complement of the CRC, as it stands between bytes.
uint32_t by_tables(const uint8_t* data, int64_t nbytes, uint32_t state) {
  static const Tables tables = make_tables();
  for (; nbytes >= 8; nbytes -= 8, data += 8) {
    const uint32_t low = state ^ (data[0] | data[1] << 8 | data[2] << 16 | uint32_t{data[3]} << 24);
    state = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
            tables[4][low >> 24] ^ tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^
            tables[0][data[7]];
  }
  for (; nbytes > 0; --nbytes, ++data) state = (state >> 8) ^ tables[0][(state ^ *data) & 255];
  return state;
}

#if defined(__x86_64__)

#define LZ_CLMUL __attribute__((target("pclmul,sse4.1")))

// x times the two constants of `by` (for its low and its high half), plus `next`.
LZ_CLMUL inline __m128i fold(__m128i x, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00);
  const __m128i high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

LZ_CLMUL inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// `nbytes` is at least 64 and a multiple of 16.
LZ_CLMUL uint32_t by_folding(const uint8_t* data, int64_t nbytes, uint32_t state) {
  // Powers of x modulo P, reflected: by 512 bits, by 128 bits, by 64 bits; P and 2^64 / P.
  const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i reduce = _mm_set_epi64x(0x01f7011641, 0x01db710641);

  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  data += 64;
  nbytes -= 64;
  for (; nbytes >= 64; nbytes -= 64, data += 64) {
    a = fold(a, by_512, load(data));
    b = fold(b, by_512, load(data + 16));
    c = fold(c, by_512, load(data + 32));
    d = fold(d, by_512, load(data + 48));
  }
  a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
  for (; nbytes > 0; nbytes -= 16, data += 16) a = fold(a, by_128, load(data));

  const __m128i low_words = _mm_setr_epi32(-1, 0, -1, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_64, 0x00));
  // Barrett reduction of the last 64 bits.
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), reduce, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), reduce, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

#endif

uint32_t crc32(const uint8_t* data, int64_t nbytes, uint32_t crc) {
  uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (can_fold && nbytes >= 64) {
    const int64_t folded = nbytes / 16 * 16;
    state = by_folding(data, folded, state);
    data += folded;
    nbytes -= folded;
  }
#endif
  return ~by_tables(data, nbytes, state);
}

}  // namespace

void crc32_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle data(unbox<AtenTensorHandle>(stack[0]));
  const auto value = unbox<int64_t>(stack[1]);
  int32_t dtype = 0;
  bool is_contiguous = false;
  void* pointer = nullptr;
  check_call(aoti_torch_get_dtype(data.get(), &dtype), "dtype");
  check_call(aoti_torch_is_contiguous(data.get(), &is_contiguous), "is_contiguous");
  if (dtype != aoti_torch_dtype_uint8() || !is_contiguous) {
    refuse("crc32: expected contiguous uint8, got dtype code ", dtype,
           is_contiguous ? "" : ", strided");
  }
  if (value < 0 || value > 0xFFFFFFFF) refuse("crc32: expected a CRC-32 before it, got ", value);
  check_call(aoti_torch_get_data_ptr(data.get(), &pointer), "data_ptr");
  const uint32_t result =
      crc32(static_cast<const uint8_t*>(pointer), numel_of(data), static_cast<uint32_t>(value));
  const auto wide = static_cast<int64_t>(result);
  stack[0] = 0;
  std::memcpy(&stack[0], &wide, sizeof(wide));
}

}  // namespace layerzero
