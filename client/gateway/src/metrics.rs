//! Counters of the gateway, as a page for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::api::Api;

/// Upper bounds of the histogram's buckets, in milliseconds.
const BUCKETS_MS: [u64; 12] = [1, 5, 10, 25, 50, 100, 250, 500, 1_000, 5_000, 20_000, 60_000];

/// The counters since the start.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Requests by API and status. Both have few values.
    requests: Mutex<BTreeMap<(Api, u16), u64>>,
    streams_open: AtomicU64,
    connections_open: AtomicU64,
    /// Requests that wait here: for room, or for a connection to the daemon.
    waiting: AtomicU64,
    /// First bytes within each bucket's bound and not within the one before.
    first_bytes: [AtomicU64; BUCKETS_MS.len()],
    first_bytes_total: AtomicU64,
    first_bytes_us: AtomicU64,
}

/// Counts a stream or a connection as open until it is dropped.
#[derive(Debug)]
pub struct Open<'a>(&'a AtomicU64);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Counts a request that was answered with a status.
    pub fn answered(&self, api: Api, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((api, status)).or_default() += 1;
    }

    /// Counts the time from a request for tokens to its answer's first byte.
    pub fn first_byte(&self, after: Duration) {
        let bucket = BUCKETS_MS.iter().position(|bound| after <= Duration::from_millis(*bound));
        if let Some(bucket) = bucket {
            self.first_bytes[bucket].fetch_add(1, Ordering::Relaxed);
        }
        let us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.first_bytes_us.fetch_add(us, Ordering::Relaxed);
        self.first_bytes_total.fetch_add(1, Ordering::Relaxed);
    }

    /// Opens a stream.
    pub fn stream(&self) {
        self.streams_open.fetch_add(1, Ordering::Relaxed);
    }

    /// Closes a stream.
    pub fn stream_ended(&self) {
        self.streams_open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a connection until the value is dropped.
    pub fn connection(&self) -> Open<'_> {
        self.connections_open.fetch_add(1, Ordering::Relaxed);
        Open(&self.connections_open)
    }

    /// Counts a request as waiting in the gateway until the value is dropped.
    pub fn waits(&self) -> Open<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Open(&self.waiting)
    }

    /// Requests that wait in the gateway.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// The page.
    pub fn page(&self) -> String {
        let mut page = String::new();
        let head = |page: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(
                page,
                "# HELP rocmforge_gateway_{name} {help}\n# TYPE rocmforge_gateway_{name} {kind}"
            );
        };
        head(&mut page, "requests_total", "counter", "Requests answered, by API and HTTP status.");
        for ((api, status), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let api = api.name();
            let _ = writeln!(
                page,
                "rocmforge_gateway_requests_total{{api=\"{api}\",status=\"{status}\"}} {count}"
            );
        }
        for (name, value, help) in [
            ("streams_open", &self.streams_open, "Answers being streamed."),
            ("connections_open", &self.connections_open, "Open HTTP connections."),
        ] {
            head(&mut page, name, "gauge", help);
            let _ = writeln!(page, "rocmforge_gateway_{name} {}", value.load(Ordering::Relaxed));
        }
        let name = "first_byte_seconds";
        head(&mut page, name, "histogram", "Time from a request for tokens to its answer's first byte.");
        let mut below = 0;
        for (bound_ms, count) in BUCKETS_MS.iter().zip(&self.first_bytes) {
            below += count.load(Ordering::Relaxed);
            let (whole, thousandths) = (bound_ms / 1000, bound_ms % 1000);
            let _ =
                writeln!(page, "rocmforge_gateway_{name}_bucket{{le=\"{whole}.{thousandths:03}\"}} {below}");
        }
        // Counted after the buckets, so that it is never below them.
        let total = self.first_bytes_total.load(Ordering::Relaxed).max(below);
        let us = self.first_bytes_us.load(Ordering::Relaxed);
        let _ = writeln!(page, "rocmforge_gateway_{name}_bucket{{le=\"+Inf\"}} {total}");
        let _ = writeln!(page, "rocmforge_gateway_{name}_sum {}.{:06}", us / 1_000_000, us % 1_000_000);
        let _ = writeln!(page, "rocmforge_gateway_{name}_count {total}");
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_everything_below_their_bound() {
        let metrics = Metrics::default();
        for ms in [0, 3, 70_000, 100] {
            metrics.first_byte(Duration::from_millis(ms));
        }
        metrics.answered(Api::OpenAi, 200);
        metrics.answered(Api::OpenAi, 200);
        let open = metrics.connection();
        let page = metrics.page();
        for line in [
            "rocmforge_gateway_requests_total{api=\"openai\",status=\"200\"} 2",
            "rocmforge_gateway_connections_open 1",
            "rocmforge_gateway_first_byte_seconds_bucket{le=\"0.001\"} 1",
            "rocmforge_gateway_first_byte_seconds_bucket{le=\"0.100\"} 3",
            "rocmforge_gateway_first_byte_seconds_bucket{le=\"60.000\"} 3",
            "rocmforge_gateway_first_byte_seconds_bucket{le=\"+Inf\"} 4",
            "rocmforge_gateway_first_byte_seconds_sum 70.103000",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
        drop(open);
        assert!(metrics.page().contains("connections_open 0\n"));
    }
}
