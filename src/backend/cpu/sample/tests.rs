use std::sync::Arc;

use super::super::simd::tests::levels;
use super::*;

fn plain() -> SampleRow {
    SampleRow {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 1,
        position: 0,
        top_logprobs: 0,
        changes: None,
        mask: None,
        chain: None,
    }
}

fn one(logits: &[f32], row: &SampleRow) -> Sampled {
    let mut results = levels()
        .into_iter()
        .map(|(_, level)| sample(level, logits, row, &mut SampleScratch::default()).unwrap())
        .collect::<Vec<_>>();
    assert!(results.windows(2).all(|w| w[0] == w[1]), "instruction sets differ: {results:?}");
    results.remove(0)
}

/// Logits of a vocabulary larger than a chunk: the interesting ones spread over it, the rest far below.
fn spread(values: &[f32]) -> Vec<f32> {
    let mut logits = vec![-60.0; 3000];
    for (i, &value) in values.iter().enumerate() {
        logits[(i * 733 + 11) % 3000] = value;
    }
    logits
}

/// The exact distribution after the chain, computed in f64 by sorting everything.
fn expected(logits: &[f32], row: &SampleRow) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if row.top_k > 0 {
        order.truncate(row.top_k as usize);
    }
    let p = |t: f64, i: usize| (f64::from(logits[i]) / t).exp();
    if row.top_p < 1.0 {
        let total: f64 = order.iter().map(|&i| p(1.0, i)).sum();
        let mut sum = 0.0;
        let last = order.iter().position(|&i| {
            sum += p(1.0, i) / total;
            sum >= f64::from(row.top_p)
        });
        order.truncate(last.map_or(order.len(), |l| l + 1));
    }
    let best = p(1.0, order[0]);
    order.retain(|&i| p(1.0, i) / best >= f64::from(row.min_p));
    let total: f64 = order.iter().map(|&i| p(f64::from(row.temperature), i)).sum();
    let mut out = vec![0.0; logits.len()];
    for i in order {
        out[i] = p(f64::from(row.temperature), i) / total;
    }
    out
}

fn check_frequencies(logits: &[f32], row: &SampleRow) {
    const DRAWS: u32 = 20_000;
    let (_, level) = *levels().last().unwrap();
    let mut counts = vec![0u32; logits.len()];
    let mut scratch = SampleScratch::default();
    for position in 0..DRAWS {
        let row = SampleRow { position, ..row.clone() };
        counts[sample(level, logits, &row, &mut scratch).unwrap().id as usize] += 1;
    }
    for (id, (count, p)) in counts.into_iter().zip(expected(logits, row)).enumerate() {
        let n = f64::from(DRAWS);
        let sigma = (n * p * (1.0 - p)).sqrt();
        assert!(
            (f64::from(count) - n * p).abs() <= 4.0 * sigma + 1e-9,
            "{row:?}: token {id}: {count}, p {p}"
        );
    }
}

#[test]
fn frequencies_are_those_of_the_exact_distribution() {
    let logits = spread(&[3.0, 2.5, 2.5, 1.0, 0.0, -1.0, 2.0, -3.0]);
    for seed in [7, 8] {
        let base = SampleRow { seed, ..plain() };
        check_frequencies(&logits, &base);
        check_frequencies(&logits, &SampleRow { temperature: 0.5, ..base.clone() });
        check_frequencies(&logits, &SampleRow { temperature: 2.0, top_k: 5, ..base.clone() });
        check_frequencies(&logits, &SampleRow { top_p: 0.8, ..base.clone() });
        check_frequencies(&logits, &SampleRow { min_p: 0.2, ..base.clone() });
        check_frequencies(
            &logits,
            &SampleRow { top_k: 6, top_p: 0.9, min_p: 0.05, temperature: 0.8, ..base },
        );
    }
}

#[test]
fn a_flat_distribution_is_drawn_whole() {
    // 20,000 draws of 64 tokens: 312 draws each.
    check_frequencies(&[0.25; 64], &plain());
    check_frequencies(&[0.25; 64], &SampleRow { top_p: 0.5, ..plain() });
    let wide = vec![0.0; 5000];
    let mut candidates = Vec::new();
    select_nucleus(&wide, 0.0, 2500.0, &mut candidates);
    assert_eq!(candidates.len(), 2500);
    assert!(candidates.iter().zip(0..).all(|(c, id)| c.id == id), "equals rank by id");
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    let mut logits = spread(&[1.0, 5.0, 5.0]);
    let (a, b) = (11 + 733, 11 + 2 * 733);
    for temperature in [0.0, -1.0, f32::NAN] {
        let row = SampleRow { temperature, ..plain() };
        assert_eq!(one(&logits, &row).id, a);
    }
    logits[b as usize] = 5.5;
    assert_eq!(one(&logits, &SampleRow { temperature: 0.0, ..plain() }).id, b);
    assert_eq!(one(&logits, &SampleRow { top_k: 1, temperature: 9.0, ..plain() }).id, b);
}

