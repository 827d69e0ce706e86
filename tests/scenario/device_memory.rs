//! Models' weights on a device, as clients see and change them.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use rocmforge_client::wire::{
    self, Credit, ErrorCode, EventEntry, EventKind, Fit, LoadToDeviceEnd, Op, Preload, Residency,
    ResidencyEntry, ResidencyReply, Rules, SetRulesRequest, SubscribeItem, SubscribeRequest,
};
use rocmforge_client::{Client, ClientError, Events, Options, ServerTrust};
use rustix::process::Signal;

use crate::child;
use crate::common;
use crate::device::{on_gpu, on_gpu_with};
use crate::forge::wide_llama;
use crate::raw::Raw;
use crate::rig::{PATIENCE, Rig, TINY, answer, code, refusal, story};

const STRANGER: u32 = 54_321;

fn bring(rig: &Rig, what: Preload) -> Result<LoadToDeviceEnd, ClientError> {
    let mut loading = rig.client().preload(TINY, what)?;
    while loading.next_item()?.is_some() {}
    Ok(loading.end().cloned().unwrap())
}

/// The only model with weights on the device.
fn only(reply: ResidencyReply) -> ResidencyEntry {
    assert_eq!((reply.models.len(), reply.more), (1, false), "{reply:?}");
    reply.models.into_iter().next().unwrap()
}

fn parts(rig: &Rig) -> String {
    only(rig.client().residency().unwrap()).parts
}

#[test]
fn parts_come_as_asked_for_and_leave_when_told() {
    let Some(mut rig) = on_gpu() else { return };
    let critical = bring(&rig, Preload::Critical).unwrap();
    assert_eq!(
        parts(&rig),
        "##....#",
        "resident parts are not the embedding, the first of five layers and the head"
    );
    bring(&rig, Preload::First(3)).unwrap();
    assert_eq!(parts(&rig), "####..#");
    bring(&rig, Preload::Layers(vec![4])).unwrap();
    assert_eq!(parts(&rig), "####.##");
    let all = bring(&rig, Preload::All).unwrap();
    assert_eq!(parts(&rig), "#######");
    assert!(all.device_bytes > critical.device_bytes && all.tensors > critical.tensors);

    let client = rig.client();
    let reply = client.residency().unwrap();
    let (device, model) = (&reply.devices[0], &reply.models[0]);
    assert_eq!((device.kind.as_str(), device.weight_bytes), ("hip", all.device_bytes));
    assert!(device.budget_bytes >= device.taken_bytes && device.taken_bytes > 0, "{device:?}");
    assert_eq!((device.load_bytes, device.evictions), (all.device_bytes, 0), "a tensor was loaded twice");
    assert_eq!((model.model.as_str(), model.weight_bytes), (TINY, all.device_bytes));
    assert!(model.idle_ms.is_some() && model.sequences == 0 && model.eviction_place == 1, "{model:?}");

    let left = client.evict_weights(Some(TINY)).unwrap();
    assert_eq!((left.parts, left.device_bytes), (7, all.device_bytes));
    let reply = client.residency().unwrap();
    assert_eq!((reply.devices[0].weight_bytes, reply.devices[0].evictions), (0, 7));
    assert_eq!(only(reply).parts, ".......");
    assert_eq!(client.evict_weights(None).unwrap().device_bytes, 0, "a second clear freed memory");
    rig.assert_serves();
    assert_eq!(parts(&rig), "#######", "a request did not load all weights again");
    assert_eq!(client.evict_weights(None).unwrap().parts, 7);
}

