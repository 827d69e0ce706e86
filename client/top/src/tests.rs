//! Drawing into a test buffer, with hostile names, on unusual sizes.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

use std::time::Instant;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rocmforge_client::ClientError;
use rocmforge_client::wire::{
    DeviceMemory, EventEntry, EventKind, HostStatus, LoadingProgress, PsReply, ResidencyEntry,
    ResidencyReply, Rules, SequenceEntry, SequenceState, StatusReply, SubscribeItem,
};

use unicode_width::UnicodeWidthStr;

use crate::bar::{columns, segments, strip};
use crate::sample::Sample;
use crate::text::{age, cut, fit, printable, wrapped};
use crate::watch::Update;
use crate::{App, Arguments, Sort, view};

const GIB: u64 = 1 << 30;

/// Controls terminals, reverses the direction of writing, and has wide characters.
const HOSTILE: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\r\n\u{202e}\u{200b}\u{301}模型\u{9b}31m";

fn device() -> DeviceMemory {
    DeviceMemory {
        kind: "hip".into(),
        device: "AMD Instinct MI210".into(),
        weight_bytes: 7 * GIB,
        kv_bytes: GIB,
        scratch_bytes: GIB / 2,
        staging_bytes: GIB / 4,
        taken_bytes: 9 * GIB,
        budget_bytes: 24 * GIB,
        available_bytes: 15 * GIB,
        total_bytes: 64 * GIB,
        free_bytes: 50 * GIB,
        others_bytes: 5 * GIB,
        sequences_running: 1,
        sequences_queued: 1,
        ..DeviceMemory::default()
    }
}

fn model(id: u64, name: &str, parts: &str, weight_bytes: u64) -> ResidencyEntry {
    ResidencyEntry {
        id,
        device: 0,
        model: name.into(),
        parts: parts.into(),
        weight_bytes,
        kv_bytes: GIB,
        scratch_bytes: 0,
        rules: Rules::default(),
        sequences: 0,
        idle_ms: Some(id * 1000),
        eviction_place: 1,
        loading: None,
        ext: vec![],
    }
}

fn sequence(id: u64, state: SequenceState, queue_position: u32) -> SequenceEntry {
    SequenceEntry {
        id,
        uid: 1000,
        model: "story".into(),
        state,
        prompt_tokens: 100,
        prefilled_tokens: 100,
        generated_tokens: 7,
        max_tokens: 64,
        kv_pages: 1,
        age_ms: 1500,
        queue_position,
        ext: vec![],
    }
}

fn sample() -> Sample {
    let loading =
        LoadingProgress { tensors: 3, tensors_total: 9, device_bytes: 3 * GIB, device_bytes_total: 4 * GIB };
    let models = vec![
        ResidencyEntry { loading: Some(loading), ..model(1, "story", "##>>..#", 3 * GIB) },
        ResidencyEntry {
            rules: Rules { pinned: true, priority: 2, layers_min: 0, idle_s: 0 },
            ..model(2, "", "#######", 4 * GIB)
        },
    ];
    Sample {
        status: StatusReply {
            version: "0.1.0".into(),
            uptime_ms: 60_000,
            pid: 7,
            draining: false,
            connections: 3,
            models_mapped: 2,
            devices: vec![],
            rss_anon_bytes: GIB,
            rss_file_bytes: 0,
            host: HostStatus::default(),
            ext: vec![],
        },
        residency: ResidencyReply { devices: vec![device()], models, more: false, ext: vec![] },
        ps: PsReply {
            sequences: vec![sequence(4, SequenceState::Queued, 1), sequence(5, SequenceState::Decode, 0)],
            more: false,
            ext: vec![],
        },
    }
}

/// The same daemon two seconds later.
fn later() -> Sample {
    let mut later = sample();
    later.status.uptime_ms += 2000;
    let device = &mut later.residency.devices[0];
    (device.decode_rows, device.prefill_rows) = (50, 200);
    (device.load_bytes, device.evicted_bytes) = (3 * GIB, GIB);
    (device.hits, device.loads) = (8, 2);
    later
}

