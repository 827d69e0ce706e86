//! Checks that the daemon after a soak holds no more than before.

use std::fmt;
use std::time::Duration;

use super::clients::{Done, Left};

/// Allowed growth of the anonymous resident set.
const KIB_PER_HOUR: f64 = 1024.0;

/// Allowance for noise in runs so short that an hour's growth is smaller: the allocator returns pages irregularly. A
/// thousand loads moved its arenas by about this much.
const NOISE_KIB: f64 = 3072.0;

/// Runs at least this long get no allowance for noise.
const LONG: Duration = Duration::from_secs(3 * 3600);

/// State of the daemon at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Time since the clients started.
    pub at: Duration,
    /// Resident memory without files.
    pub anon_kib: u64,
    pub fds: u64,
    pub threads: u64,
}

/// All observations.
#[derive(Debug)]
pub struct Verdict {
    /// At rest before the clients, and at rest after them.
    pub before: Sample,
    pub after: Sample,
    pub samples: Vec<Sample>,
    pub left: Left,
    pub done: Done,
}

impl Verdict {
    /// Samples after the first third of the run, or its first hour: caches fill until then.
    fn settled(&self) -> &[Sample] {
        let time = self.samples.last().map_or(Duration::ZERO, |sample| sample.at);
        let from = (time / 3).min(Duration::from_secs(3600));
        let first = self.samples.iter().position(|sample| sample.at >= from).unwrap_or(0);
        self.samples.get(first..).unwrap_or_default()
    }

    /// Slope of the line through the settled samples in KiB per hour, and the hours that they span.
    fn slope(&self) -> (f64, f64) {
        let settled = self.settled();
        let points = settled.iter().map(|sample| (sample.at.as_secs_f64() / 3600.0, sample.anon_kib as f64));
        let count = settled.len().max(1) as f64;
        let (x, y) = points.clone().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
        let (x, y) = (x / count, y / count);
        let (above, below) = points.fold((0.0, 0.0), |(above, below), (at, kib)| {
            (above + (at - x) * (kib - y), below + (at - x) * (at - x))
        });
        let span = match settled {
            [first, .., last] => (last.at - first.at).as_secs_f64() / 3600.0,
            _ => 0.0,
        };
        (if below > 0.0 { above / below } else { 0.0 }, span)
    }

    /// Text that says so, if the memory grew by more than is allowed.
    pub fn growth(&self) -> Option<String> {
        let (slope, hours) = self.slope();
        let noise = if hours * 3600.0 < LONG.as_secs_f64() { NOISE_KIB } else { 0.0 };
        let (grown, allowed) = (slope * hours, KIB_PER_HOUR * hours + noise);
        (grown > allowed).then(|| {
            format!(
                "its memory grew by {grown:.0} KiB in {hours:.2} h ({slope:.0} KiB per hour); {allowed:.0} KiB are allowed"
            )
        })
    }

    /// All faults.
    pub fn faults(&self) -> Vec<String> {
        self.growth().into_iter().chain(self.faults_but_growth()).collect()
    }

    /// All faults but growth.
    pub fn faults_but_growth(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |bad: bool, text: String| faults.extend(bad.then_some(text));
        let (before, after) = (&self.before, &self.after);
        fault(before.fds != after.fds, format!("{} descriptors before, {} after", before.fds, after.fds));
        fault(
            before.threads != after.threads,
            format!("{} threads before, {} after", before.threads, after.threads),
        );
        let left = &self.left;
        fault(*left != Left::default(), format!("left behind: {left:?}"));
        let done = &self.done;
        fault(done.wrong > 0, format!("{} answers differ from the answer without other clients", done.wrong));
        fault(!done.errors.is_empty(), format!("errors: {}", done.errors.join("; ")));
        fault(done.answers == 0, "no answer was complete".to_owned());
        faults
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after, done) = (&self.before, &self.after, &self.done);
        let (slope, hours) = self.slope();
        let most = |of: fn(&Sample) -> u64| self.samples.iter().map(of).max().unwrap_or(0);
        writeln!(f, "{:12} {:>10} {:>10} {:>10}", "", "before", "most", "after")?;
        let mut row = |name, of: fn(&Sample) -> u64| {
            writeln!(f, "{name:12} {:10} {:10} {:10}", of(before), most(of), of(after))
        };
        row("memory, KiB", |sample| sample.anon_kib)?;
        row("descriptors", |sample| sample.fds)?;
        row("threads", |sample| sample.threads)?;
        writeln!(f, "memory: {slope:+.0} KiB per hour over the last {:.1} minutes", hours * 60.0)?;
        write!(
            f,
            "{} complete answers, {} cancelled, {} read slowly, {} clients killed, {} loads and unloads",
            done.answers, done.cancelled, done.slow, done.killed, done.loads
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Sample = Sample { at: Duration::ZERO, anon_kib: 10_000, fds: 20, threads: 9 };

    /// A run of this many minutes, sampled every second; `kib` gives the memory at each moment in hours.
    fn run(minutes: u64, kib: impl Fn(f64) -> f64) -> Verdict {
        let at = |second: u64| Sample {
            at: Duration::from_secs(second),
            anon_kib: kib(second as f64 / 3600.0) as u64,
            ..REST
        };
        Verdict {
            before: REST,
            after: REST,
            samples: (0..minutes * 60).map(at).collect(),
            left: Left::default(),
            done: Done { answers: 7, ..Done::default() },
        }
    }

    #[test]
    fn growth_counts_once_caches_are_full() {
        // Ten MiB in the first two minutes, nothing after.
        assert_eq!(run(20, |at| 1e4 + (at * 30.0).min(1.0) * 1e4).faults(), [""; 0]);
        // 1 MiB of noise.
        assert_eq!(run(20, |at| 2e4 + ((at * 3600.0) as u64 * 7919 % 1024) as f64).faults(), [""; 0]);
        let grows = run(20, |at| 2e4 + at * 30.0 * 1024.0).faults();
        assert!(grows[0].contains("its memory grew by 68") && grows.len() == 1, "{grows:?}");
        assert_eq!(run(24 * 60, |at| 2e4 + at * 1000.0).faults(), [""; 0]);
        let grows = run(24 * 60, |at| 2e4 + at * 1100.0).faults();
        assert!(grows[0].contains("1100 KiB per hour"), "{grows:?}");
    }

    #[test]
    fn each_thing_left_behind_is_a_fault() {
        let good = run(2, |_| 2e4);
        assert_eq!(good.faults(), [""; 0]);
        let with = |change: fn(&mut Verdict)| {
            let mut verdict = run(2, |_| 2e4);
            change(&mut verdict);
            verdict.faults().join("|")
        };
        assert_eq!(with(|v| v.after.fds += 1), "20 descriptors before, 21 after");
        assert_eq!(with(|v| v.after.threads -= 1), "9 threads before, 8 after");
        assert!(with(|v| v.left.kv_pages = 1).contains("kv_pages: 1"));
        assert!(with(|v| v.done.wrong = 2).contains("2 answers"));
        assert!(with(|v| v.done.errors.push("lost".into())).contains("lost"));
        assert_eq!(with(|v| v.done.answers = 0), "no answer was complete");
    }
}
