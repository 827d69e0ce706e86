// The wide matrix unit on the CPU: lanes hold the elements that they hold on NVIDIA's GPUs (nvidia_wide.h), and products are done
// where they start. k ascends, with one rounding a step.
#pragma once

struct Wide {
    static constexpr u32 K_LANES = 4, HELD = 2, TEAM = 4;
    DEV static u32 held(u32 i) { return lane() / 4 + 8 * i; }
    DEV static u32 k_lane() { return lane() % 4; }
    using Address = const f16*;
    DEV static Address address(const f16* lds) { return lds; }
    DEV static u32 to_tile(const f16* lds) { return (u32)(-(u64)lds % 1024); }

    DEV static Address past(Address at, u32 values) { return at + values; }

    template <u32 N> struct Sums {
        static constexpr u32 ROWS = N / 4;
        f32 v[ROWS][HELD];
        DEV static u32 row(u32 i) { return i / 2 * 8 + 2 * (lane() % 4) + i % 2; }
        DEV f32 get(u32 i, u32 h) const { return v[i][h]; }
        DEV void clear() { memset(v, 0, sizeof v); }
        DEV void set(u32 i, u32 h, f32 value) { v[i][h] = value; }
        DEV void settle() {}
        CALLED void add(const u32 (&a)[4], Address tile, u32 half, u32 product, HOST_HERE) {
            // Eight rows of both halves lie before the next eight.
            const auto at = [&](u32 r, u32 k) {
                return tile + r / 8 * 1024 + half * 512 + r % 8 * 64 + ((2 * product + k / 8) ^ r % 8) * 8 + k % 8;
            };
            multiply(a, tile, at, file, line);
        }
        CALLED void start(const u32 (&a)[4], Address tile, u32 half, u32 product, HOST_HERE) {
            clear();
            add(a, tile, half, product, file, line);
        }
        CALLED void add_down(const u32 (&a)[4], Address tile, u32 product, HOST_HERE) {
            const auto at = [&](u32 r, u32 k) {
                return tile + (2 * product + k / 8) * 1024 + r / 64 * 512 + k % 8 * 64 + (r % 64 / 8 ^ k % 8) * 8 + r % 8;
            };
            multiply(a, tile, at, file, line);
        }

        // at(r, k): where element k of row r of B is.
        template <class At> CALLED void multiply(const u32 (&a)[4], Address tile, At at, const char* file, i32 line) {
            if ((u64)tile % 1024 != 0) host::fault("a tile begins at a multiple of 1024 bytes", file, line);
            host::Lane* me = host::self;
            const u32 turn = me->turn;
            me->turn = turn ^ 1;
            memcpy(me->slot[turn], a, sizeof a);
            host::wait_wave("wide product", file, line);
            f32 weights[HELD][16];
            for (u32 t = 0; t < 4; t++) {
                const f16* from = (const f16*)me->first_of_wave[lane() / 4 * 4 + t].slot[turn];
                for (u32 h = 0; h < HELD; h++) {
                    for (u32 i = 0; i < 4; i++)
                        weights[h][2 * t + i % 2 + 8 * (i / 2)] = (f32)from[2 * (h + 2 * (i / 2)) + i % 2];
                }
            }
            for (u32 i = 0; i < ROWS; i++) {
                for (u32 k = 0; k < 16; k++) {
                    const f32 value = (f32)*at(row(i), k);
                    for (u32 h = 0; h < HELD; h++) v[i][h] = __builtin_fmaf(weights[h][k], value, v[i][h]);
                }
            }
        }
    };

    template <class Pointers> DEV static void settle_pointers(Pointers&) {}
    template <u32 N> DEV static void settle(u32 (&)[N][4]) {}
    template <u32 N> DEV static void begin(u32 (&)[N][4]) {}
    DEV static void end() {}
    template <u32 LEFT> DEV static void wait() {}
    DEV static void publish() {}
};

DEV f32 exp2_or_0_f32(f32 a) { return exp2f(a); }