fn event(kind: EventKind, part: u32) -> EventEntry {
    EventEntry {
        kind,
        id: 1,
        model: "story".into(),
        part,
        parts: 7,
        device_bytes: GIB,
        text: "why".into(),
        ext: vec![],
    }
}

fn app(samples: impl IntoIterator<Item = Sample>) -> App {
    let mut app = App::default();
    samples.into_iter().for_each(|sample| app.update(Update::Sample(Box::new(sample), Instant::now())));
    app
}

fn tell(app: &mut App, events: Vec<EventEntry>) {
    app.update(Update::Events(SubscribeItem { missed: 0, events, ext: vec![] }));
}

/// The rows of a terminal of that size.
fn shown(app: &App, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(app, frame.buffer_mut())).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(row).collect()
}

fn press(app: &mut App, code: KeyCode) -> Option<Option<u8>> {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn a_frame_says_who_has_the_memory_what_is_there_and_who_waits() {
    let mut app = app([sample(), later()]);
    tell(&mut app, vec![event(EventKind::ModelMapped, 0), event(EventKind::Loaded, 6)]);
    let rows = shown(&app, 100, 24);
    let text = rows.join("\n");
    assert!(rows[0].starts_with("rocmforged 0.1.0, up 62.0 s, 3 connections, 2 models mapped"), "{text}");
    assert_eq!(rows[1], "hip AMD Instinct MI210: budget 24.0 GiB, 15.0 GiB available; 1 running, 1 waiting");
    // 98 columns of 64 GiB: the larger model is A.
    assert_eq!(
        rows[2],
        "[AAAAAABBBBkas+".to_owned() + &rows[2][15..],
        "six columns for 4 GiB, four for 3, at least one for each other owner: {text}"
    );
    assert_eq!(rows[2].matches('|').count(), 1, "the budget ends somewhere: {text}");
    assert!(rows[2].ends_with(".oooooooo]"), "{text}");
    assert!(rows[3].starts_with("A (another user's) 4.0 GiB  B story 3.0 GiB  k KV 1.0 GiB"), "{text}");
    let rates =
        "25.0 tokens/s, prompts 100.0 tokens/s; load 1.5 GiB/s, evict 512.0 MiB/s; 4.0 hits/s, 1.0 misses/s";
    assert!(rows.iter().any(|row| row == rates), "{text}");
    let of = |name: &str| rows.iter().find(|row| row.contains(name) && row.contains("###")).cloned();
    assert!(of("(another user's)").unwrap().ends_with("pinned, priority 2"), "{text}");
    assert!(
        rows.iter().any(|row| row.contains("story")
            && row.contains("##>>..#")
            && row.ends_with("loading 75% of 4.0 GiB")),
        "{text}"
    );
    let place = |what: &str| {
        rows.iter().position(|row| row.contains(what)).unwrap_or_else(|| panic!("{what}: {text}"))
    };
    assert!(place("1 running, 1 waiting") < place("decode"));
    assert!(place("decode") < place("queued (1)"), "running requests come first: {text}");
    assert!(
        place("loaded          story head, 1.0 GiB") < place("model mapped    story"),
        "the last first: {text}"
    );
    assert!(rows[23].starts_with("q end") && rows[23].ends_with("sorted by weights"), "{text}");
}

#[test]
fn every_size_is_drawn_and_none_panics() {
    let mut full = app([sample(), later()]);
    tell(
        &mut full,
        (0..30)
            .map(|n| event(if n % 2 == 0 { EventKind::Loaded } else { EventKind::Evicted }, n % 7))
            .collect(),
    );
    full.update(Update::Gone(ClientError::Disconnected { reason: HOSTILE.into() }));
    let empty = App::default();
    for app in [&full, &empty] {
        for width in (1..40).chain([80, 200, 300]) {
            for height in [1, 2, 3, 4, 5, 7, 10, 24, 60] {
                assert_eq!(shown(app, width, height).len(), usize::from(height));
            }
        }
    }
    full.help = true;
    full.details = true;
    for (width, height) in [(1, 1), (10, 3), (30, 10), (80, 24), (120, 50)] {
        shown(&full, width, height);
    }
    assert_eq!(
        shown(&full, 80, 1)[0],
        "rocmforged 0.1.0, up 62.0 s, 3 connections, 2 models mapped, memory 1.0 GiB, ma~"
    );
}

/// A terminal of 80 columns and 24 lines, and one frame as text: nothing but names is cut.
#[test]
fn eighty_columns_hold_every_text() {
    let mut app = app([sample(), later()]);
    tell(&mut app, vec![event(EventKind::ModelMapped, 0), event(EventKind::Loaded, 6)]);
    let printed = |line: &ratatui::text::Line<'_>| line.to_string().trim_end().to_owned();
    let once: Vec<String> = view::lines(&app, 80, None).iter().map(printed).collect();
    for rows in [shown(&app, 80, 24), once] {
        let text = rows.join("\n");
        let cut: Vec<&String> = rows.iter().filter(|row| row.ends_with('~') || row.width() > 80).collect();
        assert!(cut.is_empty(), "{cut:?}: {text}");
        for whole in
            ["mapped files ", "1.0 misses/s", "for weights", "pinned, priority 2", "75% of 4.0 GiB", "AGE"]
        {
            assert!(rows.iter().any(|row| row.contains(whole)), "{whole}: {text}");
        }
    }
    assert_eq!(wrapped("a, b; c, ", 4), ["a,", "b;", "c,"]);
    assert_eq!(wrapped("a, b; c", 80), ["a, b; c"]);
    assert_eq!(wrapped("abcdef, b", 4), ["abc~", "b"]);
    assert_eq!(wrapped("", 4), [""]);
}

#[test]
fn names_of_strangers_steer_nothing() {
    let mut hostile = sample();
    hostile.residency.models[0].model = HOSTILE.into();
    hostile.residency.devices[0].device = HOSTILE.into();
    hostile.residency.devices[0].kind = HOSTILE.into();
    hostile.residency.models[0].parts = HOSTILE.into();
    hostile.ps.sequences[0].model = HOSTILE.into();
    hostile.status.version = HOSTILE.into();
    let mut app = app([hostile]);
    let poisoned =
        EventEntry { model: HOSTILE.into(), text: HOSTILE.into(), ..event(EventKind::ModelPoisoned, 0) };
    let lost = EventEntry { text: HOSTILE.into(), ..event(EventKind::DeviceLost, 0) };
    tell(&mut app, vec![poisoned, lost]);
    app.details = true;
    app.update(Update::Gone(ClientError::Disconnected { reason: HOSTILE.into() }));
    let steers = |c: char| c.is_control() || "\u{202e}\u{200b}\u{301}".contains(c);
    for line in view::lines(&app, 400, None) {
        assert!(!line.to_string().contains(steers), "{line:?}");
    }
    for width in 1..130 {
        assert!(!shown(&app, width, 50).concat().contains(steers));
    }
    let text = shown(&app, 130, 50).join("\n");
    assert!(text.contains("[2J") && text.contains('模'), "harmless characters stay: {text}");
}

#[test]
fn without_devices_and_without_models_there_is_still_a_frame() {
    let mut none = sample();
    none.residency.devices.clear();
    none.residency.models.clear();
    none.ps.sequences.clear();
    let rows = shown(&app([none.clone(), none]), 80, 10);
    assert!(
        rows.iter().any(|row| row == "Models: 0")
            && rows.iter().any(|row| row == "Requests: 0 running, 0 waiting")
    );
    let mut in_place = sample();
    in_place.residency.devices[0] =
        DeviceMemory { kind: "cpu".into(), device: "one".into(), ..Default::default() };
    let rows = shown(&app([in_place]), 80, 19);
    assert_eq!(rows[1], "cpu one: weights are read in place, KV 0 B; 0 running, 0 waiting");
    assert_eq!(rows[2], "no rates yet", "no bar, and one sample tells no rate");
}

#[test]
fn many_models_scroll_with_the_selection() {
    let mut many = sample();
    many.residency.models = (1..=300).map(|id| model(id, &format!("m{id:03}"), "###", GIB / id)).collect();
    let mut app = app([many.clone()]);
    assert_eq!(app.selected, Some(1), "the first is selected");
    let seen = |app: &App, name: &str| {
        shown(app, 100, 30).iter().any(|row| row.contains(name) && row.contains("###"))
    };
    assert!(seen(&app, "m001") && !seen(&app, "m300"));
    press(&mut app, KeyCode::End);
    assert!(seen(&app, "m300") && !seen(&app, "m001"), "{:?}", shown(&app, 100, 30));
    assert!(
        shown(&app, 100, 30)
            .iter()
            .any(|row| row.starts_with("Models: 300, ") && row.ends_with("to 300 of 300"))
    );
    press(&mut app, KeyCode::Up);
    press(&mut app, KeyCode::PageUp);
    assert_eq!(app.selected, Some(289));
    assert!(seen(&app, "m289"));
    press(&mut app, KeyCode::Home);
    press(&mut app, KeyCode::Up);
    press(&mut app, KeyCode::Char('j'));
    assert_eq!(app.selected, Some(2));
    // The selection stays in another order, and moves to another model when its model is gone.
    press(&mut app, KeyCode::Char('s'));
    assert_eq!((app.sort, app.selected), (Sort::Name, Some(2)));
    many.residency.models.retain(|model| model.id != 2);
    app.update(Update::Sample(Box::new(many), Instant::now()));
    assert_eq!(app.selected, Some(1));
}

#[test]
fn keys_sort_show_and_end() {
    let mut app = app([sample()]);
    let order = |app: &App| app.models().iter().map(|model| model.id).collect::<Vec<_>>();
    assert_eq!(order(&app), [2, 1], "by weights");
    press(&mut app, KeyCode::Char('s'));
    assert_eq!(order(&app), [1, 2], "by name, the nameless last");
    for sort in [Sort::Requests, Sort::Idle, Sort::Leaves, Sort::Weights] {
        press(&mut app, KeyCode::Char('s'));
        assert_eq!(app.sort, sort);
    }
    press(&mut app, KeyCode::Enter);
    assert!(shown(&app, 100, 40).iter().any(|row| row.contains("7 parts: 7 resident, 0 loading, 0 absent")));
    press(&mut app, KeyCode::Char('?'));
    assert!(shown(&app, 100, 40).iter().any(|row| row.contains("> loading")));
    press(&mut app, KeyCode::Esc);
    assert!(!app.help && !app.details);
    assert_eq!(press(&mut app, KeyCode::Char('q')), Some(None));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.key(interrupt), Some(Some(2)), "as SIGINT");
}

