//! When a silent connection is asked for a sign of life, and when it is given up. No I/O.

use std::time::{Duration, Instant};

/// The silence of one connection, counted while a thread waits for frames.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Silence after which the daemon is pinged.
    ping_after: Duration,
    /// Silence after a ping that ends the connection.
    ping_timeout: Duration,
    /// Threads that wait for a frame. While there is none, nobody reads, and silence says nothing.
    waiting: usize,
    silent_since: Instant,
    pinged: Option<Instant>,
}

/// The action that the silence asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Wait on.
    Nothing,
    /// Send a ping.
    Ping,
    /// Give the connection up after this silence.
    GiveUp(Duration),
}

impl Watch {
    pub fn new(ping_after: Duration, ping_timeout: Duration) -> Self {
        Self { ping_after, ping_timeout, waiting: 0, silent_since: Instant::now(), pinged: None }
    }

    /// A thread begins to wait.
    pub fn begin(&mut self, now: Instant) {
        if self.waiting == 0 {
            self.heard(now);
        }
        self.waiting += 1;
    }

    /// A thread waits no longer.
    pub fn end(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// A frame came, whatever its stream.
    pub fn heard(&mut self, now: Instant) {
        self.silent_since = now;
        self.pinged = None;
    }

    /// When to ask [`Watch::due`] again; `None`: never, because the time lies beyond the clock.
    pub fn next_check(&self) -> Option<Instant> {
        match self.pinged {
            Some(pinged) => pinged.checked_add(self.ping_timeout),
            None => self.silent_since.checked_add(self.ping_after),
        }
    }

    /// Call it after a read found nothing: a process that was stopped for a while must read what came meanwhile.
    pub fn due(&mut self, now: Instant) -> Due {
        if self.next_check().is_none_or(|check| now < check) {
            return Due::Nothing;
        }
        if self.pinged.is_some() {
            return Due::GiveUp(now.saturating_duration_since(self.silent_since));
        }
        self.pinged = Some(now);
        Due::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn silence_is_asked_about_and_then_given_up() {
        let mut watch = Watch::new(30 * SECOND, 10 * SECOND);
        let start = Instant::now();
        let mut due = |after: u32| watch.due(start + after * SECOND);
        assert_eq!(due(29), Due::Nothing);
        assert_eq!(due(31), Due::Ping);
        assert_eq!(due(40), Due::Nothing, "ten seconds after the ping, not after the silence began");
        assert!(matches!(due(41), Due::GiveUp(silence) if silence.as_secs() == 41));
    }

    #[test]
    fn any_frame_is_a_sign_of_life_and_time_without_a_reader_is_no_silence() {
        let mut watch = Watch::new(30 * SECOND, 10 * SECOND);
        let start = Instant::now();
        watch.begin(start);
        assert_eq!(watch.due(start + 30 * SECOND), Due::Ping);
        watch.heard(start + 39 * SECOND);
        assert_eq!(watch.due(start + 45 * SECOND), Due::Nothing);
        watch.begin(start + 50 * SECOND);
        assert_eq!(watch.due(start + 69 * SECOND), Due::Ping, "another thread that waits changes nothing");
        watch.end();
        watch.end();
        watch.begin(start + 500 * SECOND);
        assert_eq!(watch.due(start + 510 * SECOND), Due::Nothing);
    }

    #[test]
    fn a_time_beyond_the_clock_is_never() {
        let mut watch = Watch::new(Duration::MAX, SECOND);
        assert_eq!(watch.next_check(), None);
        assert_eq!(watch.due(Instant::now()), Due::Nothing);
    }
}
