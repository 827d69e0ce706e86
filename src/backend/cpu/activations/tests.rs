use super::*;
use proptest::prelude::*;

fn quantized(isa: Isa, values: &[f32]) -> ActivationBuffer {
    let mut buffer = ActivationBuffer::new();
    buffer.reset(1, values.len());
    let mut row = buffer.row_mut(0).unwrap();
    row.values_mut().copy_from_slice(values);
    row.quantize(Kernels::new(isa).unwrap(), FINE_ABOVE);
    buffer
}

/// All planes as bits, one after the other; every NaN counts as equal.
fn bits(buffer: &ActivationBuffer) -> Vec<i64> {
    let view = buffer.view();
    let float = |v: &f32| if v.is_nan() { -1 } else { i64::from(v.to_bits()) };
    let mut bits: Vec<i64> = view.scaled_sums.iter().map(float).collect();
    for plane in [view.coarse, view.fine] {
        bits.extend(plane.codes.iter().map(|&c| i64::from(c)));
        bits.extend(plane.offsets.iter().map(|&o| i64::from(o)));
        bits.extend(plane.scales.iter().map(float));
    }
    bits
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn codes_scales_and_sums_are_what_the_format_says() {
    let mut values = vec![0.0f32; 96];
    values[..32].iter_mut().enumerate().for_each(|(i, v)| *v = 10.0 * (i as f32 - 12.7));
    values[32] = -254.0; // scale 2: codes are halves, ties to even
    values[33] = 1.0;
    values[34] = 3.0;
    values[35] = 5.0;
    for isa in available() {
        let buffer = quantized(isa, &values);
        let view = buffer.view();
        let coarse = view.coarse;
        assert_eq!(coarse.scales, [183.0 / 127.0, 2.0, 0.0]);
        assert_eq!(coarse.codes[31], 127);
        assert_eq!(coarse.codes[32..36], [-127, 0, 2, 2]);
        assert!(coarse.codes[64..].iter().all(|&c| c == 0));
        for (half, offset) in coarse.codes.chunks(16).zip(coarse.offsets) {
            assert_eq!(*offset, -128 * half.iter().map(|&c| i32::from(c)).sum::<i32>());
        }
        assert_eq!(view.scaled_sums[1], 2.0 * -123.0);
        assert!(view.fine.codes.iter().all(|&c| c == 0), "no group stands out");
        assert!(view.fine.scales.iter().all(|&s| s == 0.0) && view.fine.offsets.iter().all(|&o| o == 0));
    }
}

#[test]
fn groups_with_outliers_have_fine_codes() {
    // Magnitudes 1, 1, 1, 1 and 254: the mean is 51.6.
    let mut values: Vec<f32> = (0..160).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    values[128..].fill(0.0);
    values[130] = 254.0; // scale 2
    values[131] = 1.0; // half a step: code 0, 127 fine steps of 1/127
    values[132] = 3.0; // a step and a half: code 2
    values[150] = 0.5;
    for isa in available() {
        let buffer = quantized(isa, &values);
        let view = buffer.view();
        assert_eq!(view.fine.scales, [0.0, 0.0, 0.0, 0.0, 2.0 / 254.0]);
        assert!(view.fine.codes[..128].iter().all(|&c| c == 0));
        assert_eq!(view.coarse.codes[130..133], [127, 0, 2]);
        assert_eq!(view.fine.codes[130..133], [0, 127, -127]);
        assert_eq!(view.fine.codes[150], 64); // 63.5, to even
        assert_eq!(view.fine.offsets[8..], [0, -128 * 64]);
        assert_eq!(view.scaled_sums[4], 2.0 * 129.0 + 2.0 / 254.0 * 64.0);
        for (k, value) in values.iter().enumerate() {
            let off = view.decoded(0, k) - f64::from(*value);
            assert!(off.abs() <= if k < 128 { 0.5 / 127.0 } else { 0.51 / 127.0 }, "{k}: off {off}");
        }
    }
}

#[test]
fn all_groups_have_fine_codes_where_that_is_asked_for() {
    let values: Vec<f32> = (0..96).map(|i| if i < 64 { i as f32 * 0.37 } else { 0.0 }).collect();
    for isa in available() {
        let mut buffer = ActivationBuffer::new();
        buffer.reset(1, values.len());
        let mut row = buffer.row_mut(0).unwrap();
        row.values_mut().copy_from_slice(&values);
        row.quantize(Kernels::new(isa).unwrap(), FINE_ALL);
        let view = buffer.view();
        let want: Vec<f32> = view.coarse.scales.iter().map(|scale| scale / 254.0).collect();
        assert!(want[0] > 0.0 && want[1] > 0.0 && want[2] == 0.0);
        assert_eq!(view.fine.scales, want);
        for (k, value) in values.iter().enumerate() {
            assert!((view.decoded(0, k) - f64::from(*value)).abs() <= 0.51 * f64::from(want[k / 32]), "{k}");
        }
    }
}

#[test]
fn rows_pad_with_zeros() {
    let mut buffer = ActivationBuffer::new();
    buffer.reset(4, 96); // dirties what will be padding
    for mut row in buffer.rows_mut() {
        row.values_mut().fill(9.0);
    }
    buffer.reset(3, 70);
    for isa in available() {
        for (m, mut row) in buffer.rows_mut().enumerate() {
            assert_eq!(row.values_mut().len(), 70);
            row.values_mut().fill(m as f32 + 1.0);
            row.quantize(Kernels::new(isa).unwrap(), FINE_ABOVE);
        }
        let view = buffer.view();
        for m in 0..3 {
            let (codes, offsets) = (&view.coarse.codes[96 * m..][..96], &view.coarse.offsets[6 * m..][..6]);
            assert!(codes[..70].iter().all(|&c| c == 127) && codes[70..].iter().all(|&c| c == 0));
            assert_eq!(offsets, [16, 16, 16, 16, 6, 0].map(|n| -128 * 127 * n));
        }
    }
}

#[test]
fn values_that_are_no_numbers_give_a_nan_scale_and_spoil_only_their_group() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0; 64];
        values[40] = bad;
        for isa in available() {
            let buffer = quantized(isa, &values);
            let view = buffer.view();
            assert_eq!(view.coarse.scales[0], 1.0 / 127.0);
            assert!(view.coarse.scales[1].is_nan() && view.scaled_sums[1].is_nan());
            assert!(view.coarse.codes[32..].iter().all(|&c| c == 0));
            assert!(view.fine.scales.iter().all(|&s| s == 0.0));
        }
    }
}

