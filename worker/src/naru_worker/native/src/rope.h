// Norms of heads, rotary positions and the write of new keys and values into the cache.
#pragma once

#include "kv.h"

namespace naru {

// cos and sin of one position: table[0..half) and table[half..2 half).
void rope_table_row(int position, const double* inverse_frequency, int half, float factor, float* table);

// RMSNorms, of head_dim weights each, that every head's query and key pass before they turn. Null: there is none.
struct HeadNorms {
  const float* q;
  const float* k;
  float eps;
};

// Norms and rotates q and k of one token's row (q heads, then k heads, then v heads) in place and writes k and v to
// `slot`. table may be null (learned positions). `scratch` holds padded_dim bytes.
void rope_kv_row(float* row, int num_heads, const HeadNorms& norms, const float* table, int rotary_dim,
                 const KVCache& kv, int layer, int slot, float* scratch);

}  // namespace naru
