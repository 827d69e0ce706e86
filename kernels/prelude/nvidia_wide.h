// NVIDIA's wide matrix unit: wgmma.m64nNk16 of sm_90a. Four waves, a team, multiply 64 rows of A in their registers, 16 a wave,
// with N rows of B in LDS.
//
// Element 4 * q + 2 * h + e of a lane's sums is that of row 8 * q + 2 * (lane % 4) + e of B, and of row held(h) of the wave's A.
#pragma once

#define WIDE_4(c, i) "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3])
#define WIDE_16(c, i) WIDE_4(c, i), WIDE_4(c, (i) + 4), WIDE_4(c, (i) + 8), WIDE_4(c, (i) + 12)
#define WIDE_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WIDE_D16 WIDE_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WIDE_D32 WIDE_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WIDE_D64                                                                                                               \
    WIDE_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"   \
             "%59,%60,%61,%62,%63"
#define WIDE_D128                                                                                                              \
    WIDE_D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"                                                                \
             "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,"                                                                \
             "%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The operands after the sums are A, the descriptor of B, whether the sums go on from what they are, and whether B's
// rows go down in LDS.
#define WIDE_MMA(SHAPE, D, A0, A1, A2, A3, B, ON, DOWN, ...)                                                                   \
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %" #ON ", 0;"                                                                 \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 {" D "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3               \
                 "}, %" #B ", p, 1, 1, %" #DOWN "; }"                                                                          \
                 : __VA_ARGS__                                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(GOES_ON), "n"(IS_DOWN)                              \
                 : "memory")

struct Wide {
    static constexpr u32 K_LANES = 4, HELD = 2, TEAM = 4;
    DEV static u32 held(u32 i) { return lane() / 4 + 8 * i; }
    DEV static u32 k_lane() { return lane() % 4; }
    // The descriptor of a tile. Its lower half is the place in units of 16 bytes; the next 8 rows lie 2048 bytes further, and a
    // tile's parts are turned by 128 bytes' pattern. A sum of 64 bits takes two instructions, one that is put together takes three.
    using Address = u64;
    DEV static Address address(const f16* lds) { return (u64)0x40000080 << 32 | (u32)__cvta_generic_to_shared(lds) >> 4; }
    // Bytes from the address to the next multiple of 1024, where a tile may begin.
    DEV static u32 to_tile(const f16* lds) { return (0u - (u32)__cvta_generic_to_shared(lds)) % 1024; }
    // So many values further.
    DEV static Address past(Address at, u32 values) { return at + values / 8; }

    template <u32 N> struct Sums {
        // Rows of B in a lane, and the lane's sums of each: one for each row of A that it holds.
        static constexpr u32 ROWS = N / 4;
        f32 v[ROWS * HELD];
        DEV static u32 row(u32 i) { return i / 2 * 8 + 2 * (lane() % 4) + i % 2; }
        DEV f32 get(u32 i, u32 h) const { return v[i / 2 * 4 + 2 * h + i % 2]; }
        DEV void clear() {
            UNROLL for (u32 l = 0; l < ROWS * HELD; l++) v[l] = 0.0f;
        }
        DEV void set(u32 i, u32 h, f32 value) { v[i / 2 * 4 + 2 * h + i % 2] = value; }
        // Between products and other uses of the sums: the compiler moves neither past the other.
        DEV void settle() {
            UNROLL for (u32 l = 0; l < ROWS * HELD; l++) asm volatile("" : "+f"(v[l])::"memory");
        }
        DEV void add(const u32 (&a)[4], Address tile, u32 half, u32 product) {
            multiply<1, 0>(a, tile + 64 * half + 2 * product);
        }
        DEV void start(const u32 (&a)[4], Address tile, u32 half, u32 product) {
            multiply<0, 0>(a, tile + 64 * half + 2 * product);
        }
        // The descriptor says also that the next 64 rows of B lie 1024 bytes further.
        DEV void add_down(const u32 (&a)[4], Address tile, u32 product) { multiply<1, 1>(a, tile + (64 << 16) + 256 * product); }

        template <u32 GOES_ON, u32 IS_DOWN> DEV void multiply(const u32 (&a)[4], u64 b) {
            if constexpr (N == 16) WIDE_MMA("m64n16k16", WIDE_D8, 8, 9, 10, 11, 12, 13, 14, WIDE_4(v, 0), WIDE_4(v, 4));
            if constexpr (N == 32) WIDE_MMA("m64n32k16", WIDE_D16, 16, 17, 18, 19, 20, 21, 22, WIDE_16(v, 0));
            if constexpr (N == 64) WIDE_MMA("m64n64k16", WIDE_D32, 32, 33, 34, 35, 36, 37, 38, WIDE_16(v, 0), WIDE_16(v, 16));
            if constexpr (N == 128) {
                WIDE_MMA("m64n128k16", WIDE_D64, 64, 65, 66, 67, 68, 69, 70, WIDE_16(v, 0), WIDE_16(v, 16), WIDE_16(v, 32),
                         WIDE_16(v, 48));
            }
            if constexpr (N == 256) {
                WIDE_MMA("m64n256k16", WIDE_D128, 128, 129, 130, 131, 132, 133, 134, WIDE_16(v, 0), WIDE_16(v, 16), WIDE_16(v, 32),
                         WIDE_16(v, 48), WIDE_16(v, 64), WIDE_16(v, 80), WIDE_16(v, 96), WIDE_16(v, 112));
            }
        }
    };

