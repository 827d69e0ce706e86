//! Drops values on threads that may be lost: to close a file asks its server.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use super::{Aside, Errand, Running, Subject, Table, WARNING_PAUSE};

/// Most threads that drop values, of all names and of one. Past that, a value waits until one of them is free.
const DROPPING_MAX: usize = 64;
const DROPPING_OF_NAME: usize = 4;

/// The operation of these threads.
const DROPPING: &str = "closing a file";

/// To close a file of FUSE asks its server, and no signal ends that wait.
pub const STUCK: &str = "their server does not answer. Each holds a thread, and no signal ends it: the daemon's process stays \
    until the server answers or ends. Root can end a connection of FUSE: `echo 1 > /sys/fs/fuse/connections/N/abort`";

/// A value of any type.
pub(super) struct Dropped(#[allow(dead_code)] Box<dyn Send>); // held to be dropped

impl std::fmt::Debug for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Dropped")
    }
}

impl Aside {
    /// Drops a value on a thread of its own: to close a file asks its server. Without a thread it drops here. Values of one
    /// name share a few threads, so that those of another do not wait for them.
    pub fn let_go<T: Send + 'static>(self: &Arc<Self>, name: String, value: T) {
        let mut table = self.table.lock();
        table.to_drop.push((name, Dropped(Box::new(value))));
        let warns = table
            .longest_drop(self.limits.patience)
            .filter(|_| table.warned.is_none_or(|warned| warned.elapsed() >= WARNING_PAUSE));
        if warns.is_some() {
            table.warned = Some(Instant::now());
        }
        let work = table.work_to_drop();
        drop(table);
        if let Some((of, waited)) = warns {
            let (waited_s, lost_threads) = (waited.as_secs(), self.lost());
            tracing::warn!(of, waited_s, lost_threads, "files do not close: {STUCK}");
        }
        let Some((number, value)) = work else { return };
        let errand: Errand<()> = Errand { aside: Arc::clone(self), number, tell: sync_channel(0).0 };
        let drop_all = move || {
            drop(value);
            loop {
                let next = errand.aside.table.lock().next_to_drop(errand.number);
                let Some(next) = next else { return };
                drop(next);
            }
        };
        let _ = self.start(number, DROPPING, Box::new(drop_all));
    }
}

impl Table {
    /// The name and the time of the longest drop past the patience.
    fn longest_drop(&self, patience: Duration) -> Option<(String, Duration)> {
        let drops = self.running.values().filter(|running| running.subject.what == DROPPING);
        let longest = drops.min_by_key(|running| running.since)?;
        let waited = longest.since.elapsed();
        (waited >= patience).then(|| (longest.subject.name.clone(), waited))
    }

    /// Threads that drop values, of one name or of all.
    fn dropping(&self, name: Option<&str>) -> usize {
        let of = |running: &&Running| {
            running.subject.what == DROPPING && name.is_none_or(|name| running.subject.name == name)
        };
        self.running.values().filter(of).count()
    }

    /// A value that may have a thread of its own now, entered as its work.
    fn work_to_drop(&mut self) -> Option<(u64, Dropped)> {
        if self.dropping(None) >= DROPPING_MAX {
            return None;
        }
        let free = |(name, _): &(String, Dropped)| self.dropping(Some(name)) < DROPPING_OF_NAME;
        let at = self.to_drop.iter().position(free)?;
        let (name, value) = self.to_drop.remove(at);
        Some((self.enter(Subject { what: DROPPING, name, device: None }), value))
    }

    /// The next value for the thread that did this work: one of the same name, else of any that may have a thread.
    fn next_to_drop(&mut self, number: u64) -> Option<Dropped> {
        let running = self.running.get_mut(&number)?;
        running.since = Instant::now();
        let name = running.subject.name.clone();
        let same = self.to_drop.iter().position(|(of, _)| *of == name);
        let free = |(name, _): &(String, Dropped)| self.dropping(Some(name)) < DROPPING_OF_NAME;
        let at = same.or_else(|| self.to_drop.iter().position(free))?;
        let (name, value) = self.to_drop.remove(at);
        if let Some(running) = self.running.get_mut(&number) {
            running.subject.name = name;
        }
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::super::Limits;
    use super::*;

    fn aside() -> Arc<Aside> {
        let ms = Duration::from_millis;
        Aside::new(Limits { patience: ms(400), wait: ms(40), of_name: 2, lost: 64 })
    }

    #[test]
    fn a_drop_aside_does_not_hold_its_caller() {
        struct Slow(Receiver<()>);
        impl Drop for Slow {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let aside = aside();
        let (end, ends) = channel::<()>();
        aside.let_go(String::new(), Slow(ends));
        while aside.lost() < 1 {
            std::thread::yield_now();
        }
        drop(end);
    }

    #[test]
    fn values_that_do_not_drop_hold_those_of_no_other_name() {
        struct Slow(Arc<std::sync::Barrier>);
        impl Drop for Slow {
            fn drop(&mut self) {
                self.0.wait();
            }
        }
        struct Quick(std::sync::mpsc::Sender<()>);
        impl Drop for Quick {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let aside = aside();
        let all = DROPPING_MAX + DROPPING_OF_NAME;
        let end = Arc::new(std::sync::Barrier::new(DROPPING_OF_NAME + 1));
        for _ in 0..all / DROPPING_OF_NAME * DROPPING_OF_NAME {
            aside.let_go("a".to_owned(), Slow(Arc::clone(&end)));
        }
        let (dropped, told) = channel();
        aside.let_go("b".to_owned(), Quick(dropped));
        told.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(aside.table.lock().dropping(Some("a")), DROPPING_OF_NAME);
        // Each round of the barrier frees as many threads as one name has; they take the rest.
        for _ in 0..all / DROPPING_OF_NAME {
            end.wait();
        }
        while aside.table.lock().dropping(None) > 0 {
            std::thread::yield_now();
        }
        assert!(aside.table.lock().to_drop.is_empty());
    }
}
