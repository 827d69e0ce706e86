//! Sets every number of a whole model's file to every extreme. Then it opens the file and asks the model as the daemon
//! does: header, tokenizer, template, plan, engine. Each file is refused with a reason or answers; none panics, hangs
//! or takes much memory.
//!
//! `ROCMFORGE_LONG=1` tries all small models, all token lengths and every power of two.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge::backend::Backend;
use rocmforge::backend::cpu::{CpuBackend, CpuOptions};
use rocmforge::model::template::{Message, TemplateRequest, render_unconfined};
use rocmforge::model::tokenizer::EncodeOptions;
use rocmforge::model::{ChatTemplate, Model, ModelError, ModelId};
use rocmforge::scheduler::{
    Engine, EngineHandle, EngineOptions, Event, Job, JobError, Sampling, Steering, StopReason,
};
use rustix::fs::MemfdFlags;
use tokio::sync::mpsc::unbounded_channel;

use crate::allocations::peak_of;
use crate::child;
use crate::forge::{Built, Field, Forge, Value, decoders, tiny_llama};

/// Limit per file: heap while it opens, and growth of resident memory until it has answered.
const BYTES_MAX: usize = 16 << 20;

/// Limit for an answer of two tokens of such a model.
const PATIENCE: Duration = Duration::from_secs(20);

/// Length of an answer, in tokens.
const TOKENS: u32 = 2;

/// The longest context that gets room, as the daemon's budget limits it.
const CONTEXT_MAX: u32 = 256;

/// In the short form, one of this many lengths of token texts is changed: the same line reads them all.
const TEXTS_APART: usize = 25;

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}";

fn long() -> bool {
    std::env::var_os("ROCMFORGE_LONG").is_some_and(|value| value == "1")
}

/// The models whose numbers are changed.
fn models() -> Vec<(String, Forge)> {
    let chat = |forge: Forge| forge.set("tokenizer.chat_template", Value::string(TEMPLATE));
    let mut all = vec![("tiny".to_owned(), chat(tiny_llama(5)))];
    let wanted = decoders().into_iter().filter(|(name, _)| long() || *name == "qwen3moe-yarn");
    all.extend(wanted.map(|(name, forge)| (name.to_owned(), chat(forge))));
    all
}

/// Numbers of a file: those that the forge records, and some elements of its number arrays.
fn fields(built: &Built) -> Vec<Field> {
    let mut fields = built.fields.clone();
    for pair in built.fields.windows(2) {
        let [kind, count] = pair else { continue };
        if !count.what.ends_with("array count") || number(built, kind) == 8 {
            continue; // strings record their lengths as fields
        }
        let elements = number(built, count) as usize;
        for index in [0, 1, 2, 3, 100, elements / 2, elements - 1] {
            let what = format!("{} element {index}", count.what);
            fields.push(Field { what, at: count.at + 8 + 4 * index.min(elements - 1), bytes: 4 });
        }
    }
    let mut texts = 0;
    fields.retain(|field| {
        texts += usize::from(field.what.ends_with("element length"));
        long() || !field.what.ends_with("element length") || texts % TEXTS_APART == 1
    });
    fields
}

fn number(built: &Built, field: &Field) -> u64 {
    let mut raw = [0; 8];
    raw[..field.bytes].copy_from_slice(&built.bytes[field.at..][..field.bytes]);
    u64::from_le_bytes(raw)
}

/// New values for a number: extremes of each width, its neighbours, powers of two, and non-finite floats.
fn extremes(was: u64, bytes: usize, length: u64) -> BTreeSet<u64> {
    let mask = if bytes == 4 { u64::from(u32::MAX) } else { u64::MAX };
    let widths = [u64::from(u8::MAX), u64::from(u16::MAX), u64::from(u32::MAX), u64::MAX];
    let mut all: BTreeSet<u64> = [0, 1, 2, 3].into();
    all.extend(widths.iter().flat_map(|&max| [max, max - 1, max / 2, max / 2 + 1]));
    all.extend([was.wrapping_sub(1), was.wrapping_add(1), was.wrapping_mul(2), was / 2, was.wrapping_neg()]);
    all.extend([length - 1, length, length + 1]);
    let floats = [f32::NAN, f32::INFINITY, -1.0, f32::MIN_POSITIVE, f32::MAX];
    all.extend(floats.map(|float| u64::from(float.to_bits())));
    let step = if long() { 1 } else { 7 };
    all.extend((2..64).step_by(step).map(|bits| 1u64 << bits));
    all.iter().map(|value| value & mask).filter(|&value| value != was).collect()
}

