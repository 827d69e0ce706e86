//! Rows that land in pages, and the memory that pages take.

use super::*;
use crate::backend::cpu::simd::tests::levels;
const STATES: [State; 2] = [State::Kv { heads: 2, head_dim: 20 }; 2];

fn check_written<E: Plain + Into<f32>>(kv: KvType, level: Level) {
    let mut pages = KvPool::new(&STATES, kv, 3).unwrap();
    let [first, second] = [0, 1].map(|state| pages.layout(StateId(state)));
    let mut workers = Pool::new(2).unwrap();
    pages.materialise(1).unwrap();
    pages.materialise(2).unwrap();
    let places = [KvPlace { page: 2, token: 31 }, KvPlace { page: 1, token: 0 }];
    // Halves are exact in f16. Each row holds keys of two heads, then values of two heads.
    let data: Vec<f32> = (0..160).map(|i| i as f32 * 0.5).collect();
    let rows = |row: usize, head: usize| {
        [&data[row * 80 + head * 20..][..20], &data[row * 80 + 40 + head * 20..][..20]]
    };
    pages.write(&mut workers, true, level, second, &places, rows);
    for (row, place) in places.into_iter().enumerate() {
        for kv_head in 0..2 {
            let head = pages.head::<E>(place.page, &second, kv_head);
            let (token, [key, value]) = (place.token as usize, rows(row, kv_head));
            for d in 0..20 {
                assert_eq!(head.k[d * 32 + token].into(), key[d]);
                assert_eq!(head.v[token * 32 + d].into(), value[d]);
            }
            // Pages start as NaN in tests.
            let written = |x: &&E| !(**x).into().is_nan();
            assert_eq!(head.k.iter().chain(head.v).filter(written).count(), 40);
            assert!(pages.head::<E>(place.page, &first, kv_head).k.iter().all(|&x| x.into().is_nan()));
        }
    }
}

#[test]
fn rows_land_in_their_places_and_nowhere_else() {
    for (_, level) in levels() {
        check_written::<f16>(KvType::F16, level);
        check_written::<f32>(KvType::F32, level);
    }
}

/// A token's key and value of a head of `dim` values, as pages of codes hold them.
fn decoded(head: &KvHead<'_, i8>, token: usize, dim: usize) -> [Vec<f32>; 2] {
    let scale = |scales: &[f16], d: usize| scales[d / KV_GROUP * KV_PAGE_TOKENS + token].to_f32();
    let key = |d: usize| f32::from(head.k[d * KV_PAGE_TOKENS + token]) * scale(head.k_scales, d);
    let value = |d: usize| f32::from(head.v[token * dim + d]) * scale(head.v_scales, d);
    [(0..dim).map(key).collect(), (0..dim).map(value).collect()]
}

#[test]
fn codes_are_within_half_a_step_and_alike_on_all_levels() {
    let (dim, heads) = (96usize, 2usize);
    let states = [State::Kv { heads: 2, head_dim: 96 }; 2];
    // Powers of ten from group to group; one group of zeros, and one far below the smallest f16.
    let value = |i: usize| match i / KV_GROUP {
        2 => 0.0,
        4 => 1e-9 * (i as f32),
        group => (((i * 7919) % 1009) as f32 - 504.0) * 10f32.powi(group as i32 % 7 - 4),
    };
    let data: Vec<f32> = (0..2 * 2 * heads * dim).map(value).collect();
    let rows = |row: usize, head: usize| {
        let of_row = &data[row * 2 * heads * dim..];
        [&of_row[head * dim..][..dim], &of_row[(heads + head) * dim..][..dim]]
    };
    let places = [KvPlace { page: 0, token: 31 }, KvPlace { page: 1, token: 0 }];
    let mut workers = Pool::new(2).unwrap();
    let mut all = Vec::new();
    for (_, level) in levels() {
        let mut pages = KvPool::new(&states, KvType::Int8, 2).unwrap();
        let [first, second] = [0, 1].map(|state| pages.layout(StateId(state)));
        pages.materialise(0).unwrap();
        pages.materialise(1).unwrap();
        pages.write(&mut workers, true, level, second, &places, rows);
        for (row, place) in places.into_iter().enumerate() {
            for kv_head in 0..heads {
                let head = pages.head::<i8>(place.page, &second, kv_head);
                let written = |scales: &[f16]| scales.iter().filter(|scale| !scale.is_nan()).count();
                assert_eq!([written(head.k_scales), written(head.v_scales)], [3, 3]);
                let got = decoded(&head, place.token as usize, dim);
                for (got, want) in got.iter().zip(rows(row, kv_head)) {
                    for (got, want) in got.chunks(KV_GROUP).zip(want.chunks(KV_GROUP)) {
                        let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
                        // Half a step, what f16 takes from the greatest value, and what it cannot hold.
                        let bound = most * (1.0 / 254.0 + 1.0 / 2048.0) + 127.0 * 2f32.powi(-25);
                        let near = got.iter().zip(want).all(|(a, b)| (a - b).abs() <= bound);
                        assert!(near, "{got:?} instead of {want:?}");
                    }
                }
                let untouched = pages.head::<i8>(place.page, &first, kv_head);
                assert!(untouched.k_scales.iter().chain(untouched.v_scales).all(|scale| scale.is_nan()));
            }
        }
        all.push([0, 1].map(|page| pages.read(page).unwrap()));
    }
    assert!(all.iter().all(|pages| *pages == all[0]), "levels differ");
}

