//! Steps recorded once and replayed: one submission instead of hundreds.
//!
//! A recorded step serves every later step whose arrays have the same sizes and places. Only the arrays' content
//! differs, and each replay sends it again. A weight that was evicted and loaded elsewhere has another address, so older
//! recordings do not run again. Experts that come and go only change the content of their table.
//!
//! A step is recorded once it has come up several times. Before the first replay counts, its logits are compared with those
//! of the same step launched kernel by kernel. If a bit differs, or recording fails, the device stops replaying and logs the
//! reason.

use std::collections::VecDeque;

use crate::backend::hip::device::wait::Waiter;
use crate::backend::hip::step::Modes;
use crate::backend::hip::step::addresses::{Addresses, Known};
use crate::backend::hip::step::arrays::{Layout, Places};
use crate::backend::hip::step::model::OpenModel;
use crate::backend::hip::step::run::Run;
use crate::backend::hip::{Device, DevicePtr, GraphExec, Stream};
use crate::backend::{BackendError, StepBatch};

/// Recorded steps per model. One more drops the oldest.
const RECORDED_MAX: usize = 32;

/// A step is recorded when it comes up for the third time. With 16 rows of an 8B model recording takes 9 ms on an H100, and a
/// replay saves 1 ms. Between prompts a few steps of answers come up that do not come again for long.
const SIGHTINGS: u32 = 3;

/// Addresses and sizes of a step's arrays.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    layout: Layout,
    places: Places,
    words: usize,
    pages: DevicePtr<u64>,
    splits: Vec<u32>,
    tokens: u32,
    angles: Vec<DevicePtr<f32>>,
}

#[derive(Debug)]
struct Recorded {
    key: Key,
    /// Addresses of each part's weights, by part number.
    known: Vec<Known>,
    exec: GraphExec,
    /// Estimated device memory of the graph.
    bytes: u64,
}

/// Recorded steps of a model.
#[derive(Debug, Default)]
pub struct Graphs {
    recorded: Vec<Recorded>,
    /// Steps that were launched and not recorded yet, and how often.
    sighted: VecDeque<(Key, u32)>,
}

impl Graphs {
    /// Estimated device memory of all recorded steps.
    pub fn bytes(&self) -> u64 {
        self.recorded.iter().map(|recorded| recorded.bytes).sum()
    }

    /// Counts a step that is not recorded; true if it is to be.
    fn sight(&mut self, key: &Key) -> bool {
        let at = self.sighted.iter().position(|(known, _)| known == key);
        let (known, before) = at.and_then(|at| self.sighted.remove(at)).unwrap_or_else(|| (key.clone(), 0));
        let wanted = before + 1 >= SIGHTINGS;
        if !wanted {
            self.sighted.push_back((known, before + 1));
        }
        if self.sighted.len() > RECORDED_MAX {
            self.sighted.pop_front();
        }
        wanted
    }
}

/// State of graph replay on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Replays {
    /// Whether steps may be replayed.
    pub allowed: bool,
    /// Why replay was disabled; `None` while it works or was never allowed.
    pub refused: Option<&'static str>,
    /// Number of steps recorded.
    pub graphs: u64,
    /// Number of steps replayed.
    pub replays: u64,
    /// Number of steps run again, because rows chose experts that were not resident.
    pub repeats: u64,
}

impl Replays {
    fn refuse(&mut self, why: &'static str) {
        self.allowed = false;
        self.refused = Some(why);
        tracing::warn!(why, "graph replay is disabled on this device");
    }
}

/// Rows of the recorded step that fits `rows` rows: the next power of two. `None` for more than are recorded.
pub fn bucket(rows: usize, modes: Modes) -> Option<usize> {
    (1..=modes.thresholds().recorded_max).contains(&rows).then(|| rows.next_power_of_two())
}

/// Whether a step can be recorded: it has few rows, and all of them have logits.
pub fn suits(batch: &StepBatch<'_>, modes: Modes) -> bool {
    bucket(batch.token_ids.len(), modes).is_some() && batch.logits_rows.len() == batch.token_ids.len()
}

