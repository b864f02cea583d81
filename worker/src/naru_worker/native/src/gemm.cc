#include "gemm.h"

#include "gemm_tiles.h"

namespace naru {
namespace {

const Segment& segment_of(const Matrix& w, int panel) {
  const Segment* s = w.segments;
  while (panel >= s->first_panel + s->panels) ++s;
  return *s;
}

const uint8_t* panel_address(const Matrix& w, int panel) {
  const Segment& s = segment_of(w, panel);
  return s.data + static_cast<size_t>(panel - s.first_panel) * s.panel_bytes;
}

// A member's part of a matrix as one run of bytes: the segments of a matrix lie one after the other.
struct Run {
  const uint8_t* begin;
  size_t bytes;
};

Run run_of(const Matrix& w, int member, int size) {
  int begin, end;
  even_part(w.panels, member, size, &begin, &end);
  if (begin >= end) return Run{w.segments[0].data, 0};
  const uint8_t* first = panel_address(w, begin);
  const uint8_t* last = panel_address(w, end - 1);
  return Run{first, static_cast<size_t>(last - first) + segment_of(w, end - 1).panel_bytes};
}

// What to fetch while the panel at `at` is worked on: the same run further on, then the run of the next layer.
const uint8_t* fetch_from(const uint8_t* at, const Run& run, const Run& then) {
  const size_t offset = static_cast<size_t>(at - run.begin) + kAheadBytes;
  if (offset < run.bytes) return run.begin + offset;
  return then.begin == nullptr ? at : then.begin + (offset - run.bytes);
}

}  // namespace

void vector_panel(const Linear& job, const Segment& s, int index, const uint8_t* panel, const uint8_t* ahead) {
  const int k = job.w->k;
  const int column = s.first_row + index * kPanel;
  const int left = s.rows - index * kPanel;
  const Activations& x = *job.x;
  alignas(64) float y[kRows * kPanel];
  for (int row = 0; row < job.rows; row += kRows) {
    const int rows = job.rows - row < kRows ? job.rows - row : kRows;
    if (is_quantized(s.format)) {
      const bool nibbles = s.format != kW8 && s.format != kW6K;
      (nibbles ? nibble_panel(s.format, rows) : byte_panel(s.format, rows))(panel, k, rows_from(x, row), ahead, y);
    } else {
      float_panel(s.format, rows)(panel, k, FRows{x.f + static_cast<size_t>(row) * x.ld, x.ld}, ahead, y);
    }
    put_tile(job, y, kPanel, row, rows, column, left < kPanel ? left : kPanel);
    ahead = panel;  // once is enough: from here on the requests hit the L1 cache
  }
}

namespace {

constexpr int kLeastPieces = 8;  // of a member, where there are as many panels
constexpr int kMostPanels = 4;

// Pieces of `width` panels of one segment each.
int num_pieces(const Matrix& w, int width) {
  int n = 0;
  for (int i = 0; i < w.num_segments; ++i) n += (w.segments[i].panels + width - 1) / width;
  return n;
}

struct Piece {
  const Segment* segment;
  int index;  // of its first panel
  int count;
};

Piece piece_at(const Matrix& w, int width, int at) {
  const Segment* s = w.segments;
  for (int n = (s->panels + width - 1) / width; at >= n; n = (s->panels + width - 1) / width) {
    at -= n;
    ++s;
  }
  const int index = at * width, left = s->panels - index;
  return Piece{s, index, left < width ? left : width};
}

// Many rows without tiles: work goes in as many panels as are multiplied side by side.
void linear_unpacked(const Linear& job, Pool* pool, int member) {
  const Run run = run_of(*job.w, member, pool->size());
  const Run then = job.then == nullptr ? Run{nullptr, 0} : run_of(*job.then, member, pool->size());
  Pool::Share share = pool->share(member, num_pieces(*job.w, kUnpackedPanels));
  for (int p = pool->claim(&share); p >= 0; p = pool->claim(&share)) {
    const Piece piece = piece_at(*job.w, kUnpackedPanels, p);
    const Segment& s = *piece.segment;
    const uint8_t* panel = s.data + static_cast<size_t>(piece.index) * s.panel_bytes;
    const bool foreseen = share.is_own() && panel >= run.begin;
    if (!pays_unpacked(s.format, job.rows)) {
      for (int i = 0; i < piece.count; ++i, panel += s.panel_bytes)
        vector_panel(job, s, piece.index + i, panel, foreseen ? fetch_from(panel, run, then) : panel);
    } else if (is_quantized(s.format)) {
      unpacked_panels(job, s, piece.index, piece.count, foreseen ? fetch_from(panel, run, then) : nullptr);
    } else {
      float_panels(job, s, piece.index, piece.count);
    }
  }
}

// Panels of a piece: claiming one drains the core's stores, which costs as much as a few rows of a panel.
int piece_panels(const Matrix& w, int members) {
  const int width = w.panels / (kLeastPieces * members);
  return width < 1 ? 1 : width < kMostPanels ? width : kMostPanels;
}

}  // namespace

void linear(const Linear& job, Pool* pool, int member) {
#if defined(__AMX_TILE__)
  if (job.tiles) return linear_in_tiles(job, pool, member);
  const bool bytes = job.w->wants_quant && job.rows >= kByteTileRows;
  if (bytes) byte_tile_shapes();
#endif
  if (kHasUnpacked && job.rows >= kUnpackedRows) return linear_unpacked(job, pool, member);
  const int width = piece_panels(*job.w, pool->size());
  const Run run = run_of(*job.w, member, pool->size());
  const Run then = job.then == nullptr ? Run{nullptr, 0} : run_of(*job.then, member, pool->size());
  Pool::Share share = pool->share(member, num_pieces(*job.w, width));
  for (int p = pool->claim(&share); p >= 0; p = pool->claim(&share)) {
    const Piece piece = piece_at(*job.w, width, p);
    const Segment& s = *piece.segment;
    for (int i = piece.index; i < piece.index + piece.count; ++i) {
      const uint8_t* panel = s.data + static_cast<size_t>(i) * s.panel_bytes;
      // Away from the own run there is nothing to foresee.
      const uint8_t* ahead = share.is_own() && panel >= run.begin ? fetch_from(panel, run, then) : panel;
#if defined(__AMX_TILE__)
      if (bytes && has_byte_tiles(s.format)) {
        byte_tile_panel(job, s, i, panel, ahead);
        continue;
      }
#endif
      vector_panel(job, s, i, panel, ahead);
    }
  }
#if defined(__AMX_TILE__)
  if (bytes) release_tiles();
#endif
}

}  // namespace naru