#[test]
fn a_group_with_a_value_that_is_not_finite_is_not_a_number() {
    let states = [State::Kv { heads: 1, head_dim: 64 }];
    for (_, level) in levels() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut pages = KvPool::new(&states, KvType::Int8, 1).unwrap();
            let layout = pages.layout(StateId(0));
            pages.materialise(0).unwrap();
            let (mut key, value) = (vec![1.0; 64], vec![2.0; 64]);
            key[40] = bad;
            let places = [KvPlace { page: 0, token: 3 }];
            pages.write(&mut Pool::new(1).unwrap(), false, level, layout, &places, |_, _| [&key, &value]);
            let [key, value] = decoded(&pages.head::<i8>(0, &layout, 0), 3, 64);
            let close = |values: &[f32], want: f32| values.iter().all(|x| (x - want).abs() < 2e-3);
            assert!(close(&key[..32], 1.0) && close(&value, 2.0), "{bad}: {key:?} {value:?}");
            assert!(key[32..].iter().all(|x| x.is_nan()), "{bad}: {key:?}");
        }
    }
}

#[test]
fn codes_take_little_more_than_half_the_memory_of_f16() {
    let states = [State::Kv { heads: 8, head_dim: 128 }; 32];
    assert_eq!([KvType::F16, KvType::Int8].map(|kv| page_bytes(&states, kv)), [4 << 20, (4 << 20) / 32 * 17]);
}

#[test]
fn pages_take_memory_from_first_use_until_release() {
    let mut pages = KvPool::new(&STATES, KvType::F16, 2).unwrap();
    // 2 states, 2 heads, 32 tokens, 20 + 32 values of 2 bytes, rounded to whole kernel pages.
    let values = 2 * 2 * 32 * 52 * 2_u64;
    let whole = values.next_multiple_of(rustix::param::page_size() as u64);
    assert_eq!((pages.bytes(), pages.page_bytes()), (0, whole));
    assert_eq!(page_bytes(&STATES, KvType::F16), whole);
    pages.materialise(1).unwrap();
    pages.materialise(1).unwrap();
    assert_eq!(pages.bytes(), pages.page_bytes());
    assert!(pages.is_used(1) && !pages.is_used(0) && !pages.is_used(7));
    assert!(matches!(pages.materialise(2), Err(BackendError::Batch(_))));
    for page in [0, 1, 1, 7] {
        pages.release(page);
    }
    assert_eq!(pages.bytes(), 0);
}

#[test]
fn counted_bytes_are_those_that_the_kernel_gives() {
    // Heads of 2 values: V rows of 16, and 2304 bytes per page, which takes a whole kernel page.
    let tiny = [State::Kv { heads: 2, head_dim: 2 }];
    for kv in [KvType::F16, KvType::F32] {
        let mut pool = KvPool::new(&tiny, kv, u32::MAX).unwrap();
        pool.materialise(0).unwrap();
        let mapping = pool.pages[0].as_ref().unwrap();
        assert_eq!(mapping.len() as u64, page_bytes(&tiny, kv));
        assert!(mapping.len().is_multiple_of(rustix::param::page_size()));
        assert!(mapping.len() >= 2 * 32 * (2 + 16) * element_bytes(kv));
    }
}

#[test]
fn a_pool_of_millions_of_pages_has_a_table_of_those_in_use() {
    let mut pool = KvPool::new(&STATES, KvType::F16, u32::MAX).unwrap();
    assert_eq!(pool.pages.capacity(), 0);
    pool.materialise(3).unwrap();
    assert_eq!((pool.pages.len(), pool.bytes()), (4, pool.page_bytes()));
    assert!(pool.is_used(3) && !pool.is_used(0) && !pool.is_used(1 << 30));
    pool.release(1 << 30);
    pool.release(3);
    assert_eq!(pool.bytes(), 0);
}

#[test]
fn pages_beyond_the_address_space_are_refused() {
    let huge = [State::Kv { heads: u32::MAX, head_dim: u32::MAX }];
    assert!(matches!(KvPool::new(&huge, KvType::F16, 1), Err(BackendError::OutOfMemory { .. })));
    assert_eq!(page_bytes(&huge, KvType::F16), u64::MAX);
    let large = [State::Kv { heads: 1 << 31, head_dim: 1 << 16 }];
    let mut pages = KvPool::new(&large, KvType::F16, 1).unwrap();
    assert!(matches!(pages.materialise(0), Err(BackendError::OutOfMemory { .. })));
    assert_eq!(pages.bytes(), 0);
}
