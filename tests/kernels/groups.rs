//! The choice of experts among the best groups.

use rocmforge::backend::hip::kernels::experts::RouteGroups;
use rocmforge::backend::hip::{DevicePtr, Grid};

use crate::random::Random;
use crate::rig::{Rig, rig};

/// Sums of groups and chances that differ by less may be in either order.
const NEAR: f64 = 1e-5;

/// Experts, groups, chosen groups, and chosen experts; how chances and weights are made.
#[derive(Clone, Copy, Debug)]
struct Choice {
    count: usize,
    groups: usize,
    groups_used: usize,
    used: usize,
    sigmoid: bool,
    biased: bool,
    normalise: bool,
}

const fn choice([count, groups, groups_used, used]: [usize; 4], flags: [bool; 3]) -> Choice {
    let [sigmoid, biased, normalise] = flags;
    Choice { count, groups, groups_used, used, sigmoid, biased, normalise }
}

const SCALE: f32 = 2.5;

/// Experts and weights of each row that a launch wrote, and whether one of the experts is absent.
struct Chosen {
    experts: Vec<u32>,
    weights: Vec<f32>,
    absent: u32,
}

impl Choice {
    fn run(&self, rig: &Rig, logits: &[f32], bias: &[f32], sequences: &[u32], addresses: &[u64]) -> Chosen {
        let rows = sequences.len();
        let added = self.biased.then(|| rig.upload(bias));
        let (input, row_seq, table) = (rig.upload(logits), rig.upload(sequences), rig.upload(addresses));
        let absent = rig.upload(&[0u32]);
        let (experts, weights) = (rig.output::<u32>(rows * self.used), rig.output::<f32>(rows * self.used));
        let arguments = RouteGroups {
            logits: input.ptr(),
            bias: added.as_ref().map_or(DevicePtr::NULL, |bias| bias.ptr()),
            row_seq: row_seq.ptr(),
            table: table.ptr(),
            experts: experts.ptr(),
            weights: weights.ptr(),
            absent: absent.ptr(),
            scale: SCALE,
            rows: rows as u32,
            count: self.count as u32,
            used: self.used as u32,
            normalise: self.normalise.into(),
            sigmoid: self.sigmoid.into(),
            groups: self.groups as u32,
            groups_used: self.groups_used as u32,
        };
        let grid = Grid::x(rows as u32);
        rig.device.launch(&rig.stream, RouteGroups::route_groups, grid, &arguments).unwrap();
        Chosen {
            experts: rig.download(&experts),
            weights: rig.download(&weights),
            absent: rig.download::<u32>(&absent)[0],
        }
    }

    /// The chance of each expert.
    fn chances(&self, logits: &[f32]) -> Vec<f64> {
        let most = logits.iter().copied().fold(f32::MIN, f32::max);
        let sigmoid = |logit: &f32| 1.0 / (1.0 + (-f64::from(*logit)).exp());
        let power = |logit: &f32| f64::from(logit - most).exp();
        if self.sigmoid {
            return logits.iter().map(sigmoid).collect();
        }
        let all: f64 = logits.iter().map(power).sum();
        logits.iter().map(|logit| power(logit) / all).collect()
    }

    /// The best groups, and the distance between the sums of the last of them and the next.
    fn best_groups(&self, sizes: &[f64]) -> (Vec<usize>, f64) {
        let total = |group: &[f64]| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            sorted[0] + sorted[1]
        };
        let totals: Vec<f64> = sizes.chunks_exact(self.count / self.groups).map(total).collect();
        let mut order: Vec<usize> = (0..self.groups).collect();
        order.sort_by(|&a, &b| totals[b].total_cmp(&totals[a]).then(a.cmp(&b)));
        let next = order.get(self.groups_used).map_or(f64::NEG_INFINITY, |&group| totals[group]);
        let far = totals[order[self.groups_used - 1]] - next;
        (order[..self.groups_used].to_vec(), far)
    }

    /// Compares a row with f64.
    fn check(&self, logits: &[f32], bias: &[f32], experts: &[u32], weights: &[f32]) {
        let chances = self.chances(logits);
        let sizes: Vec<f64> = (0..self.count)
            .map(|expert| chances[expert] + if self.biased { f64::from(bias[expert]) } else { 0.0 })
            .collect();
        let (groups, far) = self.best_groups(&sizes);
        assert!(far > NEAR, "{self:?}: the test's groups are too alike");
        let group_of = |expert: usize| expert / (self.count / self.groups);
        let mut order: Vec<usize> = (0..self.count).filter(|e| groups.contains(&group_of(*e))).collect();
        order.sort_by(|&a, &b| sizes[b].total_cmp(&sizes[a]).then(a.cmp(&b)));
        let total: f64 = match self.normalise {
            true => experts.iter().map(|&expert| chances[expert as usize]).sum(),
            false => 1.0,
        };
        for (place, (&expert, &weight)) in experts.iter().zip(weights).enumerate() {
            let expert = expert as usize;
            assert!(groups.contains(&group_of(expert)), "{self:?}: {expert} is not of groups {groups:?}");
            let near = (sizes[expert] - sizes[order[place]]).abs() < NEAR;
            assert!(expert == order[place] || near, "{self:?} place {place}: {experts:?}");
            let want = chances[expert] / total * f64::from(SCALE);
            assert!((f64::from(weight) / want - 1.0).abs() < 4e-6, "{self:?}: {weight} instead of {want}");
        }
        let mut distinct = experts.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), self.used, "{self:?}: {experts:?}");
    }

    /// Logits of which the best groups are apart.
    fn logits(&self, random: &mut Random, bias: &[f32]) -> Vec<f32> {
        loop {
            let logits = random.normals(self.count);
            let chances = self.chances(&logits);
            let size = |expert: usize| chances[expert] + f64::from(bias[expert]);
            let sizes: Vec<f64> = (0..self.count).map(size).collect();
            if self.best_groups(&sizes).1 > 2.0 * NEAR {
                return logits;
            }
        }
    }
}