    // Pointers are added up here. Else the compiler adds their parts again at each load, which took 5 % of a product's time.
    template <class Pointers> DEV static void settle_pointers(Pointers& all) {
        UNROLL for (u32 i = 0; i < sizeof all / 8; i++) asm("" : "+l"(((u64*)&all)[i]));
    }
    // These operands are complete from here on: what makes them may not move down, past products and waits.
    template <u32 N> DEV static void settle(u32 (&a)[N][4]) {
        UNROLL for (u32 i = 0; i < N; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    }
    // Before products with these operands.
    template <u32 N> DEV static void begin(u32 (&a)[N][4]) {
        settle(a);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    // Ends a batch of products.
    DEV static void end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
    // Until all but the last LEFT batches are done.
    template <u32 LEFT> DEV static void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
    // Between this thread's writes of B and the barrier before products that read it.
    DEV static void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
};

// 2^a, and 0 where that is below the smallest normal number: one instruction.
DEV f32 exp2_or_0_f32(f32 a) {
    f32 power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a));
    return power;
}

// A barrier in LDS for copies that one thread starts for all.
struct CopyBarrier {
    u64 word;
    // One thread, and a barrier of the block after it.
    DEV void begin(u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at()), "r"(arrivals) : "memory"); }
    DEV void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at()) : "memory"); }
    // Arrives at the barrier in the same place of another block of the cluster.
    DEV void arrive_in(u32 rank) {
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
                         at()),
                     "r"(rank)
                     : "memory");
    }
    // Arrives, and makes the phase last until so many bytes are there.
    DEV void expect(u32 bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
    }
    // Until the phase of this parity has ended.
    DEV void wait(u32 parity) {
        asm volatile("{ .reg .pred p; AGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra AGAIN_%=; }" ::"r"(at()),
                     "r"(parity)
                     : "memory");
    }
    DEV u32 at() const { return (u32)__cvta_generic_to_shared(&word); }
};

// Copies so many bytes, a multiple of 16, to LDS; `barrier` expects them.
DEV void copy_bulk_async(void* lds, const void* p, u32 bytes, CopyBarrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (u32)__cvta_generic_to_shared(lds)),
                 "l"(__cvta_generic_to_global(p)), "r"(bytes), "r"(barrier.at())
                 : "memory");
}
// The same to the same place in the LDS of both blocks of a cluster; the barrier in each expects them.
DEV void copy_bulk_both_async(void* lds, const void* p, u32 bytes, CopyBarrier& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
                     (u32)__cvta_generic_to_shared(lds)),
                 "l"(__cvta_generic_to_global(p)), "r"(bytes), "r"(barrier.at()), "h"((u16)3)
                 : "memory");
}

// The number of this block in its cluster.
DEV u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// A barrier of all threads of a cluster.
DEV void barrier_cluster() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Each thread of the calling team has COUNT registers from here on: it gives others back, or takes those that others gave back.
template <u32 COUNT> DEV void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <u32 COUNT> DEV void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
