//! Model files that change, shrink or disappear while they are mapped.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};

use rocmforge_client::Generation;
use rocmforge_client::wire::{ErrorCode, GenerateRequest, ModelState, Prompt, TokenizeRequest};

use crate::forge::{self, Value, tiny_llama};
use crate::rig::{Rig, TINY, answer, code, collect, maps, story};

/// A request on the model `victim` that waits for credit in the middle of its answer.
fn halfway(rig: &Rig) -> Generation {
    fs::copy(rig.model(TINY), rig.model("victim")).unwrap();
    let request = GenerateRequest { model: "victim".into(), ..story(200) };
    let generation = rig.client().generate(&request).unwrap();
    rig.eventually("the request waits for credit", |_| {
        let sequences = rig.client().ps().unwrap().sequences;
        sequences.iter().any(|s| s.state == rocmforge_client::wire::SequenceState::Stalled)
    });
    generation
}

fn state(rig: &Rig, name: &str) -> ModelState {
    rig.client().list().unwrap().models.into_iter().find(|model| model.name == name).unwrap().state
}

#[test]
fn a_file_truncated_under_a_running_request_fails_that_model_alone() {
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(200)).unwrap();
    let mut running = halfway(&rig);
    let neighbour = rig.client();
    let mut other = neighbour.generate(&story(200)).unwrap();
    OpenOptions::new().write(true).open(rig.model("victim")).unwrap().set_len(20_000).unwrap();
    assert_eq!(code(collect(&mut running)), ErrorCode::ModelCorrupt as u16);
    assert_eq!(collect(&mut other).unwrap(), whole, "the other model's tokens changed");
    let request = GenerateRequest { model: "victim".into(), ..story(200) };
    assert_eq!(code(answer(&rig.client(), &request)), ErrorCode::ModelCorrupt as u16);
    assert_eq!(state(&rig, "victim"), ModelState::Unusable);
    rig.assert_idle();
    // Restored, the model serves again.
    fs::copy(rig.model(TINY), rig.model("victim")).unwrap();
    assert_eq!(answer(&rig.client(), &request).unwrap(), whole);
    rig.assert_serves();
}

/// Draws integers below a bound; the same seed gives the same numbers.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn a_file_truncated_at_a_hundred_random_moments_never_harms_another_model() {
    let seed = std::env::var("ROCMFORGE_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = seed.unwrap_or_else(|| now().as_nanos() as u64 | 1);
    println!("ROCMFORGE_TEST_SEED={seed}");
    let mut draw = Draw(seed);
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(100)).unwrap();
    let bytes = fs::metadata(rig.model(TINY)).unwrap().len();
    let (mut failed, mut finished) = (0, 0);
    for round in 0..100 {
        let (fresh, victim) = (rig.dir.path().join("fresh"), rig.model("victim"));
        fs::copy(rig.model(TINY), &fresh).unwrap();
        fs::rename(&fresh, &victim).unwrap();
        // The range begins before the file is mapped and ends after the last token.
        let moment = std::time::Duration::from_micros(draw.below(60_000));
        let left = draw.below(bytes);
        let request = GenerateRequest { model: "victim".into(), ..story(100) };
        let (asked, neighbour) = std::thread::scope(|scope| {
            let asked = scope.spawn(|| answer(&rig.client(), &request));
            let neighbour = scope.spawn(|| answer(&rig.client(), &story(100)));
            std::thread::sleep(moment);
            OpenOptions::new().write(true).open(&victim).unwrap().set_len(left).unwrap();
            (asked.join().unwrap(), neighbour.join().unwrap())
        });
        assert_eq!(neighbour.unwrap(), whole, "round {round}: the other model's tokens changed");
        match asked {
            Ok(answer) => {
                assert_eq!(answer, whole, "round {round}: a complete answer is wrong");
                finished += 1;
            }
            Err(error) => {
                let found = error.code();
                // A file that was emptied before it was opened is not a model.
                let fits = found == Some(ErrorCode::ModelCorrupt as u16)
                    || (left == 0 && found == Some(ErrorCode::NotAModelFile as u16));
                assert!(fits, "round {round}: {error}");
                failed += 1;
            }
        }
        assert!(rig.is_running(), "round {round}: the daemon died");
    }
    println!("{failed} answers failed, {finished} finished before the cut");
    assert!(failed > 10, "too few answers were hit while they ran: {failed}");
    rig.assert_idle();
    rig.assert_serves();
}

