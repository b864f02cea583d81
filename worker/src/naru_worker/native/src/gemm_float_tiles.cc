// Prompt tokens: weights unpacked to bf16, a pair of panels at a time, and multiplied without scaling.
//
// The work is cut into pairs of panels times blocks of rows. A member's first units are all the pairs of its own rows, so
// that a layer reads what the same member wrote, from its own L2 cache. While the tiles multiply by one pair of panels,
// the vector unit unpacks the next.
#include "gemm_tiles.h"
#include "tile_products.h"

#if defined(__AMX_TILE__)

namespace naru {
namespace {

// Columns are taken in blocks of at most this many tiles: 36 KB of unpacked weights stay in the L1 cache, and activations
// pass through it without pushing them out.
constexpr int kBlockSteps = 18;
constexpr size_t kPairHalves = size_t{2} * kBlockSteps * 512;

// Rows of one unit of work, at most.
constexpr int kBlockRows = 256;

struct Panel {
  const Segment* segment;
  int index;
  const uint8_t* data() const { return segment->data + static_cast<size_t>(index) * segment->panel_bytes; }
  int column() const { return segment->first_row + index * kPanel; }
  int columns() const {
    const int left = segment->rows - index * kPanel;
    return left < kPanel ? left : kPanel;
  }
};

// Two panels of one format (or one panel, at the odd end of a segment) and the rows [row, row + rows) that meet them.
struct Piece {
  Panel panels[2];
  int count = 0;  // 0: none
  int row = 0;
  int rows = 0;
};

Panel panel_at(const Matrix& w, int panel) {
  const Segment* s = w.segments;
  while (panel >= s->first_panel + s->panels) ++s;
  return Panel{s, panel - s->first_panel};
}

int num_pairs(const Linear& job) {
  if (job.gated != nullptr) return job.w->panels / 2;
  int n = 0;
  for (int i = 0; i < job.w->num_segments; ++i) n += (job.w->segments[i].panels + 1) / 2;
  return n;
}

// Gates meet what they gate; otherwise neighbours of a segment.
void pair_at(const Linear& job, int pair, Piece* piece) {
  if (job.gated != nullptr) {
    piece->panels[0] = panel_at(*job.w, pair);
    piece->panels[1] = panel_at(*job.w, pair + job.w->panels / 2);
    piece->count = 2;
    return;
  }
  const Segment* s = job.w->segments;
  for (; pair >= (s->panels + 1) / 2; ++s) pair -= (s->panels + 1) / 2;
  piece->panels[0] = Panel{s, 2 * pair};
  piece->panels[1] = Panel{s, 2 * pair + 1};
  piece->count = 2 * pair + 1 < s->panels ? 2 : 1;
}

// A member's way through its pieces.
class Walk {
 public:
  Walk(const Linear& job, Pool* pool, int member)
      : job_(job),
        pool_(pool),
        steps_(job.w->k / kGroup),
        blocks_((steps_ + kBlockSteps - 1) / kBlockSteps),
        pairs_(num_pairs(job)),
        row_blocks_((job.rows + kBlockRows - 1) / kBlockRows),
        share_(pool->share(member, pairs_ * row_blocks_)) {
    uint16_t* b = reinterpret_cast<uint16_t*>(job.scratch);
    weights_[0] = b;
    weights_[1] = b + kPairHalves;
    sums_ = job.scratch + kPairHalves;  // two buffers of halves
    first_y_ = y_ = sums_ + kBlockRows * kSide;
  }

  void run() {
    Piece piece = next();
    if (piece.count == 0) return;
    start_unpacking(piece, 0, weights_[0]);
    unpack_rest();
    int at = 0;
    while (piece.count != 0) {
      Piece after{};
      for (int block = 0; block < blocks_; ++block, at ^= 1) {
        const bool last = block + 1 == blocks_;
        if (last) after = next();
        const int coming = last ? 0 : block + 1;
        start_unpacking(last ? after : piece, coming, weights_[at ^ 1]);
        settle(weights_[at]);
        multiply(piece, block, weights_[at]);
        unpack_rest();
      }
      piece = after;
    }
    gating_.rest();
  }

 private:
  void start_unpacking(const Piece& piece, int block, uint16_t* out) {
    const int begin = block_end(block - 1), end = block_end(block);
    unpacking_ = Unpacking{};
    if (piece.count == 0) return;
    for (int i = 0; i < piece.count; ++i) unpacking_.panels[i] = piece.panels[i].data();
    unpacking_.count = piece.count;
    unpacking_.ahead = piece.panels[0].segment->panel_bytes * (job_.gated != nullptr ? 1 : 2);
    unpacking_.begin = begin;
    unpacking_.out = out;
    unpacking_.total = kSlices * piece.count * (end - begin);
    kernels_ = tile_kernels_of(piece.panels[0].segment->format);
  }

  void unpack_rest() { (unpacking_.*kernels_.unpack)(unpacking_.left()); }

  int block_end(int block) const { return steps_ * (block + 1) / blocks_; }

