//! The daemon's state as routers ask for it: whether it answers, how many requests wait and run, how full its KV cache is.
//!
//! Some routers ask twenty times a second, and there may be several of them. So the daemon is asked at most ten times a second,
//! whoever wants to know.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_client::ClientError;
use rocmforge_client::asynchronous::Client;
use rocmforge_client::wire::{
    DeviceStatus, PsRequest, SequenceEntry, SequenceState, StatusReply, StatusRequest,
};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// How long a reply of the daemon counts as its present state.
const FRESH: Duration = Duration::from_millis(100);

/// Time for the daemon's reply: it answers within milliseconds unless it hangs, and a router that waits longer counts the
/// gateway as lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Most parts of the list of requests: each fills a frame.
const PARTS_MAX: usize = 16;

/// A value that is asked for again only when it is no longer fresh. Callers that come meanwhile wait for the one that asks.
#[derive(Debug)]
struct Asked<T>(Mutex<Option<(Instant, T)>>);

impl<T> Default for Asked<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Asked<T> {
    async fn get(&self, ask: impl Future<Output = T>) -> T {
        let mut last = self.0.lock().await;
        if let Some((_, value)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return value.clone();
        }
        let value = ask.await;
        *last = Some((Instant::now(), value.clone()));
        value
    }
}

/// Requests of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    running: u64,
    waiting: u64,
    /// Those of the waiting ones whose prompt is being read: the daemon's status does not count them yet.
    preparing: u64,
}

type Counts = BTreeMap<String, Count>;

/// The daemon's latest replies.
#[derive(Debug, Default)]
pub struct Load {
    status: Asked<Option<Arc<StatusReply>>>,
    counts: Asked<Arc<Counts>>,
}

impl Load {
    /// The daemon's status; `None` if it does not answer.
    pub async fn status(&self, client: &Client) -> Option<Arc<StatusReply>> {
        let ask = async {
            let status = timeout(REPLY_TIMEOUT, client.call(&StatusRequest::default())).await;
            status.ok().and_then(Result::ok).map(Arc::new)
        };
        self.status.get(ask).await
    }

    /// The requests that the daemon shows to the gateway, by model; none if it does not answer.
    async fn counts(&self, client: &Client) -> Arc<Counts> {
        let ask = async {
            let sequences = timeout(REPLY_TIMEOUT, sequences(client)).await;
            Arc::new(count(&sequences.ok().and_then(Result::ok).unwrap_or_default()))
        };
        self.counts.get(ask).await
    }

    /// The part of the page of metrics that routers read. `inside` requests wait in the gateway itself.
    pub async fn page(&self, client: &Client, inside: u64) -> String {
        let Some(status) = self.status(client).await else {
            // A router takes no number for one of 0, and asks `/health` whether requests are answered.
            return page(None, &Counts::new(), inside);
        };
        let counts = self.counts(client).await;
        page(Some(&*status), &counts, inside)
    }
}

async fn sequences(client: &Client) -> Result<Vec<SequenceEntry>, ClientError> {
    let mut all: Vec<SequenceEntry> = Vec::new();
    for _ in 0..PARTS_MAX {
        let after = all.last().map_or(0, |last| last.id);
        let reply = client.call(&PsRequest { after, ext: vec![] }).await?;
        let more = reply.more && !reply.sequences.is_empty();
        all.extend(reply.sequences);
        if !more {
            break;
        }
    }
    Ok(all)
}

fn count(sequences: &[SequenceEntry]) -> Counts {
    let mut counts = Counts::new();
    for sequence in sequences {
        let count = counts.entry(sequence.model.clone()).or_default();
        match sequence.state {
            SequenceState::Prefill | SequenceState::Decode | SequenceState::Stalled => count.running += 1,
            SequenceState::Queued => count.waiting += 1,
            SequenceState::Preparing => {
                count.waiting += 1;
                count.preparing += 1;
            }
        }
    }
    counts
}

