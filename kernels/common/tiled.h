// Where the wide matrix unit wants the f16 values of rows (X16 in activation.h): in tiles.
//
// A tile has 8 rows of 64 values, 128 bytes each. A step, 128 values of a row, lies in two tiles side by side: halves of 16 of its
// four groups of 32. Tiles go along the rows of x, then down. In a row of a tile, value 4 q + 2 p + e of half h of group t lies in
// part 2 q + p of 16 bytes, as value 2 t + e; part i of row r lies at part i ^ r % 8.
#pragma once
#include "../prelude/prelude.h"

// In values: columns of a step; a tile; a step of eight rows.
constexpr u32 TILED_COLS = 128, TILED_HALF = 512, TILED_STEP = 1024;

// The place of row r's eight, for rows of so many steps.
DEV u64 tiled_rows(u32 r, u32 steps) { return u64(r / 8) * steps * TILED_STEP; }
// The place of a part of row r in its tile.
DEV u32 tiled_part(u32 r, u32 part) { return r % 8 * 64 + (part ^ r % 8) * 8; }
// The place of values k and k + 1 of row r; k is even.
DEV u64 tiled_pair(u32 r, u32 k, u32 steps) {
    const u32 t = k / 32 % 4, half = k / 16 % 2, part = k / 2 % 8;
    return tiled_rows(r, steps) + k / 128 * TILED_STEP + half * TILED_HALF + tiled_part(r, part) + 2 * t;
}
