//! Estimates how long a step of a model takes: a fixed time (the weights are read once) and a time for each row.
//!
//! A straight line through the last steps, older ones weigh less. Steps that mix rows of a prompt with answers have a line of
//! their own: between two prompts lie hundreds of steps of answers alone. Pure: callers pass in the times.

use std::time::Duration;

/// Weight that the sums keep with each further step: about the last twenty count.
const KEPT: f64 = 0.95;

/// Weight of a new step in the means of answers alone.
const ANSWERS_KEPT: f64 = 0.2;

/// A step of answers counts at most so many times as long as the mean. A GPU records some steps, which takes 13 ms instead of 4.
/// Prompts that may double the mean were as long for seconds afterwards.
const OUTLIER: f64 = 1.25;

/// The slowest pace: an eighth of the rows.
const PACE_LEAST: f64 = 0.125;

/// A step with a time to keep has at most so many times the rows of earlier ones. On a GPU steps of 16 to 40 rows take the same
/// time, and a line through them says that a thousand do too. Twice the rows took half as long again as they should.
const FURTHER: f64 = 1.5;

/// A step has at most so many times the rows of an earlier one, unless they fit in any case.
const AGAIN: f64 = 2.0;

/// Measurements of one model's steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    all: Line,
    /// Steps with answers and rows of prompts.
    mixed: Line,
    /// How much less than 1 the pace is.
    slower: f64,
    /// Rows and seconds of steps without rows of prompts, as means of the last ones.
    answers: Option<(f64, f64)>,
}

/// Weighted sums over rows and seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    steps: f64,
    rows: f64,
    time: f64,
    rows_rows: f64,
    rows_time: f64,
    /// Most rows of a step; an older step's count for less.
    most: f64,
}

/// An estimate in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// For a step of any size.
    pub fixed: f64,
    /// For each row.
    pub row: f64,
    /// False while all steps had about the same number of rows.
    pub certain: bool,
}

impl Line {
    fn observe(&mut self, rows: u32, time: Duration) {
        let (rows, time) = (f64::from(rows), time.as_secs_f64());
        self.most = rows.max(self.most * KEPT);
        for (sum, term) in [
            (&mut self.steps, 1.0),
            (&mut self.rows, rows),
            (&mut self.time, time),
            (&mut self.rows_rows, rows * rows),
            (&mut self.rows_time, rows * time),
        ] {
            *sum = *sum * KEPT + term;
        }
    }

    /// As [`Cost::estimate`].
    fn estimate(&self) -> Option<Estimate> {
        if self.steps <= 0.0 || self.rows <= 0.0 {
            return None;
        }
        let (rows, time) = (self.rows / self.steps, self.time / self.steps);
        let spread = self.rows_rows / self.steps - rows * rows;
        let together = self.rows_time / self.steps - rows * time;
        let proportional = time / rows;
        // Rows differ by less than a tenth of their mean: a slope would be noise.
        let certain = spread >= 0.01 * rows * rows;
        let row = if certain { (together / spread).clamp(0.0, proportional) } else { proportional };
        Some(Estimate { fixed: (time - row * rows).max(0.0), row, certain })
    }
}

impl Cost {
    /// Records a step.
    pub fn observe(&mut self, rows: u32, time: Duration) {
        self.all.observe(rows, time);
    }

    /// The estimate; `None` before the first step. While all steps had the same number of rows, all time counts as the
    /// rows' own. So the next step is rather too small than too large.
    pub fn estimate(&self) -> Option<Estimate> {
        self.all.estimate()
    }

    /// Most rows of a step in `time`, in seconds, as far as earlier steps tell. Of many small steps the times differ more by chance
    /// than by their rows. A line through them once said that 256 rows take 40 ms, which took 1.4 s. Twice the rows of an earlier
    /// step are tried, and those that would fit if all time were the rows' own.
    pub fn rows_tried(&self, time: f64) -> u32 {
        let known = AGAIN * self.all.most;
        let proportional = time * self.all.rows / self.all.time.max(1e-9);
        known.max(proportional).min(f64::from(u32::MAX)) as u32
    }

