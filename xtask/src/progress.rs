//! How far a long transfer of bytes is: a line that is rewritten on a terminal, a line every few seconds elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Progress of one, on stderr.
pub struct Progress<'a> {
    name: &'a str,
    bytes: u64,
    seen: u64,
    started: Instant,
    last_line: Instant,
}

impl<'a> Progress<'a> {
    /// Starts showing one of about `bytes`.
    pub fn new(name: &'a str, bytes: u64) -> Self {
        let now = Instant::now();
        if !stderr().is_terminal() {
            eprintln!("  {name}: {:.1} MB to come", bytes as f64 / 1e6);
        }
        Self { name, bytes, seen: 0, started: now, last_line: now }
    }

    /// `bytes` are here by now.
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
        // A progress line that cannot be shown is no reason to stop.
        let _ = stderr().flush();
    }

    /// All is here.
    pub fn done(self) {
        let seconds = self.started.elapsed().as_secs_f64();
        let start = if stderr().is_terminal() { "\r\x1b[K" } else { "" };
        eprintln!("{start}  {}: here after {seconds:.1} s", self.name);
    }

    /// It did not come.
    pub fn fail(self) {
        let start = if stderr().is_terminal() { "\r\x1b[K" } else { "" };
        eprintln!("{start}  {}: did not come", self.name);
    }
}
