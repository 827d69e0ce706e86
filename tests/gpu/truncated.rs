//! Files that lose bytes while a GPU computes with them or their weights load: only that model fails.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::backend::hip::{HipOptions, UploadPath};
use rocmforge::model::Model;
use rocmforge::scheduler::JobError;
use rocmforge::tensor::MapError;
use tempfile::NamedTempFile;

use crate::common::tinystories;
use crate::forge::Random;
use crate::rig::{Answer, Rig, beside_weights, model};

const PROMPT: [u32; 5] = [1, 403, 407, 261, 378];
const TOKENS: u32 = 4;
/// Rounds of 100, by path: on the look-alike a round takes four times as long when copies are staged.
const ROUNDS: [(UploadPath, u64); 3] =
    [(UploadPath::Ring, 20), (UploadPath::Copy, 20), (UploadPath::Registered, 60)];

/// Seed of this run's moments and lengths: ROCMFORGE_TEST_SEED, else a new one each time.
fn seed() -> u64 {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let named = std::env::var("ROCMFORGE_TEST_SEED").ok().map(|text| text.parse().unwrap());
    let seed = named.unwrap_or_else(|| now().as_nanos() as u64);
    println!("ROCMFORGE_TEST_SEED={seed}");
    seed
}

/// A device with room for one model and a quarter: two models that alternate load and evict weights in each step.
fn rig(upload: UploadPath, memory_bytes: u64) -> Option<Rig> {
    Rig::open_with(HipOptions {
        upload,
        memory_bytes,
        upload_threads: 1,
        chunk_bytes: 0,
        ..HipOptions::default()
    })
}

/// A model with its own copy of the file, and that file.
fn copy(id: u64) -> (Arc<Model>, File, NamedTempFile) {
    let path = NamedTempFile::new().unwrap();
    std::fs::copy(tinystories(), path.path()).unwrap();
    let file = File::options().write(true).open(path.path()).unwrap();
    (model(id, path.path()), file, path)
}

fn is_poison(error: &JobError) -> bool {
    matches!(error, JobError::Model(why) if matches!(**why, MapError::Poisoned))
}

/// Answers of both models to simultaneous requests; `meanwhile` runs beside them.
fn both(rig: &Rig, victim: &Arc<Model>, other: &Arc<Model>, meanwhile: impl FnOnce()) -> (Answer, Answer) {
    let asked = (rig.submit(victim, &PROMPT, TOKENS), rig.submit(other, &PROMPT, TOKENS));
    meanwhile();
    (asked.0.finish(), asked.1.finish())
}

#[test]
fn a_file_truncated_at_a_hundred_random_moments_fails_its_model_alone_by_every_way() {
    let Some(roomy) = rig(UploadPath::Ring, 0) else { return };
    let (tiny, mut random) = (tinystories(), Random(seed()));
    let bytes = std::fs::metadata(&tiny).unwrap().len();
    let whole = roomy.ask(&model(1, &tiny), &PROMPT, TOKENS).ids;
    let memory = roomy.handle().snapshot().memory;
    let budget = 2 * beside_weights(&memory) + memory.weights * 5 / 4;
    drop(roomy);
    for (path, rounds) in ROUNDS {
        let rig = rig(path, budget).unwrap();
        let other = model(1, &tiny);
        let begun = Instant::now();
        let (twin, _file, _path) = copy(2);
        let (first, second) = both(&rig, &twin, &other, || ());
        assert_eq!(
            (first.ids, second.ids),
            (whole.clone(), whole.clone()),
            "{:?} {:?}",
            first.end,
            second.end
        );
        rig.handle().model_gone(twin.id);
        let longest = begun.elapsed().as_micros() as u64;
        let (mut failed, mut uploads) = (0, 0);
        for round in 0..rounds {
            let (victim, file, _path) = copy(3 + round);
            let moment = Duration::from_micros(random.draw() % longest);
            let left = random.draw() % bytes;
            let before = rig.handle().snapshot().device.uploads;
            let (cut, kept) = both(&rig, &victim, &other, || {
                std::thread::sleep(moment);
                file.set_len(left).unwrap();
            });
            let what = format!("{path:?}, round {round}: {left} of {bytes} bytes left after {moment:?}");
            assert_eq!(kept.ids, whole, "{what}: the other model's answer: {:?}", kept.end);
            match &cut.end {
                Ok(_) => assert_eq!(cut.ids, whole, "{what}: it ended before the cut with another answer"),
                Err(error) => {
                    failed += 1;
                    assert!(is_poison(error), "{what}: {error}");
                    assert!(whole.starts_with(&cut.ids), "{what}: {:?} before it failed", cut.ids);
                }
            }
            uploads += rig.handle().snapshot().device.uploads - before;
            assert!(matches!(victim.files.check_unchanged(), Err(MapError::Poisoned)), "{what}");
            rig.handle().model_gone(victim.id);
        }
        println!("{path:?}: {failed} of {rounds} rounds failed, {uploads} uploads, {:?}", begun.elapsed());
        assert!(failed > 0 && uploads > rounds, "{failed} failed, {uploads} uploads: no round hit a load");
        // A new request to the cut model is refused with the reason, whatever is resident.
        let (late, file, _path) = copy(2);
        assert_eq!(rig.ask(&late, &PROMPT, TOKENS).ids, whole);
        file.set_len(bytes / 3).unwrap();
        rig.ask(&other, &PROMPT, TOKENS);
        let refused = rig.ask(&late, &PROMPT, TOKENS).end.unwrap_err();
        assert!(is_poison(&refused) && refused.to_string().contains("lost bytes"), "{refused}");
        for gone in [&late, &other] {
            rig.handle().model_gone(gone.id);
        }
        assert!(
            rig.comes(|s| s.memory.weights == 0 && s.memory.kv == 0),
            "{path:?}: memory was left on the device"
        );
        assert_eq!(
            rig.ask(&model(1, &tiny), &PROMPT, TOKENS).ids,
            whole,
            "the device gave a wrong answer afterwards"
        );
    }
}
