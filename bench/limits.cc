// What one core can do at most: bytes read and operations done, without any work in between. Called by bench/limits.py,
// which compiles this file for the baseline; each function names the instructions that it alone needs.
//
// Loops keep 8 or more independent chains in registers, so that they wait for throughput and not for latency.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")
#define ISA(names) __attribute__((target(names)))

// --- reading ---------------------------------------------------------------------------------------------------------

// Reads `bytes` (a multiple of 512) once, returns something that depends on all of them.
EXPORT ISA("avx2") int64_t read_avx2(const char* data, int64_t bytes) {
  __m256i sums[8];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t at = 0; at < bytes; at += 512) {
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const auto* p = reinterpret_cast<const __m256i*>(data + at + 64 * i);
      sums[i] = _mm256_xor_si256(sums[i], _mm256_xor_si256(_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)));
      _mm_prefetch(data + at + 64 * i + 4096, _MM_HINT_T0);
    }
  }
  for (int i = 1; i < 8; ++i) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
  return _mm256_extract_epi64(sums[0], 0) ^ _mm256_extract_epi64(sums[0], 2);
}

EXPORT ISA("avx512f") int64_t read_avx512(const char* data, int64_t bytes) {
  __m512i sums[8];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t at = 0; at < bytes; at += 512) {
    UNROLL
    for (int i = 0; i < 8; ++i) {
      sums[i] = _mm512_xor_si512(sums[i], _mm512_loadu_si512(data + at + 64 * i));
      _mm_prefetch(data + at + 64 * i + 4096, _MM_HINT_T0);
    }
  }
  for (int i = 1; i < 8; ++i) sums[0] = _mm512_xor_si512(sums[0], sums[i]);
  return _mm512_reduce_add_epi64(sums[0]);
}

// --- computing -------------------------------------------------------------------------------------------------------
// Each returns how many operations one round does: a multiplication and an addition are two.

// Keeps a register's value from being known, so that a loop over it is not folded.
#define KEEP(x) asm volatile("" : "+x"(x))
#define KEEP512(x) asm volatile("" : "+v"(x))

EXPORT ISA("avx2,fma") int64_t fma_avx2(int64_t rounds) {
  __m256 sums[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
    KEEP(a);
    UNROLL
    for (auto& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
  }
  for (auto& sum : sums) KEEP(sum);
  return 12 * 8 * 2;
}

// Bytes times bytes by pairs, as AVX2 without VNNI does it: multiply, widen, add.
EXPORT ISA("avx2") int64_t int8_avx2(int64_t rounds) {
  __m256i sums[8], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(2);
  const __m256i ones = _mm256_set1_epi16(1);
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t r = 0; r < rounds; ++r) {
    UNROLL
    for (auto& sum : sums) {
      KEEP(a);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    }
  }
  for (auto& sum : sums) KEEP(sum);
  return 8 * 32 * 2;
}

EXPORT ISA("avx512f") int64_t fma_avx512(int64_t rounds) {
  __m512 sums[12], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
    KEEP512(a);
    UNROLL
    for (auto& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
  }
  for (auto& sum : sums) KEEP512(sum);
  return 12 * 16 * 2;
}

EXPORT ISA("avx512f,avx512vnni") int64_t int8_vnni(int64_t rounds) {
  __m512i sums[12], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2);
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t r = 0; r < rounds; ++r) {
    KEEP512(a);
    UNROLL
    for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
  }
  for (auto& sum : sums) KEEP512(sum);
  return 12 * 64 * 2;
}

EXPORT ISA("avx512f,avx512bf16") int64_t bf16_avx512(int64_t rounds) {
  __m512 sums[12];
  __m512i bits = _mm512_set1_epi16(0x3f00);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t r = 0; r < rounds; ++r) {
    KEEP512(bits);
    UNROLL
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, (__m512bh)bits, (__m512bh)bits);
  }
  for (auto& sum : sums) KEEP512(sum);
  return 12 * 32 * 2;
}

// Four accumulators of 16 x 16, fed by four tiles that stay where they are. The configuration is written by memcpy into
// volatile bytes: GCC 12 takes plain stores to it for dead ones.
struct TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

static ISA("amx-tile") void configure_tiles() {
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  asm volatile("" : : "r"(&config) : "memory");
}

#define ZERO(i) _tile_zero(i);

static inline __attribute__((always_inline)) ISA("amx-tile") void zero_tiles() {
  ZERO(0) ZERO(1) ZERO(2) ZERO(3) ZERO(4) ZERO(5) ZERO(6) ZERO(7)
}

// Asks the system for tile registers for this process. 0: there are none.
EXPORT int64_t allow_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

EXPORT ISA("amx-tile,amx-bf16") int64_t bf16_amx(int64_t rounds) {
  configure_tiles();
  zero_tiles();
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4 * 16 * 16 * 32 * 2;
}

EXPORT ISA("amx-tile,amx-int8") int64_t int8_amx(int64_t rounds) {
  configure_tiles();
  zero_tiles();
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return 4 * 16 * 16 * 64 * 2;
}
