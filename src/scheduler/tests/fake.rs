//! A backend whose next token is a hash of all tokens in the pages of its page table, in order of position.
//! So a wrong page, position, row or sequence changes the answer. [`next_token`] computes the right answer without the
//! backend. The backend also checks the order of parts, and that no two sequences of a step write the same page.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::memory::Memory;
pub use super::memory::page_bytes;
use super::states::{States, words_of};
use super::step::Step;
pub use super::tokens::*;
use crate::backend::*;
use crate::program::{Op, Program, TensorId};
use crate::tensor::{DType, LazyTensor};

/// A fault that a test plants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    PanicInAttention,
    PanicInAttentionAndClose,
    PanicInRelease,
    /// As `PanicInRelease`, and no device can be opened afterwards.
    LoseDevice,
    /// As `LoseDevice`, but opening the device panics.
    LoseDeviceByPanic,
    FailInHead,
    /// The step reaches the head and lacks an expert that it was launched without a look at.
    LackInHead,
    FailInOpen,
}

#[derive(Debug, Default)]
struct State {
    fault: Option<Fault>,
    /// Tokens of every written page, by slot and page number; unwritten positions are `None`.
    pages: HashMap<(u32, u32), [Option<u32>; KV_PAGE_TOKENS]>,
    slots: HashMap<u32, (Arc<Program>, StepLimits)>,
    slots_made: u32,
    opened: u32,
    loads: Vec<String>,
    /// Steps wait until this many are allowed.
    allowed: Option<u64>,
    steps: u64,
    /// Rows of all steps.
    rows: usize,
    /// The engine is blocked in `begin_step`.
    held: bool,
    /// Numbers of the drawn tokens.
    draws: Vec<u32>,
    /// How many parts ahead the device loads.
    ahead: usize,
    /// Called once, in attention of this layer.
    in_attention: Option<(u32, Hook)>,
    /// The wait for weights that the next step reports.
    load_wait: Duration,
    /// Time of each part, by slot.
    part_times: HashMap<u32, (Duration, Duration)>,
    suspensions: usize,
    beside: usize,
    /// Pages copied so far.
    copies: usize,
    /// Weights are read in the mapped file.
    in_place: bool,
    /// How often each part pauses.
    pauses: u32,
    /// Recurrent states.
    states: States,
    /// Models whose steps take a tenth of the time, and whether they draw other tokens now and then.
    small: Vec<(Arc<Program>, bool)>,
    /// Time of a step and of each row, on the engine's own clock.
    step_times: Option<(Duration, Duration)>,
}

impl State {
    /// Moves the clock of the engine's thread by the time of a slot's step with so many rows, or starts it.
    fn tell_time(&self, of: Option<(ModelSlot, usize)>) {
        let Some((step, row)) = self.step_times else { return };
        crate::lock::clock::advance(of.map_or(Duration::ZERO, |(slot, rows)| {
            (step + row * rows as u32) / if self.small(slot).is_some() { 10 } else { 1 }
        }));
    }

    /// Whether a small model is wrong now and then; `None` for others.
    fn small(&self, slot: ModelSlot) -> Option<bool> {
        let (program, _) = self.slots.get(&slot.0)?;
        self.small.iter().find(|(small, _)| Arc::ptr_eq(small, program)).map(|(_, wrong)| *wrong)
    }

    /// Gives memory to those of these pages that have none.
    fn give_memory(&self, slot: ModelSlot, pages: &[u32], memory: &Memory) -> Result<(), BackendError> {
        let absent: BTreeSet<u32> =
            pages.iter().copied().filter(|page| !self.pages.contains_key(&(slot.0, *page))).collect();
        memory.take_pages(absent.len() as u64 * page_bytes(&self.slots[&slot.0].0))
    }
}

struct Hook(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a hook")
    }
}

/// The test's side of a fake device.
#[derive(Clone, Debug, Default)]
pub struct Control(Arc<(Mutex<State>, Condvar)>, Memory);