#[test]
fn a_daemon_that_is_gone_and_back_is_told_and_counted_anew() {
    let mut app = app([sample(), later()]);
    assert_eq!(app.rates[0].unwrap().tokens_per_second, 25.0);
    app.update(Update::Gone(ClientError::Disconnected { reason: "it ended".into() }));
    let rows = shown(&app, 120, 24);
    assert!(
        rows[1].starts_with("no answer for 0.0 s, asking again: ") && rows[1].contains("it ended"),
        "{rows:?}"
    );
    assert!(rows.iter().any(|row| row == "no rates yet") && rows.iter().any(|row| row.contains("story")));
    let mut anew = sample();
    (anew.status.pid, anew.status.uptime_ms) = (8, 100);
    app.update(Update::Sample(Box::new(anew.clone()), Instant::now()));
    assert!(app.gone.is_none() && app.rates[0].is_none(), "counters of two daemons make no rate");
    anew.status.uptime_ms = 99;
    app.update(Update::Sample(Box::new(anew), Instant::now()));
    assert!(app.rates[0].is_none(), "nor does a clock that goes back");
}

#[test]
fn events_of_one_kind_are_a_line_and_old_ones_go() {
    let mut app = app([sample()]);
    tell(&mut app, (0..7).map(|part| event(EventKind::Loaded, part)).collect());
    assert_eq!((app.happened.len(), app.happened[0].count, app.happened[0].bytes), (1, 7, 7 * GIB));
    assert!(shown(&app, 100, 30).iter().any(|row| row.ends_with("loaded          story, 7 parts, 7.0 GiB")));
    for n in 0..1000 {
        tell(
            &mut app,
            vec![event(if n % 2 == 0 { EventKind::ModelMapped } else { EventKind::ModelUnmapped }, 0)],
        );
    }
    assert_eq!(app.happened.len(), 200);
    app.update(Update::Events(SubscribeItem { missed: 3, events: vec![], ext: vec![] }));
    assert!(shown(&app, 100, 30).iter().any(|row| row.starts_with("Events, latest first, 3 missed")));
}