#[test]
fn weights_that_cannot_be_loaded_are_refused_with_numbers() {
    let Some(rig) = on_gpu_with("memory_mib = 26") else { return };
    let error = refusal(bring(&rig, Preload::Layers(vec![0, 5])));
    assert_eq!(error.code, ErrorCode::InvalidArgument as u16);
    assert_eq!(error.message, "the model has no layer 5: it has 5 layers, counted from 0");
    let detail: Vec<_> = error.detail.iter().map(|d| (d.key.as_str(), d.value.as_str())).collect();
    assert_eq!(detail, [("layer", "5"), ("layers", "5")]);

    // Two layers of 9 MiB each.
    std::fs::write(rig.model("wide"), wide_llama(7).build().bytes).unwrap();
    let mut loading = rig.client().preload_all("wide").unwrap();
    let error = refusal(loading.find_map(Result::err).map_or(Ok(()), Err));
    assert_eq!((error.code, error.retryable), (ErrorCode::OutOfMemory as u16, true), "{error}");
    let number = |key: &str| {
        let entry = error.detail.iter().find(|entry| entry.key == key).expect(key);
        entry.value.parse::<u64>().unwrap()
    };
    let (need, free, budget) = (number("need_bytes"), number("free_bytes"), number("budget_bytes"));
    assert!(need > free && budget == 26 << 20, "{error}");
    assert!(error.message.contains(" of 26.0 MiB are free; the model itself has "), "{error}");
    assert!(error.message.contains("raise device.memory_mib"), "{error}");
    assert_eq!(code(rig.client().evict_weights(Some("nobody"))), ErrorCode::ModelNotFound as u16);
    assert_eq!(code(rig.client().plan("nobody", 0)), ErrorCode::ModelNotFound as u16);
}

#[test]
fn a_plan_comes_true() {
    let Some(rig) = on_gpu() else { return };
    let client = rig.client();
    let before = client.plan(TINY, 100).unwrap();
    assert_eq!((before.fit, before.resident_bytes, before.context_tokens), (Fit::Whole, 0, 100));
    assert!(before.kv_bytes > 0 && before.scratch_bytes > 0 && before.load_ms.is_none(), "{before:?}");
    assert_eq!(client.residency().unwrap().devices[0].weight_bytes, 0, "a plan loaded weights");
    let all = bring(&rig, Preload::All).unwrap();
    assert_eq!(before.weight_bytes, all.device_bytes);
    let after = client.plan(TINY, 0).unwrap();
    assert_eq!(after.resident_bytes, all.device_bytes);
    assert!(after.load_ms.is_none_or(|ms| ms == 0), "the plan still wants to load: {after:?}");
    assert_eq!(
        after.context_tokens,
        client.show(TINY, false).unwrap().context_length,
        "the plan's default is not the longest context"
    );
    assert!(after.kv_bytes > before.kv_bytes);
    answer(&client, &story(4)).unwrap();
    let there = only(client.residency().unwrap());
    assert_eq!(there.scratch_bytes, before.scratch_bytes);
}

#[test]
fn where_weights_are_read_in_place_there_is_no_memory_to_plan() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let client = rig.client();
    let plan = client.plan(TINY, 0).unwrap();
    assert_eq!((plan.fit, plan.budget_bytes, plan.kv_bytes), (Fit::Whole, 0, 0));
    let bytes = [
        plan.weight_bytes,
        plan.resident_bytes,
        plan.scratch_bytes,
        plan.available_bytes,
        plan.leaving_bytes,
    ];
    assert_eq!((bytes, plan.leaving.len(), plan.load_ms), ([0; 5], 0, None));
    let longest = plan.context_tokens;
    assert_eq!(client.plan(TINY, longest).unwrap().context_tokens, longest);
    let refused = refusal(client.plan(TINY, longest + 1));
    assert_eq!(refused.code, ErrorCode::LimitExceeded as u16);
    let says = format!("{} tokens cannot be served: the model has {longest}", longest + 1);
    assert!(refused.message.contains(&says), "{refused}");
    rig.assert_serves();
    let reply = client.residency().unwrap();
    assert_eq!((reply.devices[0].kind.as_str(), reply.devices[0].budget_bytes), ("cpu", 0));
    let model = only(reply);
    assert_eq!((model.model.as_str(), model.parts.as_str(), model.weight_bytes), (TINY, "#######", 0));
    assert_eq!(client.evict_weights(Some(TINY)).unwrap().device_bytes, 0);
    rig.assert_serves();
}