    /// Most rows of a step that has answers and rows of prompts, and this time; `None` before the first step.
    pub fn rows_mixed(&self, goal: Duration) -> Option<u32> {
        let line = if self.mixed.steps > 0.0 { &self.mixed } else { &self.all };
        let e = line.estimate()?;
        let known = (FURTHER * line.most).min(f64::from(u32::MAX)) as u32;
        Some(e.rows_in((goal.as_secs_f64() - e.fixed) * self.pace()).min(known.max(1)))
    }

    /// Records a step that had rows of answers alone.
    pub fn observe_answers(&mut self, rows: u32, time: Duration) {
        let (rows, time) = (f64::from(rows), time.as_secs_f64());
        let (mean_rows, mean_time) = self.answers.unwrap_or((rows, time));
        let time = time.min(OUTLIER * mean_time * (rows / mean_rows.max(1.0)).max(1.0));
        let towards = |mean: f64, new: f64| mean + (new - mean) * ANSWERS_KEPT;
        self.answers = Some((towards(mean_rows, rows), towards(mean_time, time)));
    }

    /// Seconds of a step with so many rows of answers alone: measured while no prompt came in. The line through all steps
    /// says more after rows that were dearer than others.
    pub fn answers(&self, rows: u32) -> Option<f64> {
        let (mean_rows, mean_time) = self.answers?;
        Some(mean_time * (f64::from(rows) / mean_rows.max(1.0)).max(1.0))
    }

    /// Records a step that had a time to keep, also for its pace.
    pub fn observe_mixed(&mut self, rows: u32, goal: Duration, time: Duration) {
        self.mixed.observe(rows, time);
        self.keep_pace(goal, time);
    }

    /// Corrects the pace: by the third root, so that one late step counts little.
    fn keep_pace(&mut self, goal: Duration, time: Duration) {
        let kept = goal.as_secs_f64() / time.as_secs_f64().max(1e-9);
        let pace = self.pace() * kept.clamp(0.25, 4.0).cbrt();
        self.slower = 1.0 - pace.clamp(PACE_LEAST, 1.0);
    }

    /// The part of the estimated rows that steps with a time to keep should have: [`PACE_LEAST`] to 1.
    pub fn pace(&self) -> f64 {
        1.0 - self.slower
    }
}

impl Estimate {
    /// How many rows fit into `time`, in seconds, beyond the fixed one.
    pub fn rows_within(&self, time: f64) -> u32 {
        (time / self.row.max(1e-9)).min(f64::from(u32::MAX)) as u32
    }