impl Control {
    /// A device whose steps take this time and this for each row, by the clock of the engine's thread.
    pub fn timed(step: Duration, row: Duration) -> Self {
        let control = Self::default();
        control.0.0.lock().step_times = Some((step, row));
        control
    }

    /// A device whose models have recurrent states.
    pub fn recurrent() -> Self {
        let control = Self::default();
        control.0.0.lock().states.begin();
        control
    }

    /// Number of recurrent states with memory.
    pub fn states(&self) -> usize {
        self.0.0.lock().states.count()
    }

    pub fn factory(&self) -> impl Fn() -> Result<Box<dyn Backend>, BackendError> + Send + 'static {
        let control = self.clone();
        move || {
            assert!(control.take(&[Fault::LoseDeviceByPanic]).is_none(), "planted in the factory");
            if control.take(&[Fault::LoseDevice]).is_some() {
                return Err(BackendError::Start { what: "the device", source: cause("it is gone") });
            }
            let mut state = control.0.0.lock();
            state.tell_time(None);
            state.opened += 1;
            state.slots.clear();
            state.pages.clear();
            state.states.clear();
            control.1.free_all_pages();
            drop(state);
            Ok(Box::new(Fake { control: control.clone(), step: None, suspended: Vec::new() }))
        }
    }

    /// Makes the steps of a model take a tenth of the time. If it is `wrong`, it draws other tokens now and then.
    pub fn is_small(&self, program: &Arc<Program>, wrong: bool) {
        self.0.0.lock().small.push((Arc::clone(program), wrong));
    }

    /// The device's memory.
    pub fn memory(&self) -> &Memory {
        &self.1
    }

    /// Makes loads begin this many parts ahead.
    pub fn load_ahead_always(&self, ahead: usize) {
        self.0.0.lock().ahead = ahead;
    }

    pub fn fault(&self, fault: Fault) {
        self.0.0.lock().fault = Some(fault);
    }

    /// Lets `steps` more steps run, then blocks the engine in `begin_step`.
    pub fn allow(&self, steps: u64) {
        let mut state = self.0.0.lock();
        state.allowed = Some(state.steps + steps);
        state.held = false;
        self.0.1.notify_all();
    }

    /// Waits until the engine is blocked before a step that is not allowed.
    pub fn wait_held(&self) {
        let mut state = self.0.0.lock();
        while !state.held {
            self.0.1.wait(&mut state);
        }
    }

    pub fn release(&self) {
        self.0.0.lock().allowed = None;
        self.0.1.notify_all();
    }

    /// Counts of pages with tokens, of open slots, and of device openings.
    pub fn holds(&self) -> (usize, usize, u32) {
        let state = self.0.0.lock();
        (state.pages.len(), state.slots.len(), state.opened)
    }

    /// Makes loads begin this many parts ahead. Attention of `layer` calls `hook` when it next runs.
    pub fn load_ahead(&self, ahead: usize, layer: u32, hook: impl FnOnce() + Send + 'static) {
        let mut state = self.0.0.lock();
        (state.ahead, state.in_attention) = (ahead, Some((layer, Hook(Box::new(hook)))));
    }

    /// Makes the next step take this long in attention and report it as a wait for weights.
    pub fn wait_for_weights(&self, time: Duration) {
        let mut state = self.0.0.lock();
        state.load_wait = time;
        state.in_attention = Some((0, Hook(Box::new(move || std::thread::sleep(time)))));
    }

    /// Makes each part of a slot's steps take this long. Slots have numbers from 1 on.
    pub fn slow_down(&self, slot: u32, part: Duration) {
        self.slow_rows(slot, part, Duration::ZERO);
    }

    /// As [`Control::slow_down`], and so much longer for each row.
    pub fn slow_rows(&self, slot: u32, part: Duration, row: Duration) {
        self.0.0.lock().part_times.insert(slot, (part, row));
    }

    /// Makes each part pause so often, each time after the slot's time of a part.
    pub fn pause_inside_parts(&self, times: u32) {
        self.0.0.lock().pauses = times;
    }

    /// Makes the engine read pages before steps use them.
    pub fn read_in_place(&self) {
        self.0.0.lock().in_place = true;
    }

    /// How many pages were copied.
    pub fn copies(&self) -> usize {
        self.0.0.lock().copies
    }

    /// How many steps began beside a suspended one.
    pub fn beside(&self) -> usize {
        self.0.0.lock().beside
    }

    /// How often a step was suspended.
    pub fn suspensions(&self) -> usize {
        self.0.0.lock().suspensions
    }

    /// Rows of all steps so far.
    pub fn rows(&self) -> usize {
        self.0.0.lock().rows
    }

    /// Numbers of the tokens that were drawn, in order.
    pub fn draws(&self) -> Vec<u32> {
        self.0.0.lock().draws.clone()
    }

    /// Whether the planted fault has not happened yet.
    pub fn has_fault(&self) -> bool {
        self.0.0.lock().fault.is_some()
    }

    pub fn loads(&self) -> Vec<String> {
        self.0.0.lock().loads.clone()
    }

    fn take(&self, faults: &[Fault]) -> Option<Fault> {
        let mut state = self.0.0.lock();
        match state.fault {
            Some(fault) if faults.contains(&fault) => state.fault.take(),
            _ => None,
        }
    }
}

