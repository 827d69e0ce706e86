//! Steps recorded once and replayed: one submission instead of hundreds.
//!
//! A recorded step is good for every later one over arrays of the same sizes in the same places: what differs is in the
//! arrays, which each replay sends anew. A weight that was evicted and came back elsewhere gives its part another generation,
//! so what was recorded before does not run again.
//!
//! Before the first replay counts, its logits are compared with those of the same step launched kernel by kernel. If a bit
//! differs, or recording fails, nothing is replayed on this device any more, and that is told.

use super::arrays::{Layout, Places};
use super::model::Model;
use super::resolve::Addresses;
use super::run::Run;
use super::scratch::GRAPH_ROWS;
use super::wait::Waiter;
use super::{Device, DevicePtr, GraphExec, Stream};
use crate::backend::{BackendError, StepBatch};

/// Recorded steps of a model: the oldest goes when there are more.
const RECORDED_MAX: usize = 32;

/// Where a step's numbers are, and how many.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    layout: Layout,
    places: Places,
    words: usize,
    pages: DevicePtr<u64>,
    splits: Vec<u32>,
    angles: Vec<DevicePtr<f32>>,
}

#[derive(Debug)]
struct Recorded {
    key: Key,
    /// Those of the weights, by number of the part.
    generations: Vec<Option<u64>>,
    exec: GraphExec,
    /// Device memory that it takes: an estimate.
    bytes: u64,
}

/// What a model has recorded.
#[derive(Debug, Default)]
pub struct Graphs {
    recorded: Vec<Recorded>,
}

impl Graphs {
    /// Device memory that they take.
    pub fn bytes(&self) -> u64 {
        self.recorded.iter().map(|recorded| recorded.bytes).sum()
    }
}

/// How replaying goes on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Replays {
    /// Whether steps may be replayed.
    pub allowed: bool,
    /// Why not, after it was tried.
    pub refused: Option<&'static str>,
    /// Steps recorded.
    pub graphs: u64,
    /// Steps replayed.
    pub replays: u64,
}

impl Replays {
    fn refuse(&mut self, why: &'static str) {
        self.allowed = false;
        self.refused = Some(why);
        tracing::warn!(why, "steps are not replayed from graphs on this device any more");
    }
}

/// Rows of a recorded step that has room for `rows`.
pub fn bucket(rows: usize) -> Option<usize> {
    (1..=GRAPH_ROWS).contains(&rows).then(|| rows.next_power_of_two())
}

/// Whether a step can be recorded: few rows, and logits of all of them.
pub fn suits(batch: &StepBatch<'_>) -> bool {
    bucket(batch.token_ids.len()).is_some() && batch.logits_rows.len() == batch.token_ids.len()
}

/// Runs a step of which all parts were entered: replayed where that was recorded, else launched and then recorded.
///
/// # Errors
/// [`BackendError`].
pub fn run(
    model: &mut Model,
    device: &Device,
    stream: &Stream,
    waiter: &mut Waiter,
    replays: &mut Replays,
) -> Result<(), BackendError> {
    model.kv.send_table(device, stream)?;
    let run = model.run(device, stream)?;
    let key = Key {
        layout: run.layout,
        places: run.places,
        words: model.arrays.identity(),
        pages: run.pages,
        splits: run.splits.to_vec(),
        angles: run.angles.to_vec(),
    };
    let generations = || model.addresses.iter().map(Addresses::generation);
    let same = |recorded: &&Recorded| recorded.generations.iter().copied().eq(generations());
    let known = model.graphs.recorded.iter().find(|recorded| recorded.key == key && same(recorded));
    if let Some(recorded) = known {
        recorded.exec.launch(stream)?;
        replays.replays += 1;
        return Ok(());
    }
    launch_all(model, &run, stream)?;
    waiter.set_busy();
    waiter.settle(device, stream)?;
    let eager = logits(model, stream)?;
    let before = not_ours(device)?;
    let captured =
        stream.capture(|| launch_all(model, &run, stream)).and_then(|graph| Ok(graph.instantiate()?));
    let exec = match captured {
        Ok(exec) => exec,
        Err(error @ BackendError::DeviceLost { .. }) => return Err(error),
        Err(error) => {
            tracing::warn!(%error, "a step could not be recorded");
            replays.refuse("a step could not be recorded");
            return Ok(());
        }
    };
    exec.launch(stream)?;
    waiter.set_busy();
    waiter.settle(device, stream)?;
    if logits(model, stream)? != eager {
        replays.refuse("a replay gave other logits than the same launches one by one");
        launch_all(model, &run, stream)?;
        waiter.set_busy();
        return Ok(());
    }
    replays.graphs += 1;
    // Other programs come and go as well: an estimate. Only a runtime knows what its graphs take, and none tells.
    let bytes = not_ours(device)?.saturating_sub(before);
    let generations = generations().collect();
    let recorded = &mut model.graphs.recorded;
    recorded.retain(|old| old.key != key); // its weights are elsewhere now
    if recorded.len() >= RECORDED_MAX {
        recorded.remove(0);
    }
    recorded.push(Recorded { key, generations, exec, bytes });
    Ok(())
}

/// Bytes of the device in use beside what the arena has: by the driver itself, and by other programs.
fn not_ours(device: &Device) -> Result<u64, BackendError> {
    let (free, total) = device.memory()?;
    Ok(total.saturating_sub(free).saturating_sub(device.ledger().driver_bytes))
}

fn launch_all(model: &Model, run: &Run<'_>, stream: &Stream) -> Result<(), BackendError> {
    model.arrays.send(stream)?;
    model.launch_all(run)
}

/// Bits of the logits of the step's own rows, not of those that fill it up.
fn logits(model: &Model, stream: &Stream) -> Result<Vec<u32>, BackendError> {
    let mut bits = vec![0u32; model.step.logits_rows * model.program.vocab()];
    let range = model.logits()?.range(0, bits.len() * 4)?;
    stream.download(range, bits.as_mut_slice())?;
    Ok(bits)
}