#[test]
fn a_bar_has_a_column_for_everyone_and_as_many_as_there_are() {
    let models: Vec<_> = (1..40).map(|id| model(id, "m", "#", GIB / 16)).collect();
    let segments = segments(0, &device(), &models);
    assert_eq!(segments.iter().map(|segment| segment.bytes).sum::<u64>(), 64 * GIB);
    assert_eq!(segments[26].letter, '*', "there are 26 letters");
    for width in 0..200 {
        let columns = columns(&segments, width);
        assert_eq!(columns.len(), width);
        assert!(columns.is_sorted(), "in order");
        if width > segments.len() {
            let all = segments.iter().enumerate().filter(|(_, segment)| segment.bytes > 0);
            assert!(all.map(|(at, _)| at).all(|at| columns.contains(&at)), "{width}");
        }
    }
    let wild = DeviceMemory { weight_bytes: u64::MAX, taken_bytes: 1, others_bytes: u64::MAX, ..device() };
    assert_eq!(columns(&crate::bar::segments(0, &wild, &models), 50).len(), 50, "numbers that cannot be");
}

#[test]
fn strips_and_texts_are_cut_to_their_place() {
    assert_eq!(strip("#-.>?", 9), "#-.>-", "a letter of a later daemon");
    assert_eq!(strip("####....", 4), "##..");
    assert_eq!(strip("###.#>..", 4), "#->.");
    assert_eq!(strip("", 4), "");
    assert_eq!(
        (cut("abcdef", 4).as_str(), cut("abc", 4).as_str(), cut("abc", 0).as_str()),
        ("abc~", "abc", "")
    );
    assert_eq!(
        (cut("模型模型", 5).as_str(), fit("模型", 6).as_str(), fit("模型", 3).as_str()),
        ("模型~", "模型  ", "模~")
    );
    assert_eq!(printable("a\u{1b}b\u{202e}e\u{301}"), "a\\u{1b}b\\u{202e}e\u{fffd}");
    assert_eq!(
        [0, 99_949, 100_000, 6_000_000, 400_000_000].map(age),
        ["0.0 s", "99.9 s", "1 min", "1 h", "4 d"]
    );
}

#[test]
fn json_has_states_in_snake_case_and_rates() {
    let app = app([sample(), later()]);
    let value = app.sample.as_ref().unwrap().0.to_json(&app.rates, &[], 2);
    assert_eq!(value["devices"][0]["rates"]["tokens_per_second"], 25.0);
    assert_eq!(value["devices"][0]["budget_bytes"], 24 * GIB);
    assert_eq!(value["models"][0]["loading"]["tensors_total"], 9);
    assert_eq!((&value["sequences"][0]["state"], &value["events_missed"]), (&"queued".into(), &2.into()));
    assert!(value["status"].get("ext").is_none() && value["models"][0].get("ext").is_none());
}

#[test]
fn arguments_out_of_range_are_refused() {
    use clap::Parser;
    for interval in ["0", "-1", "0.01", "nan", "inf", "3601", "x"] {
        assert!(
            Arguments::try_parse_from(["rocmforge-top", &format!("--interval={interval}")]).is_err(),
            "{interval}"
        );
    }
    let good = Arguments::try_parse_from(["rocmforge-top", "--interval", "0.5", "--once"]).unwrap();
    assert!(good.once && good.interval.as_millis() == 500);
    crate::command().debug_assert();
}
