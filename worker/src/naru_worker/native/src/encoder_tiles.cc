// An encoder's products on AMX tiles: bf16 operands, float sums, 32 x 32 outputs at a time.
#include "encoder_math.h"
#include "pairs.h"
#include "tiles.h"

#if defined(__AMX_TILE__)

namespace naru {
namespace {

constexpr size_t kTileElements = 512;  // 16 rows of 32, or 16 pairs of 16 columns
constexpr float kNever = -1e30f;
constexpr float kLog2E = 1.44269504088896341f;

// What is read next: asked for a few lines at a time while tiles are multiplied.
struct Ahead {
  const char* at;
  int lines;  // for each step

  NARU_INLINE void fetch() {
    for (int i = 0; i < lines; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
    at += lines * 64;
  }
};

// y (stride ldy) = 32 rows (16: `two_rows` false) x 32 columns. Tiles 0..3 accumulate, 4 and 5 are left operands, 6 and 7
// right ones.
template <bool two_rows>
NARU_INLINE void product(const bf16* a, size_t tile_row, const bf16* b, size_t panel, int steps, float* y, int ldy,
                         Ahead ahead) {
  const size_t stride = static_cast<size_t>(ldy) * sizeof(float);
  _tile_zero(0);
  _tile_zero(1);
  if (two_rows) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int t = 0; t < steps; ++t, a += kTileElements, b += kTileElements) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + panel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    ahead.fetch();
    if (two_rows) {
      _tile_loadd(5, a + tile_row, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, y, stride);
  _tile_stored(1, y + 16, stride);
  if (two_rows) {
    _tile_stored(2, y + static_cast<size_t>(ldy) * 16, stride);
    _tile_stored(3, y + static_cast<size_t>(ldy) * 16 + 16, stride);
  }
}

void product_of(int rows, const bf16* a, size_t tile_row, const bf16* b, size_t panel, int steps, float* y, int ldy,
                const Ahead& ahead = Ahead{nullptr, 0}) {
  if (rows > kTileRows)
    product<true>(a, tile_row, b, panel, steps, y, ldy, ahead);
  else
    product<false>(a, tile_row, b, panel, steps, y, ldy, ahead);
}

NARU_INLINE void store_pair(bf16* to, __m512 low, __m512 high) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Sixteen rows of 32 columns to pairs of columns: what a tile product wants on its right. A transposition of 32-bit
// elements.
void pack_pairs(const bf16* rows, bf16* out) {
  __m512i a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows + r * kStep);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  // a[4g + i]: element i of each quarter, of rows 4g to 4g + 3.
  for (int g = 0; g < 16; g += 4) {
    a[g] = _mm512_unpacklo_epi64(b[g], b[g + 2]);
    a[g + 1] = _mm512_unpackhi_epi64(b[g], b[g + 2]);
    a[g + 2] = _mm512_unpacklo_epi64(b[g + 1], b[g + 3]);
    a[g + 3] = _mm512_unpackhi_epi64(b[g + 1], b[g + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x44), high01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x44),
                  high23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xee);
    _mm512_storeu_si512(out + i * 32, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(out + (i + 4) * 32, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_storeu_si512(out + (i + 8) * 32, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_storeu_si512(out + (i + 12) * 32, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
}

// Columns [c, c + 32) of a row of `width`, zeros behind it.
NARU_INLINE void load_32(const float* row, int c, int width, __m512* low, __m512* high) {
  const int left = width - c;
  const auto mask = [](int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); };
  *low = _mm512_maskz_loadu_ps(mask(left), row + c);
  *high = _mm512_maskz_loadu_ps(mask(left - 16), row + c + 16);
}

NARU_INLINE __m512i load_32(const bf16* row, int c, int width) {
  const int left = width - c;
  const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

// 2^x to 1e-4: what follows is rounded to eight bits.
NARU_INLINE __m512 exp2_rough(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0);  // x - round(x), in [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(0.0555054f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402265f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931472f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, r));
}

// The activations to about 5e-5, for the same reason. x / (1 + 2^-z), where z is odd in x: for gelu a polynomial fitted to
// it (2.5e-5), for gelu_tanh its own definition.
NARU_INLINE __m512 activate(__m512 x, int kind) {
  if (kind == kEncoderRelu) return _mm512_max_ps(x, _mm512_setzero_ps());
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 square = _mm512_min_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(25.f));
  __m512 z = _mm512_set1_ps(kind == kEncoderGeluTanh ? 0.f : 0.0010142631f);
  z = _mm512_fmadd_ps(z, square, _mm512_set1_ps(kind == kEncoderGeluTanh ? -0.10294324f : -0.10677572f));
  z = _mm512_fmadd_ps(z, square, _mm512_set1_ps(kind == kEncoderGeluTanh ? -2.3022082f : -2.3011213f));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(one, exp2_rough(_mm512_mul_ps(x, z)))));
}

}  // namespace

void begin_products() { float_tile_shapes(); }
void end_products() { release_tiles(); }

void put_left(const Left& to, int row, const float* x) { put_tile_row(x, padded(to.width), row, to.data); }

void clear_padding(const Left& to, int rows) {
  const int steps = padded(to.width) / kStep, from = to.width % kStep;
  if (from == 0) return;
  for (int r = 0; r < rows; ++r) {
    bf16* last = to.data + (static_cast<size_t>(r / kTileRows) * steps + steps - 1) * kTileElements + r % kTileRows * kStep;
    memset(last + from, 0, static_cast<size_t>(kStep - from) * sizeof(bf16));
  }
}

size_t weight_elements(int n, int k) { return static_cast<size_t>(padded(n)) * static_cast<size_t>(padded(k)); }

void pack_weight(const Weight& w, const float* rows) {
  const int steps = padded(w.k) / kStep;
  alignas(64) bf16 block[kTileElements];
  for (int panel = 0; panel < padded(w.n) / kPanel; ++panel) {
    for (int s = 0; s < steps; ++s) {
      for (int r = 0; r < kPanel; ++r) {
        __m512 low = _mm512_setzero_ps(), high = low;
        const int row = panel * kPanel + r;
        if (row < w.n) load_32(rows + static_cast<size_t>(row) * w.k, s * kStep, w.k, &low, &high);
        store_pair(block + r * kStep, low, high);
      }
      pack_pairs(block, w.data + (static_cast<size_t>(panel) * steps + s) * kTileElements);
    }
  }
}

void pack_table(const Table& t, const float* rows) {
  const size_t n = static_cast<size_t>(t.rows) * static_cast<size_t>(t.width);
  size_t i = 0;
  for (; i + 32 <= n; i += 32) store_pair(t.data + i, _mm512_loadu_ps(rows + i), _mm512_loadu_ps(rows + i + 16));
  for (; i < n; ++i) t.data[i] = to_bf16(rows[i]);
}

namespace {

// Rows [row, row + count) of the pair of panels `pair`, whose sums lie in y (stride 32).
template <Then then>
NARU_INLINE void finish(const Product& job, const float* y, int row, int count, int pair) {
  const int column = pair * kStep;
  const __m512 bias[2] = {_mm512_loadu_ps(job.w->bias + column), _mm512_loadu_ps(job.w->bias + column + kPanel)};
  const int steps = padded(job.left.width) / kStep;
  const size_t ld = job.ld;
  const int act = job.act;
  bf16* left = job.left.data + (static_cast<size_t>(row / kTileRows) * steps + pair) * kTileElements;
  for (int r = 0; r < count; ++r, y += kStep) {
    __m512 low = _mm512_add_ps(_mm512_load_ps(y), bias[0]), high = _mm512_add_ps(_mm512_load_ps(y + kPanel), bias[1]);
    const size_t at = static_cast<size_t>(row + r) * ld + static_cast<size_t>(column);
    if (then == Then::kAct) {
      if (r == kTileRows) left += static_cast<size_t>(steps) * kTileElements;
      store_pair(left + r % kTileRows * kStep, activate(low, act), activate(high, act));
    } else if (then == Then::kRows) {
      store_pair(job.rows_out + at, low, high);
    } else {
      low = _mm512_add_ps(low, _mm512_loadu_ps(job.residual + at));
      high = _mm512_add_ps(high, _mm512_loadu_ps(job.residual + at + kPanel));
      _mm512_storeu_ps(job.out + at, low);
      _mm512_storeu_ps(job.out + at + kPanel, high);
    }
  }
}

template <Then then>
void multiply_as(const Product& job, Crew* crew) {
  const int pairs = padded(job.w->n) / kStep, steps = padded(job.w->k) / kStep;
  const size_t panel = static_cast<size_t>(steps) * kTileElements;
  const int row_steps = (job.rows + 31) / 32;
  alignas(64) float y[32 * kStep];
  crew->begin(pairs);
  for (int pair = crew->next(); pair >= 0; pair = crew->next()) {
    const bf16* b = job.w->data + static_cast<size_t>(pair) * 2 * panel;
    const int later = pair + crew->size;
    const bf16* then_b = later < pairs ? b + static_cast<size_t>(crew->size) * 2 * panel
                                       : job.next->data + static_cast<size_t>(later - pairs) * 2 * panel;
    const int lines = (32 + row_steps - 1) / row_steps;  // a step of both panels has 32
    for (int i = 0; i < row_steps; ++i) {
      const int row = i * 32, count = job.rows - row < 32 ? job.rows - row : 32;
      const Ahead ahead{reinterpret_cast<const char*>(then_b) + static_cast<size_t>(i) * lines * steps * 64,
                        i * lines < 32 ? lines : 0};
      product_of(count, job.x.data + static_cast<size_t>(row / kTileRows) * panel, panel, b, panel, steps, y, kStep, ahead);
      finish<then>(job, y, row, count, pair);
    }
  }
  crew->barrier();
}

}  // namespace

void multiply(const Product& job, Crew* crew) {
  settle(job.x.data);
  if (job.then == Then::kRows) return multiply_as<Then::kRows>(job, crew);
  if (job.then == Then::kAdd) return multiply_as<Then::kAdd>(job, crew);
  multiply_as<Then::kAct>(job, crew);
}

namespace {

// One head of one sequence, in tiles.
struct HeadTiles {
  int rows;    // padded to 32
  int dim;     // padded to 32
  bf16* q;     // [row / 16][dim / 32]
  bf16* k;     // [row / 16][dim / 32]
  bf16* v;     // [dim / 16][row / 32]
  bf16* p;     // [2][row / 32], of 32 queries
  float* s;    // [32][rows]
};

HeadTiles carve(int rows, int head_dim, float* scratch) {
  HeadTiles t{};
  t.rows = padded(rows);
  t.dim = padded(head_dim);
  const size_t plane = static_cast<size_t>(t.rows) * t.dim;
  t.s = scratch;
  t.q = reinterpret_cast<bf16*>(t.s + static_cast<size_t>(t.rows) * 32);
  t.k = t.q + plane;
  t.v = t.k + plane;
  t.p = t.v + plane;
  return t;
}

void load_head(const Heads& job, int first, int rows, int head, const HeadTiles& t) {
  const int d = job.head_dim, steps = t.dim / kStep;
  const size_t hidden = static_cast<size_t>(job.num_heads) * d;
  const bf16* base = job.qkv + static_cast<size_t>(first) * job.ld + static_cast<size_t>(head) * d;
  const __m512i none = _mm512_setzero_si512();
  alignas(64) bf16 block[kTileElements];
  for (int r0 = 0; r0 < t.rows; r0 += kTileRows) {
    for (int s = 0; s < steps; ++s) {
      const size_t at = (static_cast<size_t>(r0 / kTileRows) * steps + s) * kTileElements;
      for (int r = 0; r < kTileRows; ++r) {
        const bf16* row = base + static_cast<size_t>(r0 + r) * job.ld;
        const bool is_real = r0 + r < rows;
        _mm512_storeu_si512(t.q + at + r * kStep, is_real ? load_32(row, s * kStep, d) : none);
        _mm512_storeu_si512(block + r * kStep, is_real ? load_32(row + hidden, s * kStep, d) : none);
      }
      pack_pairs(block, t.k + at);
    }
  }
  const bf16* values = base + 2 * hidden;
  for (int r = 0; r < t.rows; r += 2) {
    const bf16* row = values + static_cast<size_t>(r) * job.ld;
    for (int c = 0; c < t.dim; c += kStep) {
      const __m512i even = r < rows ? load_32(row, c, d) : none;
      const __m512i odd = r + 1 < rows ? load_32(row + job.ld, c, d) : none;
      for (int i = 0; i < 2; ++i) {
        const __m512i a = _mm512_cvtepu16_epi32(i == 0 ? _mm512_castsi512_si256(even) : _mm512_extracti64x4_epi64(even, 1));
        const __m512i b = _mm512_cvtepu16_epi32(i == 0 ? _mm512_castsi512_si256(odd) : _mm512_extracti64x4_epi64(odd, 1));
        const size_t tile = static_cast<size_t>(c / kPanel + i) * (t.rows / kStep) + r / kStep;
        _mm512_storeu_si512(t.v + tile * kTileElements + r % kStep * 16, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
      }
    }
  }
  settle(t.v);
}

// Row r of the scores, of which `seen` are real, to weights; gives one over their sum.
float soften(const HeadTiles& t, int r, int seen, float scale) {
  const float* s = t.s + static_cast<size_t>(r) * t.rows;
  const __m512 never = _mm512_set1_ps(kNever);
  __m512 best = never;
  const auto load = [&](int c) {
    const int left = seen - c;
    const __mmask16 real = static_cast<__mmask16>(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
    return _mm512_mask_loadu_ps(never, real, s + c);
  };
  for (int c = 0; c < t.rows; c += 16) best = _mm512_max_ps(load(c), best);
  const __m512 by = _mm512_set1_ps(scale * kLog2E);
  const __m512 shift = _mm512_set1_ps(-_mm512_reduce_max_ps(best) * scale * kLog2E);
  __m512 sum = _mm512_setzero_ps();
  bf16* p = t.p + static_cast<size_t>(r / kTileRows) * (t.rows / kStep) * kTileElements + r % kTileRows * kStep;
  for (int c = 0; c < t.rows; c += kStep, p += kTileElements) {
    const __m512 low = exp2_rough(_mm512_fmadd_ps(load(c), by, shift));
    const __m512 high = exp2_rough(_mm512_fmadd_ps(load(c + 16), by, shift));
    sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
    store_pair(p, low, high);
  }
  const float total = _mm512_reduce_add_ps(sum);
  return total > 0.f ? 1.f / total : 0.f;
}

// Puts 32 columns, from `column` on, of which `count` are real.
void put_columns(const Left& to, int row, int column, const float* y, int count, float by) {
  const int steps = padded(to.width) / kStep;
  bf16* tiles = to.data + static_cast<size_t>(row / kTileRows) * steps * kTileElements + row % kTileRows * kStep;
  if (column % kStep == 0 && count >= kStep) {
    const __m512 f = _mm512_set1_ps(by);
    store_pair(tiles + static_cast<size_t>(column / kStep) * kTileElements, _mm512_mul_ps(_mm512_loadu_ps(y), f),
               _mm512_mul_ps(_mm512_loadu_ps(y + 16), f));
    return;
  }
  for (int c = 0; c < count && c < kStep; ++c) {
    const int at = column + c;
    tiles[static_cast<size_t>(at / kStep) * kTileElements + at % kStep] = to_bf16(y[c] * by);
  }
}

}  // namespace

size_t attend_floats(int rows, int head_dim) {
  const size_t r = static_cast<size_t>(padded(rows)), d = static_cast<size_t>(padded(head_dim));
  return 32 * r + (3 * r * d + 32 * r) / 2 + 64;
}

void attend(const Heads& job, int first, int rows, int head, float* scratch) {
  const HeadTiles t = carve(rows, job.head_dim, scratch);
  load_head(job, first, rows, head, t);
  const int steps = t.dim / kStep, spans = t.rows / kStep;
  alignas(64) float y[32 * kStep];
  float inverse[32];
  for (int row = 0; row < rows; row += 32) {
    const int count = rows - row < 32 ? rows - row : 32;
    const bf16* q = t.q + static_cast<size_t>(row / kTileRows) * steps * kTileElements;
    for (int span = 0; span < spans; ++span)
      product_of(count, q, steps * kTileElements, t.k + static_cast<size_t>(span) * 2 * steps * kTileElements,
                 steps * kTileElements, steps, t.s + span * kStep, t.rows);
    for (int r = 0; r < count; ++r) inverse[r] = soften(t, r, rows, job.scale);
    settle(t.p);
    for (int c = 0; c < job.head_dim; c += kStep) {
      product_of(count, t.p, spans * kTileElements, t.v + static_cast<size_t>(c / kPanel) * spans * kTileElements,
                 spans * kTileElements, spans, y, kStep);
      for (int r = 0; r < count; ++r)
        put_columns(job.out, first + row + r, head * job.head_dim + c, y + r * kStep, job.head_dim - c, inverse[r]);
    }
  }
}

}  // namespace naru

#endif