struct Fake {
    control: Control,
    /// The step in progress.
    step: Option<Step>,
    suspended: Vec<Step>,
}

impl Fake {
    fn resume(&mut self, slot: ModelSlot, beside: bool) -> Result<(), BackendError> {
        let at = self.suspended.iter().position(|step| step.slot == slot && step.beside == beside);
        let at = at.ok_or(BackendError::OutOfOrder("no step of the model was suspended"))?;
        self.step = Some(self.suspended.remove(at));
        Ok(())
    }

    fn begin(&mut self, slot: ModelSlot, batch: &StepBatch<'_>, beside: bool) -> Result<(), BackendError> {
        self.control.1.step_over();
        let mut state = self.control.0.0.lock();
        while state.allowed.is_some_and(|allowed| state.steps >= allowed) {
            state.held = true;
            self.control.0.1.notify_all();
            self.control.0.1.wait(&mut state);
        }
        state.held = false;
        state.steps += 1;
        state.rows += batch.token_ids.len();
        state.tell_time(Some((slot, batch.token_ids.len())));
        let (_, limits) = state.slots.get(&slot.0).expect("the slot is open");
        assert!(batch.token_ids.len() <= limits.rows && batch.logits_rows.len() <= limits.wanted_rows);
        assert_eq!(batch.page_tables.len() % batch.page_table_stride, 0);
        let step = Step::of(slot, batch, beside);
        let written: Vec<u32> =
            (0..step.tokens.len()).map(|row| step.page(row, step.positions[row])).collect();
        state.give_memory(slot, &written, &self.control.1)?;
        let mut writers: HashMap<u32, u32> = HashMap::new();
        for row in 0..step.tokens.len() {
            let position = step.positions[row];
            let writer = *writers.entry(step.page(row, position)).or_insert(step.sequences[row]);
            assert_eq!(writer, step.sequences[row], "two sequences write a page");
            let page = state.pages.entry((slot.0, step.page(row, position))).or_default();
            page[position as usize % KV_PAGE_TOKENS] = Some(step.tokens[row]);
        }
        let State { states, pages, .. } = &mut *state;
        let token = |row: usize, position: u32| {
            pages.get(&(slot.0, step.page(row, position)))?[position as usize % KV_PAGE_TOKENS]
        };
        states.step((slot.0, &self.control.1), batch, token)?;
        drop(state);
        self.step = Some(step);
        Ok(())
    }