#[test]
fn events_are_told_as_they_happen() {
    let Some(rig) = on_gpu() else { return };
    let client = rig.client();
    let mut events = client.events().unwrap();
    assert_eq!(events.next_item().unwrap().unwrap(), SubscribeItem::default(), "the first item is not empty");
    bring(&rig, Preload::Critical).unwrap();
    let mut heard = Heard::default();
    // A part that grows after it became resident is reported again.
    let parts = |heard: &Heard, kind| heard.of(kind).map(|event| event.part).collect::<BTreeSet<_>>();
    heard.until(&mut events, |heard| parts(heard, EventKind::Loaded).len() >= 2);
    let brought = BTreeSet::from([1, 6]); // the first layer and the head; embedding rows are read from the file
    assert_eq!(parts(&heard, EventKind::Loaded), brought);
    assert!(heard.0.iter().all(|event| event.model == TINY && event.text.is_empty()), "{heard:?}");
    assert_eq!(heard.count(EventKind::ModelMapped), 1);
    assert!(heard.of(EventKind::Loaded).last().is_some_and(|event| event.parts == 7));
    let left = client.evict_weights(Some(TINY)).unwrap();
    heard.until(&mut events, |heard| heard.count(EventKind::Evicted) >= 3);
    assert_eq!(parts(&heard, EventKind::Evicted), BTreeSet::from([0, 1, 6]));
    assert_eq!(heard.of(EventKind::Evicted).map(|event| event.device_bytes).sum::<u64>(), left.device_bytes);
    client.unload(TINY).unwrap();
    heard.until(&mut events, |heard| heard.count(EventKind::ModelUnmapped) == 1);
    assert!(
        heard.of(EventKind::ModelUnmapped).all(|event| event.model == TINY),
        "an unmap event lacks the model's name"
    );
    drop(events);
    rig.assert_idle();
}

/// The events received so far.
#[derive(Debug, Default)]
struct Heard(Vec<EventEntry>);

impl Heard {
    fn of(&self, kind: EventKind) -> impl Iterator<Item = &EventEntry> {
        self.0.iter().filter(move |event| event.kind == kind)
    }

    fn count(&self, kind: EventKind) -> usize {
        self.of(kind).count()
    }

    fn until(&mut self, events: &mut Events, enough: impl Fn(&Self) -> bool) {
        while !enough(self) {
            let item = events.next_item().unwrap().expect("the event stream ended");
            assert_eq!(item.missed, 0);
            self.0.extend(item.events);
        }
    }
}

fn item(raw: &mut Raw) -> SubscribeItem {
    let (header, payload) = raw.receive();
    assert_eq!(header.known_op(), Some(Op::Item), "{header:?}");
    wire::decode(&payload).unwrap()
}

#[test]
fn a_client_that_does_not_listen_is_told_how_much_it_missed() {
    let Some(mut rig) = on_gpu() else { return };
    let mut raw = Raw::connect(&rig);
    raw.send(1, Op::Subscribe, &SubscribeRequest::default());
    let first: SubscribeItem = item(&mut raw);
    assert_eq!(first, SubscribeItem::default());
    // Six parts load (the embedding stays in the file) and seven are evicted. Each gives an item until the credit is
    // used up; then the daemon keeps some 1024 events.
    let client = rig.client();
    let times = 32 + 1024 / 13 + 40;
    for _ in 0..times {
        bring(&rig, Preload::All).unwrap();
        client.evict_weights(Some(TINY)).unwrap();
    }
    rig.assert_serves();
    raw.send(1, Op::Credit, &Credit { items: 4096, ext: vec![] });
    let (mut missed, mut told) = (0, 0);
    while missed + told < times * 13 {
        let item = item(&mut raw);
        missed += item.missed;
        told +=
            item.events.iter().filter(|event| event.id != 0 && event.kind != EventKind::ModelMapped).count()
                as u64;
    }
    assert!(missed > 0, "no events were reported missed; {told} were delivered");
}

#[test]
fn subscribers_are_told_of_a_file_that_lost_bytes_and_of_the_end() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'");
    rig.assert_serves();
    let client = rig.client();
    let mut events = client.events().unwrap();
    events.next_item().unwrap();
    let running = rig.client();
    let mut generation = running.generate(&story(400)).unwrap();
    generation.next_item().unwrap();
    File::options().write(true).open(rig.model(TINY)).unwrap().set_len(4096).unwrap();
    let failed =
        generation.find_map(Result::err).expect("the answer did not fail although its file lost bytes");
    assert_eq!(failed.code(), Some(ErrorCode::ModelCorrupt as u16), "{failed}");
    let mut heard = Heard::default();
    heard.until(&mut events, |heard| heard.count(EventKind::ModelPoisoned) == 1);
    assert!(heard.of(EventKind::ModelPoisoned).all(|event| event.model == TINY && !event.text.is_empty()));
    rig.signal(Signal::TERM);
    while events.next_item().unwrap().is_some() {}
    assert!(events.end().is_some(), "the stream has no end although the daemon ended");
    assert!(rig.ended().success());
}

