//! The numbers that routers read, compared with what the daemon tells on its own socket.

use rocmforge_client::wire::SequenceState;
use rocmforge_gateway::{Settings, Tokens};

use crate::door::{Door, ENDLESS};
use crate::drain::begin;
use crate::rig::PATIENCE;

/// The value of a metric without labels.
#[track_caller]
fn value(door: &Door, name: &str) -> f64 {
    let page = door.get("/metrics").body;
    let found = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    found.unwrap_or_else(|| panic!("{name} is not in\n{page}"))
}

#[test]
fn routers_read_how_many_requests_run_and_how_full_the_cache_is() {
    let door = Door::open();
    for name in ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"] {
        assert_eq!(value(&door, name), 0.0, "{name}");
    }
    let running = begin(&door);
    // It waits for its client, and its pages stay.
    let client = door.rig.client();
    let until = std::time::Instant::now() + PATIENCE;
    let stalled =
        || client.ps().unwrap().sequences.first().is_some_and(|one| one.state == SequenceState::Stalled);
    while !stalled() {
        assert!(std::time::Instant::now() < until, "the answer never waits");
    }
    door.await_metric("vllm:num_requests_running 1");
    door.await_metric(&format!(
        "rocmforge_gateway_model_requests{{model_name=\"{ENDLESS}\",state=\"running\"}} 1"
    ));
    // One model is open, so its pages tell the same. The page of metrics may be a moment older.
    let device = loop {
        let device = client.status().unwrap().devices[0].clone();
        let most = f64::from(device.kv_pages_max);
        let pages = f64::from(device.kv_pages_used) / most;
        let used = value(&door, "vllm:kv_cache_usage_perc");
        // A part of a page is left at the end of the budget.
        if used > 0.0 && (used - pages).abs() <= pages / most {
            assert_eq!(used, value(&door, "vllm:gpu_cache_usage_perc"));
            break device;
        }
        assert!(std::time::Instant::now() < until, "{used} of the cache, {pages} of its pages");
    };
    let (tokens, most) = (device.page_tokens(), device.kv_pages_max);
    door.await_metric(&format!(
        "vllm:cache_config_info{{block_size=\"{tokens}\",num_gpu_blocks=\"{most}\"}} 1"
    ));
    drop(running);
    door.await_metric("vllm:num_requests_running 0");
    door.await_metric("vllm:kv_cache_usage_perc 0");
}

#[test]
fn requests_that_wait_in_the_gateway_count() {
    let door = Door::open_with("127.0.0.1:0", None, Settings { body_bytes: 4 << 20, ..Settings::default() });
    let announce = |_| {
        let mut connection = door.connect();
        connection
            .send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4194304\r\n\r\n{");
        connection
    };
    // Sixteen of them take all the room.
    let _stuck: Vec<_> = (0..20).map(announce).collect();
    door.await_metric("vllm:num_requests_waiting 4");
    assert_eq!(value(&door, "vllm:num_requests_running"), 0.0);
}

#[test]
fn metrics_need_a_token_unless_they_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    std::fs::write(&file, "0123456789abcdef0123\n").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    for (open_metrics, status) in [(false, 401), (true, 200)] {
        let settings = Settings { open_metrics, ..Settings::default() };
        let door = Door::open_with("127.0.0.1:0", Some(Tokens::read(&file).unwrap()), settings);
        assert_eq!(door.get("/metrics").status, status);
        assert_eq!((door.get("/health").status, door.get("/livez").status), (200, 200));
        assert_eq!(door.get("/v1/models").status, 401);
    }
}
