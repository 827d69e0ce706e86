// The tokens that a row of attention sees, how they are cut into splits, and the units of scores.
//
// The cut depends on the row's position and on splits_max of the launch: no other row's tokens change the row's bits.
// Scores are in units of log2: score = q . k * scale, scale = log2(e) / sqrt(head_dim), weights 2^(score - greatest).
#pragma once
#include "../prelude/prelude.h"

// Most splits of a row.
constexpr u32 SPLITS_MAX = 128;
// Less than any score: 2^(NO_SCORE - x) is 0 for every x that occurs, 2^(NO_SCORE - NO_SCORE) is 1.
constexpr f32 NO_SCORE = -3.0e38f;

// A score, capped: cap * tanh(score / cap), or as it is for a cap of 0. The cap is the same for all lanes.
DEV f32 capped(f32 score, f32 cap) { return cap == 0.0f ? score : cap * tanh_f32(score / cap); }

// The first of `len` tokens that a row with this window sees. Window 0: the row sees all tokens.
DEV u32 first_seen(u32 len, u32 window) { return window != 0 && len > window ? len - window : 0; }

// Tokens of the smallest split.
constexpr u32 SPLIT_MIN = 64;
// Tokens in a split of a row that sees `seen` tokens: a multiple of SPLIT_MIN, as few as make at most `most` splits. A window may begin
// inside a split, and so reach into one more.
DEV u32 split_tokens(u32 seen, u32 most) { return max_u32(SPLIT_MIN, ceil_div(ceil_div(seen, most), SPLIT_MIN) * SPLIT_MIN); }
// Those of a row that is token `len - 1` of its sequence, by this alone: whole pages, enough splits to fill a device at short
// lengths, at most SPLITS_MAX.
DEV u32 split_tokens_of(u32 len) {
    u32 tokens = len <= 1024 ? 64 : len <= 4096 ? 128 : 256;
    while ((u64)tokens * SPLITS_MAX < len) tokens *= 2;
    return tokens;
}
// The same for blocks whose join of a split costs as much as 32 tokens of it.
DEV u32 coarse_split_tokens(u32 len) { return len <= 256 ? 256 : 2 * split_tokens_of(len); }