#[test]
fn events_name_models_that_were_mapped_before_and_are_gone() {
    let mut rig = Rig::start_with("[device]\nbackend = 'cpu'");
    rig.assert_serves();
    let client = rig.client();
    let mut events = client.events().unwrap();
    events.next_item().unwrap();
    rig.client().unload(TINY).unwrap();
    let mut heard = Heard::default();
    heard.until(&mut events, |heard| heard.count(EventKind::ModelUnmapped) == 1);
    assert!(heard.of(EventKind::ModelUnmapped).all(|event| event.model == TINY), "{heard:?}");
}

#[test]
fn rules_hold_until_they_are_changed() {
    let Some(rig) = on_gpu_with("memory_mib = 40") else { return };
    for name in ["first", "second"] {
        std::fs::write(rig.model(name), wide_llama(7).build().bytes).unwrap();
    }
    let client = rig.client();
    let all = |name: &str| {
        let mut loading = rig.client().preload_all(name).unwrap();
        loading.find_map(Result::err).map_or(Ok(()), Err)
    };
    let parts = |name: &str| {
        let models = client.residency().unwrap().models;
        models.into_iter().find(|model| model.model == name).map(|model| model.parts).unwrap()
    };
    let pinned = client.pin("first").unwrap();
    assert!(pinned.rules.pinned, "{pinned:?}");
    assert!(pinned.host_pinned, "a pin by the daemon's own user was not allowed to lock memory");
    assert_eq!(client.show("first", false).unwrap().host.wanted, Residency::Lock);
    all("first").unwrap();
    let refused = refusal(all("second"));
    assert_eq!(refused.code, ErrorCode::OutOfMemory as u16);
    assert!(refused.message.contains("1 other model 18.5 MiB (18.5 MiB pinned)"), "{refused}");
    assert_eq!(parts("first"), "####", "a pinned model lost weights");
    eventually("loads in flight have completed", || !parts("second").contains('>'));
    assert!(client.evict_weights(None).unwrap().parts > 0);
    assert_eq!(
        (parts("first").as_str(), parts("second").as_str()),
        ("####", "...."),
        "a clear did not keep exactly the pinned weights"
    );

    let kept = SetRulesRequest { model: "first".into(), layers_min: Some(1), ..Default::default() };
    client.set_rules(&kept).unwrap();
    let unpinned = client.unpin("first").unwrap();
    assert_eq!(unpinned.rules, Rules { layers_min: 1, ..Rules::default() });
    assert_eq!(client.show("first", false).unwrap().host.wanted, Residency::None);
    let _ = all("second");
    assert!(
        parts("first").starts_with("##."),
        "the embedding and the first layer were evicted: {}",
        parts("first")
    );
    let idle =
        SetRulesRequest { model: "first".into(), idle_s: Some(1), layers_min: Some(0), ..Default::default() };
    assert_eq!(client.set_rules(&idle).unwrap().rules.idle_s, 1);
    eventually("the idle model's weights are evicted", || parts("first") == "....");
}

#[track_caller]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The second user's process of [`another_users_weights_are_seen_and_stay`].
#[test]
fn another_user() {
    let Some((socket, _)) = child::inside() else { return };
    let client = Client::new(Options { socket, trust: ServerTrust::Anyone, ..Options::default() });
    let models = client.residency().unwrap().models;
    let names: Vec<_> = models.iter().map(|model| model.model.as_str()).collect();
    assert_eq!(names, [TINY], "another user's passed model must not be listed");
    assert!(client.plan(TINY, 0).is_ok(), "a plan was refused");
    assert_eq!(code(client.plan("private", 0)), ErrorCode::ModelNotFound as u16);
    let error = refusal(client.evict_weights(Some(TINY)));
    assert_eq!(error.code, ErrorCode::Forbidden as u16);
    assert!(error.message.contains("is also other users'"), "{error}");
    let error = refusal(client.evict_weights(None));
    assert_eq!(error.code, ErrorCode::Forbidden as u16);
    assert_eq!(code(client.evict_weights(Some("private"))), ErrorCode::ModelNotFound as u16);
    assert_eq!(code(client.pin(TINY)), ErrorCode::Forbidden as u16);
    // A file of one's own is one's own.
    client.load_file(&common::tinystories(), Some("own")).unwrap();
    assert!(
        client.evict_weights(Some("own")).is_ok(),
        "a user could not clear a model that only this user loaded"
    );
    let pinned = client.pin("own").unwrap();
    assert!(pinned.rules.pinned && !pinned.host_pinned, "{pinned:?}");
    assert!(pinned.host_reason.contains("administrator"), "{pinned:?}");
    println!("\nDONE well");
}