  // The next piece in tiles; those of floats are done at once.
  Piece next() {
    for (;;) {
      Piece piece{};
      const int unit = pool_->claim(&share_);
      if (unit < 0) return piece;
      const int block = unit / pairs_, tiles = (job_.rows + kSide - 1) / kSide;
      piece.row = tiles * block / row_blocks_ * kSide;
      const int end = tiles * (block + 1) / row_blocks_ * kSide;
      piece.rows = (end < job_.rows ? end : job_.rows) - piece.row;
      pair_at(job_, unit % pairs_, &piece);
      if (is_quantized(piece.panels[0].segment->format)) return piece;
      for (int i = 0; i < piece.count; ++i) by_floats(piece, piece.panels[i]);
    }
  }

  void by_floats(const Piece& piece, const Panel& panel) {
    Linear part = job_;
    Activations x = *job_.x;
    x.f += static_cast<size_t>(piece.row) * x.ld;
    part.x = &x;
    part.rows = piece.rows;
    part.out += static_cast<size_t>(piece.row) * part.ld;
    vector_panel(part, *panel.segment, panel.index, panel.data(), panel.data());
  }

  void multiply(const Piece& piece, int block, const uint16_t* b) {
    const int begin = block_end(block - 1), steps = block_end(block) - begin;
    const size_t tile_row = static_cast<size_t>(steps_) * 512;
    const int sides = (piece.rows + kSide - 1) / kSide;
    for (int i = 0; i < sides; ++i) {
      const int row = piece.row + i * kSide;
      const bf16* a = job_.x->h + static_cast<size_t>(row / kTile) * tile_row + static_cast<size_t>(begin) * 512;
      const Sums sums{sums_ + static_cast<size_t>(i) * kSide * kSide, kSide};
      const bool whole = is_whole(piece, i * kSide);
      if (block > 0)
        load_sums(sums);
      else if (job_.add)
        load_residual(piece, row, whole);
      else
        zero_sums();
      const int quota = (unpacking_.left() + sides - i - 1) / (sides - i);
      if (piece.count == 2)
        kernels_.multiply(a, tile_row, b, steps, whole ? out_at(piece, row) : Sums{y_, kSide}, quota, &unpacking_,
                          &gating_);
      else
        multiply_one(a, tile_row, b, steps);
      if (block + 1 < blocks_)
        store_sums(sums);
      else
        put(piece, row, whole);
    }
  }

  // Whether the four tiles are stored as they are.
  bool is_whole(const Piece& piece, int offset) const {
    return job_.gated == nullptr && job_.w->bias == nullptr && piece.count == 2 && offset + kSide <= piece.rows &&
           piece.panels[1].columns() == kPanel;
  }

  Sums out_at(const Piece& piece, int row) const {
    return Sums{job_.out + static_cast<size_t>(row) * job_.ld + piece.panels[0].column(), job_.ld};
  }

  // Before the products, whether the tiles are whole or not: the order of additions is one.
  void load_residual(const Piece& piece, int row, bool whole) {
    if (whole) return load_sums(out_at(piece, row));
    const int left = piece.row + piece.rows - row, rows = left < kSide ? left : kSide;
    for (int i = 0; i < piece.count; ++i) {
      const Panel& panel = piece.panels[i];
      for (int m = 0; m < rows; ++m)
        store16(y_ + m * kSide + i * kTile,
                load16n(job_.out + static_cast<size_t>(row + m) * job_.ld + panel.column(), panel.columns()));
    }
    settle(y_);
    load_sums(Sums{y_, kSide});
  }

  void put(const Piece& piece, int row, bool whole) {
    if (whole) return store_sums(out_at(piece, row));
    gating_.rest();
    store_sums(Sums{y_, kSide});
    settle(y_);
    const int left = piece.row + piece.rows - row, rows = left < kSide ? left : kSide;
    if (job_.gated != nullptr) {
      gating_ = gating(piece, row, rows, y_);
      y_ = y_ == first_y_ ? first_y_ + kSide * kSide : first_y_;
      return;
    }
    Linear part = job_;
    part.add = false;  // done
    for (int i = 0; i < piece.count; ++i)
      put_tile(part, y_ + i * kTile, kSide, row, rows, piece.panels[i].column(), piece.panels[i].columns());
  }

  Gating gating(const Piece& piece, int row, int rows, const float* y) const {
    Gating g;
    g.y = y;
    g.to = job_.gated;
    if (job_.w->bias != nullptr) {
      g.gate_bias = job_.w->bias + piece.panels[0].column();
      g.up_bias = job_.w->bias + piece.panels[1].column();
    }
    g.row = row;
    g.rows = rows;
    g.column = piece.panels[0].column();
    return g;
  }

  const Linear& job_;
  Pool* pool_;
  int steps_, blocks_, pairs_, row_blocks_;
  Pool::Share share_;
  uint16_t* weights_[2];
  float *sums_, *first_y_, *y_;
  Gating gating_;  // sums of a few products ago
  Unpacking unpacking_;
  TileKernels kernels_ = tile_kernels<kW4>();  // of what is being unpacked
};

}  // namespace

size_t tile_scratch_floats(int k) {
  const size_t bytes_way = static_cast<size_t>(k) * kPanel / 4;                       // bytes of one panel
  const size_t floats_way = kPairHalves + (kBlockRows + 2 * kSide) * size_t{kSide};   // weights, sums, four tiles twice
  return (bytes_way > floats_way ? bytes_way : floats_way) + 64;
}

void linear_in_tiles(const Linear& job, Pool* pool, int member) {
  float_tile_shapes();
  Walk(job, pool, member).run();
  release_tiles();
}

}  // namespace naru

#endif