#[test]
fn edge_settings_keep_the_most_likely_token() {
    let logits = spread(&[2.0, 1.9, 1.8]);
    for row in [
        SampleRow { top_p: 0.0, ..plain() },
        SampleRow { top_p: -1.0, ..plain() },
        SampleRow { min_p: 1.0, ..plain() },
        SampleRow { min_p: 7.0, ..plain() },
        SampleRow { temperature: 1e-30, ..plain() },
        SampleRow { temperature: 1e-45, ..plain() },
        SampleRow { temperature: 1e-30, top_k: 3, ..plain() },
        SampleRow { top_k: 1, top_p: 0.5, min_p: 0.5, ..plain() },
    ] {
        for position in 0..20 {
            assert_eq!(one(&logits, &SampleRow { position, ..row.clone() }).id, 11, "{row:?}");
        }
    }
    // Settings that restrict nothing: NaN, or more than all tokens.
    check_frequencies(&[0.0, 1.0], &SampleRow { top_k: u32::MAX, top_p: f32::INFINITY, ..plain() });
    assert!(one(&logits, &SampleRow { temperature: f32::INFINITY, ..plain() }).id < 3000);
    assert_eq!(one(&[3.5], &plain()).id, 0);
}

#[test]
fn seed_and_position_decide_the_draw() {
    let logits = [0.0; 1000];
    let id = |seed, position| one(&logits, &SampleRow { seed, position, ..plain() }).id;
    assert_eq!(id(5, 9), id(5, 9));
    let ids: std::collections::HashSet<u32> = (0..50).flat_map(|i| [id(5, i), id(i.into(), 5)]).collect();
    // 99 pairs of 1000 tokens: 94 distinct ones are expected; 80 or fewer has odds below 1e-8.
    assert!(ids.len() > 80, "{}", ids.len());
}

#[test]
fn uniform_numbers_fill_the_unit_interval() {
    let n = 100_000;
    let mut bins = [0u32; 100];
    for i in 0..n {
        bins[(uniform(u64::from(i % 317), i / 317) * 100.0) as usize] += 1;
    }
    let expect = f64::from(n) / 100.0;
    let chi2: f64 = bins.iter().map(|&b| (f64::from(b) - expect).powi(2) / expect).sum();
    // 99 degrees of freedom: above 160 or below 55 has odds below 1e-4. The numbers are fixed, so the test is
    // deterministic.
    assert!((55.0..160.0).contains(&chi2), "{chi2}");
}

#[test]
fn log_probabilities_are_of_the_untouched_distribution() {
    let logits = spread(&[2.0, 1.0, 3.0, 1.0]);
    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
    let row = SampleRow { temperature: 0.3, top_k: 2, top_logprobs: 4, ..plain() };
    let drawn = one(&logits, &row);
    let ids: Vec<u32> = drawn.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, [11 + 2 * 733, 11, 11 + 733, 11 + 3 * 733], "falling, equals by id");
    for (id, logprob) in drawn.top.iter().copied().chain([(drawn.id, drawn.logprob)]) {
        let want = f64::from(logits[id as usize]) - total;
        // exp has an error of 2^-22; the result is rounded.
        assert!((f64::from(logprob) - want).abs() < 1e-6, "{id}: {logprob} {want}");
    }
    let all = SampleRow { top_logprobs: u32::MAX, ..plain() };
    assert_eq!(one(&[1.0, 2.0], &all).top.len(), 2);
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = spread(&[1.0]);
        logits[2999] = bad;
        for (_, level) in levels() {
            let got = sample(level, &logits, &plain(), &mut SampleScratch::default());
            assert!(matches!(got, Err(BackendError::NotFinite)), "{bad}");
        }
    }
    let (_, level) = levels()[0];
    assert!(matches!(
        sample(level, &[], &plain(), &mut SampleScratch::default()),
        Err(BackendError::NotFinite)
    ));
}

/// The distribution over allowed tokens after changes, computed in f64 from the formulas.
fn check_changed(logits: &[f32], row: &SampleRow) {
    const DRAWS: u32 = 3_000;
    let mut changed: Vec<f32> = logits.to_vec();
    for change in row.changes.iter().flat_map(|all| all.iter()) {
        let biased = f64::from(logits[change.id as usize]) + f64::from(change.bias);
        let repeat = f64::from(change.repeat);
        let scaled = if biased > 0.0 { biased / repeat } else { biased * repeat };
        changed[change.id as usize] = (scaled - f64::from(change.less)) as f32;
    }
    // Masked tokens are left out: a smaller vocabulary, with the same ranks.
    let allowed: Vec<usize> =
        (0..logits.len()).filter(|id| row.mask.as_ref().is_none_or(|mask| mask.allows(*id as u32))).collect();
    let small: Vec<f32> = allowed.iter().map(|id| changed[*id]).collect();
    let want = expected(&small, row);
    let mut counts = vec![0u32; logits.len()];
    let (_, level) = *levels().last().unwrap();
    let mut scratch = SampleScratch::default();
    for position in 0..DRAWS {
        let drawn = sample(level, logits, &SampleRow { position, ..row.clone() }, &mut scratch).unwrap();
        counts[drawn.id as usize] += 1;
    }
    for (id, count) in counts.iter().enumerate() {
        let p = allowed.iter().position(|of| *of == id).map_or(0.0, |at| want[at]);
        let (mean, spread) = (p * f64::from(DRAWS), (p * (1.0 - p) * f64::from(DRAWS)).sqrt());
        let off = (f64::from(*count) - mean).abs();
        assert!(off <= 5.0 * spread + 1e-9, "token {id}: drawn {count} times instead of {mean}, {row:?}");
    }
}