proptest! {
    #[test]
    fn every_instruction_set_gives_the_same_bits(
        seed in any::<[u32; 8]>(), groups in 1usize..9, extreme in prop::bool::ANY, outlier in any::<usize>(),
    ) {
        let mut state = seed;
        let mut values: Vec<f32> = (0..groups * 32).map(|i| {
            let s = &mut state[i % 8];
            *s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // All bit patterns, or magnitudes of an activation.
            if extreme { f32::from_bits(*s) } else { (*s as f32 / u32::MAX as f32 - 0.5) * 8.0 }
        }).collect();
        values[outlier % (groups * 32)] *= 30.0;
        let want = bits(&quantized(Isa::Portable, &values));
        for isa in available() {
            prop_assert_eq!(&bits(&quantized(isa, &values)), &want, "{}", isa);
        }
    }

    #[test]
    fn decoded_codes_are_within_half_a_step(
        mut values in prop::collection::vec(-1e30f32..1e30, 128), outlier in 0usize..128, times in 1f32..100.0,
    ) {
        values[outlier] *= times;
        let buffer = quantized(Isa::Portable, &values);
        let view = buffer.view();
        for (k, &v) in values.iter().enumerate() {
            let [coarse, fine] = [view.coarse, view.fine].map(|plane| f64::from(plane.scales[k / 32]));
            // Half a step, and the error of rounding up to 127 steps to f32.
            let step = if fine > 0.0 { 0.501 * fine + 2e-5 * coarse } else { 0.5001 * coarse };
            prop_assert!((f64::from(v) - view.decoded(0, k)).abs() <= step);
        }
    }
}