    /// As [`Estimate::rows_within`], at least 1.
    pub fn rows_in(&self, time: f64) -> u32 {
        self.rows_within(time).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_and_followed() {
        let mut cost = Cost::default();
        assert_eq!(cost.estimate(), None);
        let mut observe = |fixed: f64, row: f64, count: u32| {
            for i in 0..count {
                let rows = [1, 2, 1, 16, 1, 5][i as usize % 6];
                cost.observe(rows, Duration::from_secs_f64(fixed + row * f64::from(rows)));
            }
            cost.estimate().unwrap()
        };
        let near = |a: f64, b: f64| (a - b).abs() < 0.02 * b;
        let first = observe(0.010, 0.002, 60);
        assert!(near(first.fixed, 0.010) && near(first.row, 0.002), "{first:?}");
        assert_eq!(first.rows_in(0.05), 25);
        let slower = observe(0.030, 0.004, 200);
        assert!(near(slower.fixed, 0.030) && near(slower.row, 0.004), "{slower:?}");
    }

    #[test]
    fn small_steps_that_differ_by_chance_promise_no_large_one() {
        let mut cost = Cost::default();
        // Five rows take 30 ms, three of them as long.
        for i in 0..200 {
            let (rows, ms) = [(5, 29), (3, 30), (4, 31), (2, 30), (1, 29)][i % 5];
            cost.observe(rows, Duration::from_millis(ms));
        }
        assert!(cost.estimate().unwrap().rows_in(0.040) > 40, "the line alone");
        assert!(cost.rows_tried(0.040) <= 10, "{}", cost.rows_tried(0.040));
        // Larger ones follow in a few steps where they take no longer.
        let larger = (0..8).map(|_| {
            let rows = cost.rows_tried(0.040);
            cost.observe(rows, Duration::from_millis(31));
            rows
        });
        assert!(larger.last().unwrap() > 500);
    }

    #[test]
    fn the_pace_follows_rows_that_take_longer_than_estimated() {
        let (mut cost, goal) = (Cost::default(), Duration::from_millis(100));
        // Rows beyond the fixed 20 ms take twice their estimate, and later as long as that.
        let mut step = |factor: f64| {
            let time = Duration::from_secs_f64(0.020 + 0.080 * cost.pace() * factor);
            cost.keep_pace(goal, time);
            time
        };
        assert_eq!(step(2.0), Duration::from_millis(180));
        let late = (0..8).map(|_| step(2.0)).last();
        assert!(late.is_some_and(|time| time < goal.mul_f64(1.1)), "{late:?}");
        let later = (0..30).map(|_| step(1.0)).last();
        assert!(later.is_some_and(|time| time > goal.mul_f64(0.98) && time <= goal), "{later:?}");
        (0..30).for_each(|_| cost.keep_pace(goal, Duration::from_secs(9)));
        assert_eq!(cost.pace(), PACE_LEAST);
    }

    /// A GPU: 64 rows cost as much as one. Later rows of a prompt attend to more tokens.
    fn time_on_gpu(rows: u32, depth: u32) -> Duration {
        let row = 30.0 + 0.005 * f64::from(depth);
        Duration::from_secs_f64(4.3e-3 + 1e-6 * row * f64::from(rows.saturating_sub(64)))
    }

    #[test]
    fn prompts_beside_answers_keep_their_time_from_the_first_one_on() {
        let (mut cost, goal) = (Cost::default(), Duration::from_millis(10));
        for prompt in 0..4 {
            for _ in 0..300 {
                cost.observe(16, time_on_gpu(16, 0));
                cost.observe_answers(16, time_on_gpu(16, 0));
            }
            let (mut depth, mut steps) = (0, 0);
            while depth < 4096 {
                let rows = cost.rows_mixed(goal).unwrap().clamp(17, 16 + 4096 - depth);
                let time = time_on_gpu(rows, depth);
                assert!(time <= goal.mul_f64(1.25), "prompt {prompt}: {rows} rows at {depth}: {time:?}");
                cost.observe(rows, time);
                cost.observe_mixed(rows, goal, time);
                (depth, steps) = (depth + rows - 16, steps + 1);
            }
            // A step of 10 ms has some 250 rows at first and 170 at last.
            assert!(steps <= if prompt == 0 { 28 } else { 24 }, "prompt {prompt}: {steps} steps");
        }
    }

    #[test]
    fn answers_alone_have_a_time_of_their_own() {
        let mut cost = Cost::default();
        assert_eq!(cost.answers(4), None);
        (0..40).for_each(|_| cost.observe_answers(4, Duration::from_millis(20)));
        let milliseconds = |rows| cost.answers(rows).map(|time| (time * 1e3).round());
        assert_eq!([milliseconds(1), milliseconds(4), milliseconds(8)], [Some(20.0), Some(20.0), Some(40.0)]);
        cost.observe_answers(4, Duration::from_millis(200));
        assert_eq!(cost.answers(4).map(|time| (time * 1e3).round()), Some(21.0), "one late step");
        (0..30).for_each(|_| cost.observe_answers(4, Duration::from_millis(40)));
        assert!(
            cost.answers(4).is_some_and(|time| (0.039..=0.0401).contains(&time)),
            "steps that are longer now"
        );
    }

    #[test]
    fn without_a_spread_of_rows_the_time_is_theirs() {
        let mut cost = Cost::default();
        cost.observe(4, Duration::from_millis(8));
        assert_eq!(cost.estimate().map(|e| (e.fixed, e.row)), Some((0.0, 0.002)));
        assert_eq!(cost.estimate().map(|e| e.rows_in(0.0001)), Some(1));
        cost.observe(4, Duration::ZERO);
        assert!(cost.estimate().is_some_and(|e| e.row >= 0.0 && e.fixed >= 0.0));
        let mut none = Cost::default();
        none.observe(1, Duration::ZERO);
        assert_eq!(none.estimate().map(|e| e.rows_in(0.05)), Some(50_000_000));
    }
}