#[test]
fn a_file_that_lost_its_name_or_permissions_serves_on_what_is_mapped() {
    use std::os::unix::fs::PermissionsExt;
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(200)).unwrap();
    let mut running = halfway(&rig);
    fs::set_permissions(rig.model("victim"), fs::Permissions::from_mode(0o000)).unwrap();
    assert_eq!(collect(&mut running).unwrap(), whole, "new permissions changed an open file's answer");
    let request = GenerateRequest { model: "victim".into(), ..story(200) };
    match answer(&rig.client(), &request) {
        Ok(found) => {
            assert!(
                rustix::process::geteuid().is_root(),
                "an unreadable file was opened by a user other than root"
            );
            assert_eq!(found, whole);
        }
        Err(error) => assert_eq!(error.code(), Some(ErrorCode::NotAModelFile as u16), "{error}"),
    }
    fs::remove_file(rig.model("victim")).unwrap();
    let mut running = halfway(&rig);
    fs::remove_file(rig.model("victim")).unwrap();
    assert_eq!(code(answer(&rig.client(), &request)), ErrorCode::ModelNotFound as u16);
    assert_eq!(collect(&mut running).unwrap(), whole, "an unlinked file's answer changed");
    rig.eventually("the victim is unmapped", |status| status.models_mapped == 1);
    rig.assert_serves();
}

#[test]
fn a_replaced_file_serves_new_requests_and_running_ones_finish_on_the_old_one() {
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(200)).unwrap();
    let mut running = halfway(&rig);
    let new = rig.dir.path().join("new");
    fs::write(&new, tiny_llama(3).build().bytes).unwrap();
    fs::rename(&new, rig.model("victim")).unwrap();
    let shown = rig.client().show("victim", false).unwrap();
    assert_eq!(shown.vocab, 263, "the vocabulary is not the new file's");
    assert_eq!(collect(&mut running).unwrap(), whole);
    rig.eventually("the old file is unmapped", |status| status.models_mapped == 2);
    rig.assert_serves();
}

#[test]
fn an_answer_from_a_file_that_was_written_to_does_not_count() {
    let mut rig = Rig::start();
    let mut running = halfway(&rig);
    let mut file = OpenOptions::new().write(true).open(rig.model("victim")).unwrap();
    file.seek(SeekFrom::End(-4)).unwrap();
    file.write_all(&0.5f32.to_le_bytes()).unwrap();
    drop(file);
    assert_eq!(code(collect(&mut running)), ErrorCode::ModelChanged as u16);
    let request = GenerateRequest { model: "victim".into(), ..story(8) };
    answer(&rig.client(), &request).expect("a new request did not get the current file");
    rig.assert_serves();
}

#[test]
fn an_unloaded_model_finishes_what_runs() {
    let mut rig = Rig::start();
    let whole = answer(&rig.client(), &story(200)).unwrap();
    let mut running = halfway(&rig);
    let unloaded = rig.client().unload("victim").unwrap();
    assert_eq!((unloaded.was_mapped, unloaded.draining_sequences), (true, 1));
    assert_eq!(state(&rig, "victim"), ModelState::Draining);
    assert_eq!(collect(&mut running).unwrap(), whole);
    rig.eventually("the victim is unmapped", |status| status.models_mapped == 1);
    assert_eq!(state(&rig, "victim"), ModelState::Registered);
    rig.assert_serves();
}

