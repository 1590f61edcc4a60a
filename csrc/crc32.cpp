// crc32 on the CPU: the CRC-32 of zlib, gzip and PNG, at memory speed where there is a carry-less
// multiplication. One pass over the bytes, in this thread. copy_crc32_ also copies them in that
// pass.
//
// Folding (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009): 64 bytes, as four polynomials of degree 127, are multiplied by x^512
// modulo P and added to the next 64; what is left at the end is reduced. With AVX-512 it is 256
// bytes, sixteen polynomials and x^2048. Elsewhere, and for what is not a multiple of 16 bytes,
// eight tables take eight bytes a step (M. Kounavis and F. Berry, "Novel Table Lookup-Based
// Algorithms for High-Performance CRC Generation", 2008).
#include <algorithm>
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

// Powers of x modulo P, reflected: those that move a polynomial by 2048, 512 and 128 bits.
LZ_CLMUL inline __m128i by_2048() { return _mm_set_epi64x(0x01322d1430, 0x011542778a); }
LZ_CLMUL inline __m128i by_512() { return _mm_set_epi64x(0x01c6e41596, 0x0154442bd4); }
LZ_CLMUL inline __m128i by_128() { return _mm_set_epi64x(0x00ccaa009e, 0x01751997d0); }

// The state after the four polynomials and `nbytes` more, a multiple of 16.
LZ_CLMUL inline uint32_t reduced(__m128i a, __m128i b, __m128i c, __m128i d, const uint8_t* data,
                                 int64_t nbytes) {
  a = fold(fold(fold(a, by_128(), b), by_128(), c), by_128(), d);
  for (; nbytes > 0; nbytes -= 16, data += 16) a = fold(a, by_128(), load(data));

  // By 64 bits; P and 2^64 / P.
  const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i reduce = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low_words = _mm_setr_epi32(-1, 0, -1, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128(), 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_64, 0x00));
  // Barrett reduction of the last 64 bits.
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), reduce, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), reduce, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

// `nbytes` is at least 64 and a multiple of 16.
LZ_CLMUL uint32_t by_folding(const uint8_t* data, int64_t nbytes, uint32_t state) {
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  data += 64;
  nbytes -= 64;
  for (; nbytes >= 64; nbytes -= 64, data += 64) {
    a = fold(a, by_512(), load(data));
    b = fold(b, by_512(), load(data + 16));
    c = fold(c, by_512(), load(data + 32));
    d = fold(d, by_512(), load(data + 48));
  }
  return reduced(a, b, c, d, data, nbytes);
}

#define LZ_CLMUL_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))

LZ_CLMUL_WIDE inline __m512i fold(__m512i x, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(x, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the XOR of all three
}

// Masked, because GCC 12 warns of its own header otherwise.
LZ_CLMUL_WIDE inline __m512i four_of(__m128i x) { return _mm512_maskz_broadcast_i32x4(0xFFFF, x); }

LZ_CLMUL_WIDE inline __m512i load_wide(const uint8_t* data) { return _mm512_loadu_si512(data); }

// `nbytes` is at least 256 and a multiple of 16.
LZ_CLMUL_WIDE uint32_t by_wide_folding(const uint8_t* data, int64_t nbytes, uint32_t state) {
  const __m512i far = four_of(by_2048());
  const __m512i near = four_of(by_512());
  __m512i a = load_wide(data), b = load_wide(data + 64);
  __m512i c = load_wide(data + 128), d = load_wide(data + 192);
  const __m128i before = _mm_cvtsi32_si128(static_cast<int>(state));
  a = _mm512_xor_si512(a, _mm512_inserti32x4(_mm512_setzero_si512(), before, 0));
  data += 256;
  nbytes -= 256;
  for (; nbytes >= 256; nbytes -= 256, data += 256) {
    a = fold(a, far, load_wide(data));
    b = fold(b, far, load_wide(data + 64));
    c = fold(c, far, load_wide(data + 128));
    d = fold(d, far, load_wide(data + 192));
  }
  a = fold(fold(fold(a, near, b), near, c), near, d);
  alignas(64) uint8_t last[64];
  _mm512_store_si512(last, a);
  return reduced(load(last), load(last + 16), load(last + 32), load(last + 48), data, nbytes);
}

#endif

uint32_t crc32(const uint8_t* data, int64_t nbytes, uint32_t crc) {
  uint32_t state = ~crc;
#if defined(__x86_64__)
  static const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  static const bool can_fold_wide =
      can_fold && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  if (can_fold && nbytes >= 64) {
    const int64_t folded = nbytes / 16 * 16;
    state = can_fold_wide && nbytes >= 256 ? by_wide_folding(data, folded, state)
                                           : by_folding(data, folded, state);
    data += folded;
    nbytes -= folded;
  }
#endif
  return ~by_tables(data, nbytes, state);
}

// Bytes that are copied before they are checksummed: they are then in the first cache.
constexpr int64_t kBlockNbytes = 1 << 14;

struct Bytes {
  uint8_t* data;
  int64_t numel;
};

Bytes bytes_of(const Handle& tensor, const char* op) {
  if (scalar_type_of(tensor) != aoti_torch_dtype_uint8() || !is_contiguous(tensor)) {
    refuse(op, ": expected contiguous uint8, got dtype code ", scalar_type_of(tensor),
           is_contiguous(tensor) ? "" : ", strided");
  }
  return {static_cast<uint8_t*>(data_of(tensor)), numel_of(tensor)};
}

}  // namespace

void crc32_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle tensor(unbox<AtenTensorHandle>(stack[0]));
  const auto value = unbox<int64_t>(stack[1]);
  const Bytes data = bytes_of(tensor, "crc32");
  if (value < 0 || value > 0xFFFFFFFF) refuse("crc32: expected a CRC-32 before it, got ", value);
  stack[0] = box(crc32(data.data, data.numel, static_cast<uint32_t>(value)));
}

void copy_crc32_cpu(StableIValue* stack, uint64_t, uint64_t) {
  const Handle out_tensor(unbox<AtenTensorHandle>(stack[0]));
  const Handle tensor(unbox<AtenTensorHandle>(stack[1]));
  const Bytes out = bytes_of(out_tensor, "copy_crc32_"), data = bytes_of(tensor, "copy_crc32_");
  if (out.numel != data.numel)
    refuse("copy_crc32_: out has ", out.numel, " bytes, data has ", data.numel);
  if (out.data < data.data + data.numel && data.data < out.data + out.numel)
    refuse("copy_crc32_: out and data overlap");
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < data.numel; begin += kBlockNbytes) {
    const int64_t nbytes = std::min(kBlockNbytes, data.numel - begin);
    std::memcpy(out.data + begin, data.data + begin, nbytes);
    crc = crc32(out.data + begin, nbytes, crc);
  }
  stack[0] = box(crc);
}

}  // namespace layerzero