/// A private file in memory, opened read-only as the daemon opens files: `bytes`, then a hole up to `length`.
fn memory_file(bytes: &[u8], length: usize) -> File {
    let mut file = File::from(rustix::fs::memfd_create("changed", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file.set_len(length as u64).unwrap();
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

/// Outcome of a file that opened.
#[derive(Debug, PartialEq)]
enum Asked {
    Answered,
    /// Refused the request with a session's error: no room in the context, or no tokens in the prompt.
    Refused,
}

/// An engine, and the number of models that it has opened.
struct Rig {
    engine: Engine,
    runtime: tokio::runtime::Runtime,
    opened: u64,
}

impl Rig {
    fn new() -> Self {
        let options = EngineOptions { kv_budget_bytes: 64 << 20, ..EngineOptions::default() };
        let factory = || -> Result<Box<dyn Backend>, _> {
            Ok(Box::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() })?))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        Self { engine: Engine::start(options, factory).unwrap(), runtime, opened: 0 }
    }

    /// Opens a file of `length` bytes that begins with `bytes`. `Err` for a panic or too much heap.
    fn open(&mut self, bytes: &[u8], length: usize) -> Result<Result<Arc<Model>, ModelError>, String> {
        self.opened += 1;
        let (file, id) = (memory_file(bytes, length), ModelId(self.opened));
        let open = || peak_of(|| Model::open(id, "changed", vec![file]));
        let (result, heap) =
            catch_unwind(AssertUnwindSafe(open)).map_err(|_| "opening panicked".to_owned())?;
        if heap > BYTES_MAX {
            return Err(format!("opening took {heap} bytes of heap"));
        }
        Ok(result.map(Arc::new))
    }

    /// Opens the header alone, then the whole file, and asks the model. `None` if the header alone is refused.
    fn come(&mut self, bytes: &[u8], header: usize) -> Result<Option<Asked>, String> {
        let length = bytes.len();
        if self.open(&bytes[..header], length)?.is_err_and(|error| !error.to_string().is_empty()) {
            return Ok(None);
        }
        let model = self
            .open(bytes, length)?
            .map_err(|error| format!("opened without its weights, refused with them: {error}"))?;
        self.ask(&model).map(Some)
    }

    /// Asks a model for two tokens, greedily, and closes it.
    fn ask(&mut self, model: &Arc<Model>) -> Result<Asked, String> {
        let engine = self.engine.handle();
        let asked = job(&engine, model).map_or(Ok(Asked::Refused), |job| self.answer(&engine, job));
        engine.model_gone(model.id);
        asked
    }

    fn answer(&self, engine: &EngineHandle, mut job: Job) -> Result<Asked, String> {
        let (sender, mut events) = unbounded_channel();
        job.events = sender;
        let vocab = job.model.plan.program.vocab();
        match engine.submit(job) {
            Ok(()) => {}
            Err(error) => return refused(&error),
        }
        let mut tokens = 0;
        loop {
            let next = async { tokio::time::timeout(PATIENCE, events.recv()).await };
            match self.runtime.block_on(next).map_err(|_| "no event for 20 s".to_owned())? {
                Some(Event::Tokens(batch)) => {
                    tokens += batch.ids.len();
                    if let Some(id) = batch.ids.iter().find(|&&id| id as usize >= vocab) {
                        return Err(format!("token {id} of a vocabulary of {vocab}"));
                    }
                }
                Some(Event::Done(outcome)) => {
                    let whole = tokens == TOKENS as usize || outcome.reason == StopReason::ContextFull;
                    return if whole { Ok(Asked::Answered) } else { Err(format!("{outcome:?}")) };
                }
                Some(Event::Failed(error)) => return refused(&error),
                None => return Err("the engine ended the request without a last event".to_owned()),
            }
        }
    }
}

/// Classifies an error: a panic, an internal error or an empty text is a fault, any other is a refusal.
fn refused(error: &JobError) -> Result<Asked, String> {
    match error {
        JobError::Panicked(_) | JobError::Invalid(_) => Err(error.to_string()),
        _ if error.to_string().is_empty() => Err(format!("{error:?} says nothing")),
        _ => Ok(Asked::Refused),
    }
}

/// A chat if the model has a template that renders, else a prompt; `None` if a session would refuse the request.
fn job(engine: &EngineHandle, model: &Arc<Model>) -> Option<Job> {
    let chat = match &model.chat_template {
        ChatTemplate::Source(source) => {
            let request = TemplateRequest::new(source.clone(), vec![Message::new("user", "ab ba")]);
            render_unconfined(&request.with_tokens_of(&model.tokenizer)).ok()
        }
        _ => None,
    };
    let options = EncodeOptions { add_special: chat.is_none(), parse_special: chat.is_some() };
    let prompt = model.tokenizer.encode(chat.as_deref().unwrap_or("ab ba"), options);
    let context_tokens = model.plan.context_length.min(CONTEXT_MAX);
    if prompt.is_empty() || prompt.len() >= context_tokens as usize {
        return None;
    }
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1, top_logprobs: 2 };
    Some(Job {
        id: engine.new_sequence_id(),
        uid: 0,
        connection: 0,
        priority: 128,
        shift: None,
        scores: None,
        embedding: None,
        drafts: 0,
        draft_model: None,
        alike: 0,
        model: Arc::clone(model),
        prompt,
        max_tokens: TOKENS,
        context_tokens,
        sampling,
        steering: Steering::default(),
        marks: Vec::new(),
        stop: Vec::new(),
        ignore_eog: true,
        deadline: None,
        arrived: Instant::now(),
        credit: 64,
        events: unbounded_channel().0,
    })
}