/// A model whose weights are a hole in the file: all header, no data. 1 GB if its feed-forward networks are 2^19 wide.
pub fn hollow_model(path: &std::path::Path, ffn: u32) -> u64 {
    const LAYERS: u32 = 5;
    let mut model = tiny_llama(5)
        .set("llama.feed_forward_length", Value::u32(ffn))
        .set("llama.block_count", Value::u32(LAYERS));
    let first: Vec<_> = model.tensors.iter().filter(|t| t.name.starts_with(b"blk.0.")).cloned().collect();
    for layer in 2..LAYERS {
        for tensor in &first {
            let name = String::from_utf8(tensor.name.clone()).unwrap();
            let name = name.replace("blk.0.", &format!("blk.{layer}."));
            model.tensors.push(forge::Tensor { name: name.into(), ..tensor.clone() });
        }
    }
    let mut offset = 0;
    for tensor in &mut model.tensors {
        let name = String::from_utf8_lossy(&tensor.name).into_owned();
        if name.contains("ffn_") && !name.contains("norm") {
            let narrow = tensor.dims.iter().position(|dim| *dim == 64).unwrap();
            tensor.dims[narrow] = ffn.into();
        }
        tensor.data = Some(Vec::new());
        tensor.offset = Some(offset);
        offset += (4 * tensor.dims.iter().product::<u64>()).next_multiple_of(32); // F32
    }
    let header = model.build().bytes;
    fs::write(path, &header).unwrap();
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(header.len() as u64 + offset).unwrap();
    header.len() as u64 + offset
}

#[test]
fn a_model_that_was_only_loaded_has_no_weight_in_memory() {
    let mut rig = Rig::start();
    let bytes = hollow_model(&rig.model("hollow"), 1 << 19);
    assert!(bytes >= 800_000_000, "{bytes}");
    let client = rig.client();
    let loaded = client.load("hollow").unwrap();
    println!("ready after {} us", loaded.elapsed_us);
    assert!(loaded.mapped_now);
    // Ready means that the vocabulary answers.
    let request = TokenizeRequest {
        model: "hollow".into(),
        text: "ab".into(),
        add_special: false,
        parse_special: false,
        ext: vec![],
    };
    assert!(!client.tokenize(&request).unwrap().ids.is_empty());
    let shown = client.show("hollow", true).unwrap();
    assert_eq!((shown.layers, shown.ffn), (5, 1 << 19));

    let smaps = maps(rig.pid(), &rig.model("hollow"));
    let value = |key: &str| -> Vec<u64> {
        let lines = smaps.lines().filter_map(|line| line.strip_prefix(key));
        lines.map(|line| line.trim().strip_suffix(" kB").unwrap().parse().unwrap()).collect()
    };
    assert!(value("Size:").iter().sum::<u64>() * 1024 >= bytes, "the file is not mapped as a whole: {smaps}");
    assert_eq!(value("Rss:").iter().sum::<u64>(), 0, "{smaps}");
    rig.assert_serves();
}

#[test]
fn a_passed_file_that_changed_has_to_be_passed_again() {
    let mut rig = Rig::start();
    let mine = rig.dir.path().join("mine.gguf");
    fs::copy(rig.model(TINY), &mine).unwrap();
    let client = rig.client();
    client.load_file(&mine, Some("mine")).unwrap();
    let request = GenerateRequest::new("mine", Prompt::Text("Once".into()));
    let request = GenerateRequest { max_tokens: 4, ..request };
    let first = answer(&client, &request).unwrap();
    let file = File::options().append(true).open(&mine).unwrap();
    file.set_len(file.metadata().unwrap().len() + 1).unwrap();
    assert_eq!(code(answer(&client, &request)), ErrorCode::ModelChanged as u16);
    client.load_file(&mine, Some("mine")).unwrap();
    assert_eq!(answer(&client, &request).unwrap(), first);
    rig.assert_serves();
}
