// How attention cuts the tokens of a row into splits, and how the results of splits become one.
//
// The cut depends on how many tokens the row attends to and on nothing else, so that no other row of a step changes its bits.
// Scores are in units of log2: score = q . k * scale, scale = log2(e) / sqrt(head_dim), weights 2^(score - greatest).
#pragma once
#include "../prelude/prelude.h"

// Most splits of a row.
constexpr u32 SPLITS_MAX = 128;
// A greatest score that is less than any: 2^(NO_SCORE - x) is 0 for every x that occurs, 2^(NO_SCORE - NO_SCORE) is 1.
constexpr f32 NO_SCORE = -3.0e38f;

// Tokens in a split of a row that attends to `len`: enough splits to fill a device early, at most SPLITS_MAX. Whole pages.
DEV u32 split_tokens(u32 len) {
    u32 tokens = len <= 1024 ? 64 : len <= 4096 ? 128 : 256;
    while ((u64)tokens * SPLITS_MAX < len) tokens *= 2;
    return tokens;
}