const CHOICES: [Choice; 10] = [
    choice([2, 1, 1, 1], [false, false, false]),
    choice([8, 4, 2, 3], [true, true, true]),
    choice([8, 4, 2, 4], [false, false, true]),
    choice([256, 8, 4, 8], [true, true, true]),
    choice([160, 8, 3, 6], [false, false, false]),
    choice([160, 8, 3, 6], [true, false, true]),
    choice([512, 256, 5, 9], [true, true, false]),
    choice([512, 2, 1, 200], [false, true, true]),
    choice([384, 1, 1, 8], [true, true, true]),
    choice([60, 6, 6, 7], [false, true, false]),
];

#[test]
fn experts_of_the_best_groups_are_those_of_f64() {
    let Some(rig) = rig() else { return };
    let random = &mut Random::new();
    for choice in CHOICES {
        let Choice { count, used, .. } = choice;
        // Biases as large as differences of chances.
        let spread = if choice.sigmoid { 0.3 } else { 2.0 / count as f32 };
        let bias: Vec<f32> = match choice.biased {
            true => random.normals(count).iter().map(|bias| bias * spread).collect(),
            false => vec![0.0; count],
        };
        let rows = 9;
        let logits: Vec<f32> = (0..rows).flat_map(|_| choice.logits(random, &bias)).collect();
        // Every fourth row is a padding row; every fifth expert is absent.
        let padding = |row: u32| row % 4 == 3;
        let sequences: Vec<u32> = (0..rows).map(|row| if padding(row) { u32::MAX } else { row }).collect();
        let addresses: Vec<u64> = (0..count).map(|expert| if expert % 5 == 4 { 0 } else { 256 }).collect();
        let Chosen { experts, weights, absent } = choice.run(rig, &logits, &bias, &sequences, &addresses);
        let lacks = |expert: &u32| *expert != u32::MAX && addresses[*expert as usize] == 0;
        assert_eq!(absent, u32::from(experts.iter().any(lacks)), "{choice:?}");
        for (row, logits) in logits.chunks_exact(count).enumerate() {
            let (experts, weights) = (&experts[row * used..][..used], &weights[row * used..][..used]);
            if padding(row as u32) {
                assert!(experts.iter().all(|&expert| expert == u32::MAX), "{experts:?}");
                assert!(weights.iter().all(|&weight| weight == 0.0), "{weights:?}");
                continue;
            }
            choice.check(logits, &bias, experts, weights);
        }
    }
}

/// Equal groups and experts go by their numbers. A NaN counts as the largest, and so does its group.
#[test]
fn equal_groups_go_by_number_and_a_nan_counts_as_the_largest() {
    let Some(rig) = rig() else { return };
    for sigmoid in [false, true] {
        let choice = choice([12, 4, 2, 4], [sigmoid, false, true]);
        // Groups of three: the second and the third are equal, then the first.
        let mut logits = vec![1.0f32, -3.0, 0.5, 1.0, 1.0, -2.0, 1.0, 1.0, -2.0, 0.0, 0.5, 0.5];
        let run = |logits: &[f32]| choice.run(rig, logits, &[], &[0], &[256; 12]);
        let Chosen { experts, weights, absent } = run(&logits);
        assert_eq!((experts.as_slice(), absent), (&[3, 4, 6, 7][..], 0));
        assert!(weights.iter().all(|weight| (weight / (SCALE / 4.0) - 1.0).abs() < 4e-6), "{weights:?}");
        logits[9] = f32::NAN;
        let Chosen { experts, weights, .. } = run(&logits);
        // Chances of a softmax are all NaN then: the lowest numbers are chosen.
        let want = if sigmoid { [9, 3, 4, 10] } else { [0, 1, 2, 3] };
        assert_eq!(experts, want);
        assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
    }
}