#[test]
fn changed_and_masked_logits_are_drawn_as_if_others_were_not_there() {
    let logits = spread(&[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]);
    let ids: Vec<u32> = (0..8).map(|i| (i * 733 + 11) % 3000).collect();
    let change = |at: usize, bias, repeat, less| LogitChange { id: ids[at], bias, repeat, less };
    let changes: Arc<[LogitChange]> = [
        change(0, 0.0, 1.5, 0.5),
        change(4, 2.5, 1.0, 0.0),
        change(6, 0.0, 0.5, -1.0),
        change(7, -1.0, 2.0, 0.25),
    ]
    .into();
    let mask = |allowed: &[usize]| {
        let mut words = vec![0u32; 94];
        allowed.iter().for_each(|at| words[ids[*at] as usize / 32] |= 1 << (ids[*at] % 32));
        Some(Arc::new(TokenMask::new(words)))
    };
    for mask in [None, mask(&[1, 4, 6, 7]), mask(&[7]), mask(&[0, 1, 2, 3, 4, 5, 6, 7])] {
        for changes in [None, Some(Arc::clone(&changes))] {
            let base = SampleRow { changes, mask: mask.clone(), ..plain() };
            check_changed(&logits, &base);
            check_changed(&logits, &SampleRow { top_k: 3, ..base.clone() });
            check_changed(&logits, &SampleRow { top_k: 1000, temperature: 2.0, ..base.clone() });
            check_changed(&logits, &SampleRow { top_p: 0.8, ..base.clone() });
            check_changed(&logits, &SampleRow { min_p: 0.2, temperature: 0.7, ..base });
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_unchanged_logits() {
    let logits = spread(&[3.0, 2.0, 1.0]);
    let plain = SampleRow { top_logprobs: 3, temperature: 0.0, ..plain() };
    let told = one(&logits, &plain);
    let last = told.top[2].0;
    let mut words = vec![0; 94];
    words[last as usize / 32] = 1 << (last % 32);
    let change = LogitChange { id: last, bias: 50.0, repeat: 1.0, less: 0.0 };
    for row in [
        SampleRow { mask: Some(Arc::new(TokenMask::new(words))), ..plain.clone() },
        SampleRow { changes: Some([change].into()), ..plain.clone() },
    ] {
        let other = one(&logits, &row);
        assert_eq!((other.id, other.logprob, &other.top), (last, told.top[2].1, &told.top));
    }
}

#[test]
fn a_broken_logit_is_told_although_it_may_not_be_drawn() {
    let mut logits = spread(&[1.0]);
    logits[5] = f32::NAN;
    let row = SampleRow { mask: Some(Arc::new(TokenMask::new([1 << 11]))), ..plain() };
    let (_, level) = levels()[0];
    let drawn = sample(level, &logits, &row, &mut SampleScratch::default());
    assert!(matches!(drawn, Err(BackendError::NotFinite)));
}

#[test]
fn rows_drawn_by_several_threads_are_those_drawn_one_by_one() {
    let (_, level) = *levels().last().unwrap();
    let logits: Vec<Vec<f32>> = (0..35).map(|row| spread(&[1.0, row as f32 / 9.0, 2.0, 0.5])).collect();
    let mut logits: Vec<&[f32]> = logits.iter().map(Vec::as_slice).collect();
    logits[5] = &[f32::NAN];
    let mask = Arc::new(TokenMask::new(vec![0x1234_5678; 94]));
    let rows: Vec<SampleRow> = (0..35)
        .map(|row| SampleRow {
            seed: row,
            top_logprobs: row as u32 % 3,
            mask: (row % 2 == 0).then(|| Arc::clone(&mask)),
            ..plain()
        })
        .collect();
    let one_by_one: Vec<_> = logits
        .iter()
        .zip(&rows)
        .map(|(logits, row)| sample(level, logits, row, &mut SampleScratch::default()).ok())
        .collect();
    assert!(one_by_one[5].is_none() && one_by_one.iter().flatten().count() == 34);
    for threads in [1, 3, 12] {
        let (mut pool, mut samplers) = (Pool::new(threads).unwrap(), Vec::new());
        for count in [35, 0, 1, 7, 8, 9, 35] {
            let drawn = sample_rows(level, &mut pool, &logits[..count], &rows[..count], &mut samplers);
            let drawn: Vec<_> = drawn.into_iter().map(Result::ok).collect();
            assert_eq!(drawn, one_by_one[..count], "{count} rows, {threads} threads");
        }
    }
}