#[test]
fn another_users_weights_are_seen_and_stay() {
    if !rustix::process::geteuid().is_root() {
        common::skip("only root can act as two users");
        return;
    }
    let rig = Rig::start_with("[device]\nbackend = 'cpu'");
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(rig.dir.path(), 0o755);
    open(&rig.socket(), 0o666);
    let client = rig.client();
    client.load(TINY).unwrap();
    bring(&rig, Preload::All).unwrap();
    let mine = rig.dir.path().join("mine.gguf");
    std::fs::copy(common::tinystories(), &mine).unwrap();
    client.load_file(&mine, Some("private")).unwrap();
    client.preload_all("private").unwrap().for_each(|item| drop(item.unwrap()));
    let mut names: Vec<_> = client.residency().unwrap().models.into_iter().map(|model| model.model).collect();
    names.sort_unstable(); // numbers of models, and so their order, tell nothing
    assert_eq!(names, ["private", TINY]);

    let mut other = child::Process::start_as("device_memory::another_user", &rig.socket(), "", |command| {
        command.uid(STRANGER).gid(STRANGER);
    });
    other.go();
    assert_eq!(other.line("DONE "), "well");
}

#[test]
fn weights_that_the_configuration_wants_are_there_before_a_request() {
    let wanted = format!(
        "[weights.models]\n{TINY:?} = {{ preload = 'all', pinned = true, priority = 3, layers_min = 2 }}\nmissing = {{}}"
    );
    let Some(rig) = on_gpu_with(&wanted) else { return };
    let there = whole(&rig);
    assert_eq!((there.model.as_str(), there.sequences, there.eviction_place), (TINY, 0, 0));
    assert_eq!((there.rules.pinned, there.rules.priority, there.rules.layers_min), (true, 3, 2));

    // A reload applies changed entries. Clients' changes to the other entries stay.
    std::fs::copy(rig.model(TINY), rig.model("second")).unwrap();
    let mut config = std::fs::read_to_string(rig.config()).unwrap();
    let first = config.lines().find(|line| line.starts_with('"')).unwrap().to_owned();
    config = config.replace("missing = {}", "second = { priority = 9 }");
    let mine = SetRulesRequest { model: TINY.into(), priority: Some(7), ..Default::default() };
    rig.client().set_rules(&mine).unwrap();
    rig.reload(&config);
    let rules = |name: &str| {
        let models = rig.client().residency().unwrap().models;
        models.into_iter().find(|model| model.model == name).map(|model| model.rules)
    };
    eventually("the other model has its new rules", || {
        rules("second").is_some_and(|rules| rules.priority == 9)
    });
    assert_eq!(rules(TINY).unwrap().priority, 7, "the reload reset rules whose entry did not change");
    rig.reload(&config.replace(&first, ""));
    eventually("the removed entry's rules are the defaults", || rules(TINY) == Some(Rules::default()));
    assert_eq!(whole(&rig).model, TINY, "the model was evicted although there is room");
    assert_eq!(rules("second").unwrap().priority, 9);
}

/// Waits until all weights of a model are resident; returns that model.
fn whole(rig: &Rig) -> ResidencyEntry {
    let until = Instant::now() + PATIENCE;
    loop {
        let models = rig.client().residency().unwrap().models;
        let there =
            models.into_iter().find(|model| model.parts.chars().all(|part| part == wire::PART_RESIDENT));
        match there {
            Some(there) => return there,
            None => assert!(Instant::now() < until, "the weights did not become resident"),
        }
    }
}