fn page(status: Option<&StatusReply>, counts: &Counts, inside: u64) -> String {
    let mut page = String::new();
    let mut gauge = |name: &str, help: &str, series: &[(String, String)]| {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (labels, value) in series {
            let _ = writeln!(page, "{name}{labels} {value}");
        }
    };
    let one = |value: String| [(String::new(), value)];
    let answers = status.is_some_and(|status| !status.draining);
    let help = "1 if the daemon answers and takes requests.";
    gauge("rocmforge_gateway_daemon_up", help, &one(u8::from(answers).to_string()));
    let by_state = |(model, count): (&String, &Count)| {
        [("running", count.running), ("waiting", count.waiting)].map(|(state, requests)| {
            (format!("{{model_name=\"{}\",state=\"{state}\"}}", escaped(model)), requests.to_string())
        })
    };
    let models: Vec<_> = counts.iter().flat_map(by_state).collect();
    gauge("rocmforge_gateway_model_requests", "Requests in the daemon by model.", &models);
    let Some(status) = status else { return page };
    let sum = |of: fn(&DeviceStatus) -> u64| status.devices.iter().map(of).sum::<u64>();
    let preparing: u64 = counts.values().map(|count| count.preparing).sum();
    let waiting = sum(|device| device.sequences_queued.into()) + preparing + inside;
    // Names of vLLM's server, which routers ask for. One series each: some of them read only the first.
    gauge(
        "vllm:num_requests_waiting",
        "Requests that wait, here or in the daemon.",
        &one(waiting.to_string()),
    );
    let running = sum(|device| device.sequences_running.into());
    gauge("vllm:num_requests_running", "Requests that the daemon computes.", &one(running.to_string()));
    let (held, budget) = (sum(|device| device.kv_held_bytes()), sum(|device| device.kv_budget_bytes()));
    let used = (held as f64 / (budget as f64).max(1.0)).min(1.0).to_string();
    // A daemon before these numbers tells neither: a router must not take that for an empty cache.
    for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"].into_iter().filter(|_| budget > 0) {
        gauge(name, "Part of the KV cache that requests have, from 0 to 1.", &one(used.clone()));
    }
    let (tokens, pages) = (sum(|device| device.page_tokens()), sum(|device| device.kv_pages_max.into()));
    // Without an open model nobody knows how many pages there will be.
    if status.devices.len() == 1 && pages > 0 && tokens > 0 {
        let labels = format!("{{block_size=\"{tokens}\",num_gpu_blocks=\"{pages}\"}}");
        let help = "1, with the tokens of a page of the KV cache, and the pages of all open models.";
        gauge("vllm:cache_config_info", help, &[(labels, "1".to_owned())]);
    }
    page
}

/// A label's value, as the text format has it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use rocmforge_client::wire::{EXT_DEVICE_KV_BUDGET, EXT_DEVICE_KV_HELD, number_ext};

    use super::*;

    #[tokio::test]
    async fn callers_share_one_answer_while_it_is_fresh() {
        let (asked, times) = (Asked::default(), AtomicU32::new(0));
        let ask = || asked.get(async { times.fetch_add(1, Ordering::Relaxed) });
        let (first, second) = tokio::join!(ask(), ask());
        assert_eq!((first, second), (0, 0));
        if let Some((at, _)) = asked.0.lock().await.as_mut() {
            *at -= FRESH;
        }
        assert_eq!(ask().await, 1);
    }

    #[test]
    fn a_page_adds_up_all_that_wait() {
        let entry = |model: &str, state| SequenceEntry {
            id: 1,
            uid: 0,
            model: model.to_owned(),
            state,
            prompt_tokens: 0,
            prefilled_tokens: 0,
            generated_tokens: 0,
            max_tokens: 0,
            kv_pages: 0,
            age_ms: 0,
            queue_position: 0,
            ext: vec![],
        };
        let counts = count(&[
            entry("a", SequenceState::Decode),
            entry("a", SequenceState::Queued),
            entry("b\"", SequenceState::Preparing),
        ]);
        let device = DeviceStatus {
            sequences_running: 1,
            sequences_queued: 1,
            ext: number_ext([(EXT_DEVICE_KV_BUDGET, 200), (EXT_DEVICE_KV_HELD, 50)]),
            ..DeviceStatus::default()
        };
        let status = StatusReply { devices: vec![device], ..StatusReply::default() };
        let text = page(Some(&status), &counts, 3);
        for line in [
            "rocmforge_gateway_daemon_up 1",
            "rocmforge_gateway_model_requests{model_name=\"a\",state=\"running\"} 1",
            "rocmforge_gateway_model_requests{model_name=\"b\\\"\",state=\"waiting\"} 1",
            "vllm:num_requests_waiting 5",
            "vllm:num_requests_running 1",
            "vllm:kv_cache_usage_perc 0.25",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("cache_config_info"), "no model is open");
        let text = page(None, &Counts::new(), 3);
        assert!(text.contains("daemon_up 0\n") && !text.contains("vllm:"), "{text}");
    }
}
