use super::*;
use proptest::prelude::*;

fn quantized(isa: Isa, values: &[f32]) -> ActivationBuffer {
    let mut buffer = ActivationBuffer::new();
    buffer.reset(1, values.len());
    let mut row = buffer.row_mut(0).unwrap();
    row.values_mut().copy_from_slice(values);
    row.quantize(Kernels::new(isa).unwrap());
    buffer
}

/// All planes as bits, one after the other; every NaN counts as the same one.
fn bits(buffer: &ActivationBuffer) -> Vec<i64> {
    let view = buffer.view();
    let float = |v: &f32| if v.is_nan() { -1 } else { i64::from(v.to_bits()) };
    let codes = view.codes.iter().map(|&c| i64::from(c));
    let sums = view.sums.iter().map(|&s| i64::from(s));
    let offsets = view.offsets.iter().map(|&o| i64::from(o));
    let scales = view.scales.iter().chain(view.scaled_sums).map(float);
    codes.chain(sums).chain(offsets).chain(scales).collect()
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn codes_scales_and_sums_are_what_the_format_says() {
    let mut values = vec![0.0f32; 96];
    values[..32].iter_mut().enumerate().for_each(|(i, v)| *v = i as f32 - 12.7);
    values[32] = -254.0; // scale 2: codes are halves, ties to even
    values[33] = 1.0;
    values[34] = 3.0;
    values[35] = 5.0;
    for isa in available() {
        let buffer = quantized(isa, &values);
        let view = buffer.view();
        assert_eq!(view.scales(0), [18.3 / 127.0, 2.0, 0.0]);
        assert_eq!(view.codes(0)[31], 127);
        assert_eq!(view.codes(0)[32..36], [-127, 0, 2, 2]);
        assert!(view.codes(0)[64..].iter().all(|&c| c == 0));
        for (h, sum) in view.sums(0).iter().enumerate() {
            let want: i16 = view.codes(0)[16 * h..][..16].iter().map(|&c| i16::from(c)).sum();
            assert_eq!((*sum, view.offsets[h]), (want, -128 * i32::from(want)));
        }
        assert_eq!(view.scaled_sums(0)[1], 2.0 * -123.0);
    }
}

#[test]
fn rows_pad_with_zeros_and_splits_cover_the_row() {
    let mut buffer = ActivationBuffer::new();
    buffer.reset(4, 96); // dirties what will be padding
    for mut row in buffer.rows_mut() {
        row.values_mut().fill(9.0);
    }
    buffer.reset(3, 70);
    for isa in available() {
        for (m, row) in buffer.rows_mut().enumerate() {
            let (mut left, mut right) = row.split_at(40);
            assert_eq!((left.values_mut().len(), right.values_mut().len()), (32, 38));
            left.values_mut().fill(m as f32 + 1.0);
            right.values_mut().fill(2.0);
            left.quantize(Kernels::new(isa).unwrap());
            right.quantize(Kernels::new(isa).unwrap());
        }
        let view = buffer.view();
        for m in 0..3 {
            assert_eq!(view.values(m)[31..34], [m as f32 + 1.0, 2.0, 2.0]);
            assert!(
                view.codes(m)[..70].iter().all(|&c| c == 127) && view.codes(m)[70..].iter().all(|&c| c == 0)
            );
            assert_eq!(view.sums(m), [127 * 16, 127 * 16, 127 * 16, 127 * 16, 127 * 6, 0]);
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
            assert_eq!(buffer.view().scales(0)[0], 1.0 / 127.0);
            assert!(buffer.view().scales(0)[1].is_nan() && buffer.view().scaled_sums(0)[1].is_nan());
            assert!(buffer.view().codes(0)[32..].iter().all(|&c| c == 0));
        }
    }
}

proptest! {
    #[test]
    fn every_instruction_set_gives_the_same_bits(
        seed in any::<[u32; 8]>(), groups in 1usize..6, extreme in prop::bool::ANY,
    ) {
        let mut state = seed;
        let values: Vec<f32> = (0..groups * 32).map(|i| {
            let s = &mut state[i % 8];
            *s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // All bit patterns, or magnitudes of an activation.
            if extreme { f32::from_bits(*s) } else { (*s as f32 / u32::MAX as f32 - 0.5) * 8.0 }
        }).collect();
        let want = bits(&quantized(Isa::Portable, &values));
        for isa in available() {
            prop_assert_eq!(&bits(&quantized(isa, &values)), &want, "{}", isa);
        }
    }

    #[test]
    fn decoded_codes_are_within_half_a_step(values in prop::collection::vec(-1e30f32..1e30, 32)) {
        let buffer = quantized(Isa::Portable, &values);
        let scale = buffer.view().scales(0)[0];
        for (&v, &c) in values.iter().zip(buffer.view().codes(0)) {
            prop_assert!((v - scale * f32::from(c)).abs() <= 0.5001 * scale);
        }
    }
}
