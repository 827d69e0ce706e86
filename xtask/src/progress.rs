//! Shows the progress of a long transfer: one line that is rewritten on a terminal, else a line every 10 s.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Interval between lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Progress of one transfer, on stderr.
pub struct Progress<'a> {
    name: &'a str,
    bytes: u64,
    seen: u64,
    started: Instant,
    last_line: Instant,
}

impl<'a> Progress<'a> {
    /// Starts showing a transfer of about `bytes`.
    pub fn new(name: &'a str, bytes: u64) -> Self {
        let now = Instant::now();
        if !stderr().is_terminal() {
            eprintln!("  {name}: {:.1} MB to transfer", bytes as f64 / 1e6);
        }
        Self { name, bytes, seen: 0, started: now, last_line: now }
    }

    /// Reports that `bytes` have arrived.
    pub fn at(&mut self, bytes: u64) {
        self.seen = self.seen.max(bytes);
        let terminal = stderr().is_terminal();
        if !terminal && self.last_line.elapsed() < LINE_EVERY {
            return;
        }
        self.last_line = Instant::now();
        let rate = self.seen as f64 / self.started.elapsed().as_secs_f64().max(0.001) / 1e6;
        let percent = (100 * self.seen / self.bytes.max(1)).min(100);
        let (start, end) = if terminal { ("\r", "\x1b[K") } else { ("", "\n") };
        eprint!(
            "{start}  {}: {percent:3} % of {:.1} MB, {rate:.1} MB/s{end}",
            self.name,
            self.bytes as f64 / 1e6
        );
        // A failure to show progress is no reason to stop.
        let _ = stderr().flush();
    }

    /// Reports the end of the transfer.
    pub fn done(self) {
        let seconds = self.started.elapsed().as_secs_f64();
        let start = if stderr().is_terminal() { "\r\x1b[K" } else { "" };
        eprintln!("{start}  {}: done after {seconds:.1} s", self.name);
    }

    /// Reports that the transfer failed.
    pub fn fail(self) {
        let start = if stderr().is_terminal() { "\r\x1b[K" } else { "" };
        eprintln!("{start}  {}: failed", self.name);
    }
}