/// Runs a step after all its parts were entered. Replays a recording if there is one; else launches the step and
/// records it.
///
/// # Errors
/// [`BackendError`].
pub fn run(
    model: &mut OpenModel,
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
        tokens: run.tokens,
        angles: run.angles.to_vec(),
    };
    let same = |recorded: &&Recorded| recorded.known.iter().eq(model.addresses.iter().map(Addresses::known));
    let known = model.graphs.recorded.iter().find(|recorded| recorded.key == key && same(recorded));
    if let Some(recorded) = known {
        recorded.exec.launch(stream)?;
        replays.replays += 1;
        return Ok(());
    }
    launch_all(model, &run, stream)?;
    waiter.set_busy();
    if !model.graphs.sight(&key) {
        return Ok(());
    }
    let run = model.run(device, stream)?;
    waiter.wait_for_device(device, stream)?;
    if model.lacked(stream)? {
        // Its logits are undefined: nothing to compare a replay with.
        return Ok(());
    }
    let before = not_ours(device)?;
    let Some(exec) = record(model, &run, device, stream, waiter, replays)? else { return Ok(()) };
    replays.graphs += 1;
    // An estimate, because other programs allocate and free too. Only the runtime knows a graph's size, and none
    // reports it.
    let bytes = not_ours(device)?.saturating_sub(before);
    let known = model.addresses.iter().map(|addresses| addresses.known().clone()).collect();
    let recorded = &mut model.graphs.recorded;
    recorded.retain(|old| old.key != key); // Drop the recording with the old weight addresses.
    if recorded.len() >= RECORDED_MAX {
        recorded.remove(0);
    }
    recorded.push(Recorded { key, known, exec, bytes });
    Ok(())
}

/// Records the step that was just launched, and replays it once. `None` if that fails or gives other logits. Then
/// nothing is replayed on this device any more, and the step's results are those of separate launches.
fn record(
    model: &OpenModel,
    run: &Run<'_>,
    device: &Device,
    stream: &Stream,
    waiter: &mut Waiter,
    replays: &mut Replays,
) -> Result<Option<GraphExec>, BackendError> {
    let eager = logits(model, stream)?;
    let captured =
        stream.capture(|| launch_all(model, run, stream)).and_then(|graph| Ok(graph.instantiate()?));
    let exec = match captured {
        Ok(exec) => exec,
        Err(error @ BackendError::DeviceLost { .. }) => return Err(error),
        Err(error) => {
            tracing::warn!(%error, "a step could not be recorded");
            replays.refuse("a step could not be recorded");
            return Ok(None);
        }
    };
    exec.launch(stream)?;
    waiter.set_busy();
    waiter.wait_for_device(device, stream)?;
    if logits(model, stream)? != eager {
        replays.refuse("a replay gave other logits than the same launches one by one");
        launch_all(model, run, stream)?;
        waiter.set_busy();
        return Ok(None);
    }
    Ok(Some(exec))
}

/// Bytes in use on the device outside the arena: by the driver itself and by other programs.
fn not_ours(device: &Device) -> Result<u64, BackendError> {
    let (free, total) = device.memory()?;
    Ok(total.saturating_sub(free).saturating_sub(device.ledger().driver_bytes))
}

fn launch_all(model: &OpenModel, run: &Run<'_>, stream: &Stream) -> Result<(), BackendError> {
    model.arrays.send(stream)?;
    model.launch_all(run)
}

/// Bits of the logits of the step's first and last own row. The same launches compute all rows, and a copy of 16 rows takes some
/// ms.
fn logits(model: &OpenModel, stream: &Stream) -> Result<[Vec<u32>; 2], BackendError> {
    let row = |row: usize| -> Result<Vec<u32>, BackendError> {
        let mut bits = vec![0u32; model.program.vocab()];
        let range = model.logits()?.range(row * bits.len() * 4, bits.len() * 4)?;
        stream.download(range, bits.as_mut_slice())?;
        Ok(bits)
    };
    Ok([row(0)?, row(model.step.logits_rows.saturating_sub(1))?])
}