/// Resident bytes of this process, from `line` of /proc/self/status: the current or the peak since [`forget_most`].
fn resident(line: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(line)).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

fn forget_most() {
    fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// Counts of a model's changed files by outcome.
#[derive(Debug, Default)]
struct Counts {
    tried: usize,
    refused: usize,
    answered: usize,
    refused_when_asked: usize,
    most_bytes: usize,
}

fn sweep(rig: &mut Rig, name: &str, forge: &Forge, faults: &mut Vec<String>) -> Counts {
    let built = forge.build();
    let header = built.header.end;
    assert_eq!(rig.come(&built.bytes, header), Ok(Some(Asked::Answered)), "{name} does not answer unchanged");
    let mut counts = Counts::default();
    for field in fields(&built) {
        let was = number(&built, &field);
        for value in extremes(was, field.bytes, built.bytes.len() as u64) {
            let mut bytes = built.bytes.clone();
            bytes[field.at..][..field.bytes].copy_from_slice(&value.to_le_bytes()[..field.bytes]);
            forget_most();
            let before = resident("VmRSS:");
            let came = rig.come(&bytes, header);
            let grown = resident("VmHWM:").saturating_sub(before);
            counts.tried += 1;
            counts.most_bytes = counts.most_bytes.max(grown);
            let fault = match came {
                Err(fault) => Some(fault),
                Ok(_) if grown > BYTES_MAX => Some(format!("memory grew by {grown} bytes")),
                Ok(None) => {
                    counts.refused += 1;
                    None
                }
                Ok(Some(Asked::Answered)) => {
                    counts.answered += 1;
                    None
                }
                Ok(Some(Asked::Refused)) => {
                    counts.refused_when_asked += 1;
                    None
                }
            };
            faults.extend(
                fault.map(|fault| format!("{name}: {} is {value:#x}, not {was:#x}: {fault}", field.what)),
            );
        }
    }
    counts
}

/// In its own process: allocations of other tests would count.
#[test]
fn no_number_of_a_model_can_hurt() {
    if !child::inside() {
        return child::passes("model_fields::no_number_of_a_model_can_hurt");
    }
    let (mut rig, mut faults) = (Rig::new(), Vec::new());
    let begun = Instant::now();
    let mut all = Counts::default();
    for (name, forge) in models() {
        let counts = sweep(&mut rig, &name, &forge, &mut faults);
        println!("{name}: {counts:?}, {:?} so far", begun.elapsed());
        all.tried += counts.tried;
        all.refused += counts.refused;
        all.answered += counts.answered;
        all.refused_when_asked += counts.refused_when_asked;
    }
    assert!(
        faults.is_empty(),
        "{} of {} changed files failed:\n{}",
        faults.len(),
        all.tried,
        faults.join("\n")
    );
    // Most changes make a file impossible and are refused; numbers that decide little are accepted as they are.
    assert!(all.tried > 12_000 && all.refused * 2 > all.tried && all.answered > 400, "{all:?}");
}