    fn attention(&self, layer: u32) {
        let hook = self.control.0.0.lock().in_attention.take_if(|(at, _)| *at == layer);
        if let Some((_, Hook(hook))) = hook {
            hook();
        }
        let wants = [Fault::PanicInAttention, Fault::PanicInAttentionAndClose];
        if layer == 1 && self.control.0.0.lock().fault.is_some_and(|f| wants.contains(&f)) {
            self.control.take(&[Fault::PanicInAttention]); // the other fault panics again in close_model
            panic!("planted in attention, {}", "long ".repeat(100));
        }
    }
}

/// Weights that an operation of a plain decoder reads.
fn tensors_of(op: &Op) -> Vec<TensorId> {
    match *op {
        Op::Embed { table, .. } => vec![table],
        Op::Norm { weight, bias, .. } | Op::Project { weight, bias, .. } => {
            [Some(weight), bias].into_iter().flatten().collect()
        }
        _ => Vec::new(),
    }
}

impl Backend for Fake {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            kind: "fake",
            device: "fake".into(),
            isa: "none".into(),
            threads: 1,
            step_rows: 256,
            sequences: 32,
            activations: ActivationType::F32,
            kv: KvType::F16,
            notes: Vec::new(),
        }
    }

    fn refuses(&self) -> fn(&Program) -> Option<BackendError> {
        |program| {
            let (dtype, tensor) = program.dtypes().into_iter().find(|(dtype, _)| *dtype != DType::F32)?;
            Some(BackendError::Unsupported { tensor: tensor.name().to_owned(), dtype, backend: "fake" })
        }
    }

    fn reads_in_place(&self) -> bool {
        self.control.0.0.lock().in_place
    }

    fn load_tensor(&mut self, tensor: &LazyTensor) -> Result<DeviceTensor, BackendError> {
        self.control.0.0.lock().loads.push(tensor.name().to_owned());
        self.control.1.load(tensor)
    }

    fn retire(&mut self) -> Result<(), BackendError> {
        self.control.1.retire();
        Ok(())
    }

    fn until_decided(&mut self, load: &Arc<dyn DeviceMemory>) -> Result<(), BackendError> {
        self.control.1.until_decided(load)
    }

    fn weight_bytes(&self) -> fn(&LazyTensor) -> u64 {
        LazyTensor::byte_len
    }

    fn memory(&self) -> DeviceMemoryUse {
        self.control.1.in_use()
    }

    fn open_model(
        &mut self,
        program: &Arc<Program>,
        limits: StepLimits,
        _kv_pages: u32,
    ) -> Result<ModelSlot, BackendError> {
        if self.control.take(&[Fault::FailInOpen]).is_some() {
            return Err(BackendError::OutOfMemory { what: "scratch", need_bytes: 1 << 40 });
        }
        assert!(limits.rows > 0 && limits.wanted_rows > 0);
        let mut state = self.control.0.0.lock();
        state.slots_made += 1;
        let slot = state.slots_made;
        state.slots.insert(slot, (Arc::clone(program), limits));
        Ok(ModelSlot(slot))
    }

    fn close_model(&mut self, slot: ModelSlot) {
        self.control.1.step_over();
        assert!(self.control.take(&[Fault::PanicInAttentionAndClose]).is_none(), "planted in close_model");
        let mut state = self.control.0.0.lock();
        let (program, _) = state.slots.remove(&slot.0).expect("the slot is open when it is closed");
        state.states.release(slot.0, None, &self.control.1);
        let before = state.pages.len();
        state.pages.retain(|key, _| key.0 != slot.0);
        self.control.1.free_pages((before - state.pages.len()) as u64 * page_bytes(&program));
    }

    fn release_pages(&mut self, slot: ModelSlot, pages: &[u32]) {
        assert!(self.control.take(&[Fault::PanicInRelease]).is_none(), "planted in release_pages");
        let lost = [Fault::LoseDevice, Fault::LoseDeviceByPanic]; // they fail again in the factory
        assert!(self.control.0.0.lock().fault.is_none_or(|f| !lost.contains(&f)), "planted in release_pages");
        let mut state = self.control.0.0.lock();
        let before = state.pages.len();
        for &page in pages {
            state.pages.remove(&(slot.0, page));
        }
        let gone = (before - state.pages.len()) as u64;
        if let Some((program, _)) = state.slots.get(&slot.0) {
            self.control.1.free_pages(gone * page_bytes(program));
        }
    }

    fn release_states(&mut self, slot: ModelSlot, states: &[u32]) {
        self.control.0.0.lock().states.release(slot.0, Some(states), &self.control.1);
    }

    fn recurrent_bytes(&self) -> fn(&Program) -> u64 {
        self.control.0.0.lock().states.bytes_of()
    }

    fn read_page(&mut self, slot: ModelSlot, page: u32) -> Result<Vec<u8>, BackendError> {
        let state = self.control.0.0.lock();
        let tokens = state.pages.get(&(slot.0, page)).expect("a page that is read was written").iter();
        let mut bytes: Vec<u8> = tokens.flat_map(|t| t.unwrap_or(u32::MAX).to_le_bytes()).collect();
        bytes.resize(page_bytes(&state.slots[&slot.0].0) as usize, 0);
        Ok(bytes)
    }

    fn write_page(&mut self, slot: ModelSlot, page: u32, bytes: &[u8]) -> Result<(), BackendError> {
        let tokens = words_of(bytes).map(|word| (word != u32::MAX).then_some(word));
        let (tokens, mut state) = (tokens.take(KV_PAGE_TOKENS).collect::<Vec<_>>(), self.control.0.0.lock());
        state.give_memory(slot, &[page], &self.control.1)?;
        state.pages.insert((slot.0, page), tokens.try_into().unwrap());
        Ok(())
    }

    fn read_state(&mut self, slot: ModelSlot, state: u32) -> Result<Vec<u8>, BackendError> {
        Ok(self.control.0.0.lock().states.read(slot.0, state))
    }

    fn write_state(&mut self, slot: ModelSlot, state: u32, bytes: &[u8]) -> Result<(), BackendError> {
        self.control.0.0.lock().states.write((slot.0, &self.control.1), state, bytes)
    }

    fn page_layout(&self) -> &'static str {
        "fake"
    }

    fn copy_page(&mut self, slot: ModelSlot, from: u32, to: u32) -> Result<(), BackendError> {
        let mut state = self.control.0.0.lock();
        assert_ne!(from, to, "a page is copied to itself");
        state.give_memory(slot, &[to], &self.control.1)?;
        let page = *state.pages.get(&(slot.0, from)).expect("a page that is copied was written");
        state.pages.insert((slot.0, to), page);
        state.copies += 1;
        Ok(())
    }

    fn kv_page_bytes(&self) -> fn(&Program) -> u64 {
        page_bytes
    }

    fn kv_bytes(&self, slot: ModelSlot) -> u64 {
        self.control.0.0.lock().pages.keys().filter(|key| key.0 == slot.0).count() as u64
    }

    fn begin_step(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.suspended.retain(|step| step.slot != slot); // the new step replaces those that were given up
        self.begin(slot, batch, false)
    }

    fn begin_beside(&mut self, slot: ModelSlot, batch: &StepBatch<'_>) -> Result<(), BackendError> {
        self.suspended.retain(|step| step.slot != slot || !step.beside);
        assert!(self.suspended.iter().any(|step| step.slot == slot), "there is a suspended step");
        self.control.0.0.lock().beside += 1;
        self.begin(slot, batch, true)
    }

    fn parts_ahead(&self) -> usize {
        self.control.0.0.lock().ahead
    }

    fn suspend_step(&mut self) -> Result<(), BackendError> {
        self.control.0.0.lock().suspensions += 1;
        self.suspended.extend(self.step.take());
        Ok(())
    }

    fn resume_step(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        self.resume(slot, false)
    }

    fn resume_beside(&mut self, slot: ModelSlot) -> Result<(), BackendError> {
        self.resume(slot, true)
    }

    fn run(&mut self, part: u32, weights: &Weights<'_>) -> Result<Progress, BackendError> {
        let slot = self.step.as_ref().ok_or(BackendError::Batch("no step"))?.slot;
        let program = self.control.0.0.lock().slots.get(&slot.0).expect("the slot is open").0.clone();
        if part == program.head_part() && self.control.take(&[Fault::FailInHead]).is_some() {
            return Err(BackendError::NotFinite);
        }
        if part == program.head_part() && self.control.take(&[Fault::LackInHead]).is_some() {
            self.step.as_mut().expect("a step is under way").parts.clear();
            return Ok(Progress::Again);
        }
        let part_time = self.control.0.0.lock().part_times.get(&slot.0).copied();
        let rows = self.step.as_ref().map_or(0, |s| s.tokens.len() as u32);
        part_time.into_iter().for_each(|(part, row)| std::thread::sleep(part + row * rows));
        let (step, pauses) =
            (self.step.as_mut().expect("a step is under way"), self.control.0.0.lock().pauses);
        if step.paused < pauses {
            step.paused += 1;
            return Ok(Progress::Paused);
        }
        step.paused = 0;
        let content = &program.parts()[part as usize];
        for op in &content.ops {
            if matches!(op, Op::Attend { .. }) {
                self.attention(part - 1);
            }
            let used = tensors_of(op);
            let loaded = used.iter().map(|id| weights.tensor(*id)).collect::<Result<Vec<_>, _>>()?;
            for (id, loaded) in used.iter().zip(&loaded) {
                let name = program.tensor(*id).expect("a tensor of the program").lazy.name();
                assert_eq!(loaded.tensor.name(), name, "each handle has the number of its tensor");
            }
            self.control.1.unit(loaded)?;
        }
        self.step.as_mut().expect("a step is under way").parts.push(part);
        Ok(Progress::Done)
    }

    fn sample(&mut self, rows: &[SampleRow]) -> Result<Vec<Result<Sampled, BackendError>>, BackendError> {
        let step = self.step.take().ok_or(BackendError::Batch("no step"))?;
        self.control.1.step_over();
        let mut state = self.control.0.0.lock();
        state.draws.extend(rows.iter().map(|row| row.position));
        let (program, _) = state.slots.get(&step.slot.0).expect("the slot is open");
        assert_eq!(step.parts, (0..program.part_count()).collect::<Vec<_>>());
        assert_eq!(rows.len(), step.logits.len());
        let draw = |(sample, &row): (&SampleRow, &u32)| {
            let row = row as usize;
            let last = step.positions[row];
            assert!(sample.position > last, "a shift drops tokens, and their numbers do not come again");
            let token = |position: u32| {
                let page = state.pages.get(&(step.slot.0, step.page(row, position)));
                page.and_then(|p| p[position as usize % KV_PAGE_TOKENS]).expect("every position was computed")
            };
            let tokens: Vec<u32> = (0..=last).map(token).collect();
            if sample.seed == BROKEN_SEED {
                return Err(BackendError::NotFinite);
            }
            let draw = if state.small(step.slot) == Some(true) { wrong_token } else { next_token };
            let vocab = program.vocab();
            let drawn = draw(&tokens, sample.seed, vocab);
            let allowed = |id: &u32| sample.mask.as_ref().is_none_or(|mask| mask.allows(*id));
            let id = (drawn..vocab as u32).chain(0..drawn).find(allowed).expect("a mask allows a token");
            let top = (0..sample.top_logprobs).map(|i| (i, -1.0 - i as f32)).collect();
            Ok(Sampled { id, logprob: -0.5, top, surprise: None })
        };
        Ok(rows.iter().zip(&step.logits).map(draw).collect())
    }

    fn load_wait(&mut self) -> Result<Duration, BackendError> {
        Ok(std::mem::take(&mut self.control.0.0.lock().load_wait))
    }

    fn logits(&mut self, _index: usize) -> Result<Vec<f32>, BackendError> {
        Ok(Vec::new())
    }
}
