//! Requests about models.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rocmforge_client::calls::Form;
use rocmforge_client::wire::{
    self, ErrorCode, Ext, HostMemory, ListReply, ListRequest, LoadReply, LoadRequest, MetadataEntry,
    ModelState, ModelSummary, Op, ShowReply, ShowRequest, TensorEntry, TypeCount, UnloadReply, UnloadRequest,
    limits,
};
use tokio::sync::watch;

use super::error::{Failure, failure, of_codec, of_store};
use super::repeats::Recall;
use super::{Call, Right, Service, host, thinking};
use crate::aside::ReceivedFd;
use crate::model::gguf::{Array, Value};
use crate::model::plan::ExecutionPlan;
use crate::model::store::{Lease, Listing, ModelStatus};
use crate::model::{ChatTemplate, Model};
use crate::program::RopeScaling;

/// Most bytes of metadata and tensors in one `ShowReply`, if the client takes such frames; it asks again for the rest.
const SHOW_BYTES: usize = 512 << 10;

/// Most elements of an array, and most bytes of a text, that are shown.
const SHOWN_ELEMENTS: usize = 8;
const SHOWN_BYTES: usize = 1024;

pub(super) async fn list(call: Call, request: ListRequest) -> Result<ListReply, Failure> {
    let uid = meant(&call, request.of_user(), Right::See)?;
    call.blocking(move |call| {
        let own = call.own_sequences();
        let mut all = call.service().store.list(uid);
        all.retain(|listing| listing.name > request.after);
        let of_all = all.len();
        let mut room = page_room(call.connection.limits.max_frame);
        let all = all.into_iter().take(limits::MODELS_MAX).map(|listing| summary(listing, own.as_ref()));
        let models = fill(&mut room, all, summary_bytes);
        Ok(ListReply { more: models.len() < of_all, models, ext: Ext::new() })
    })
    .await
}

/// The user whose names a request means: the client's own, or with that right another one.
fn meant(call: &Call, of: Result<Option<u32>, wire::NoUid>, right: Right) -> Result<u32, Failure> {
    let own = call.peer().uid;
    let of = of.map_err(|error| failure(ErrorCode::InvalidArgument, &error.to_string()))?;
    let uid = of.unwrap_or(own);
    if uid != own {
        call.service().policy().check(&call.connection.peer, right)?;
    }
    Ok(uid)
}

/// Upper bound of a summary's encoded size in bytes.
fn summary_bytes(model: &ModelSummary) -> usize {
    model.name.len() + model.architecture.len() + model.reason.len() + 48
}

/// Bytes left for a list reply's entries: the payload less the list's length, the `more` flag and empty extensions.
pub(super) fn page_room(payload_bytes_max: u32) -> usize {
    (payload_bytes_max as usize).saturating_sub(8 + 1 + 8)
}

pub(super) async fn load(
    call: Call,
    request: LoadRequest,
    fd: Option<ReceivedFd>,
    payload: Vec<u8>,
) -> Result<LoadReply, Failure> {
    call.service().refuse_while_draining()?;
    let (id, kind) = (request.request_id, if fd.is_some() { Kind::Passes } else { Kind::Names });
    once(&call, (id, Op::Load), kind, &payload, move |call| {
        let begun = Instant::now();
        let (_lease, mapped_now) = match fd {
            Some(fd) => {
                let passed = pass(call, &request.name, fd)?;
                call.service().keep_state();
                passed
            }
            None => call.acquire(&request.name)?,
        };
        let summary = summary_of(call, &request.name)?;
        Ok(LoadReply {
            summary,
            mapped_now,
            elapsed_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            ext: Ext::new(),
        })
    })
    .await
}

fn pass(call: &Call, name: &str, fd: ReceivedFd) -> Result<(Lease, bool), Failure> {
    let (uid, store) = (call.peer().uid, &call.service().store);
    let own = store.passed().into_iter().filter(|passed| passed.uid == uid);
    let had: Vec<_> = own.map(|passed| passed.model.id).collect();
    let (lease, mapped_now) = store.pass_received(uid, name, fd).map_err(|error| of_store(&error))?;
    let id = lease.model().id;
    if mapped_now {
        call.service().events.mapped(id);
    }
    // Whether another user passed the same file is not for this one to know.
    let shown = if call.peer().sees { mapped_now } else { !had.contains(&id) };
    Ok((lease, shown))
}

pub(super) async fn unload(
    call: Call,
    request: UnloadRequest,
    payload: Vec<u8>,
) -> Result<UnloadReply, Failure> {
    let (id, own_uid) = (request.request_id, call.peer().uid);
    let uid = meant(&call, request.of_user(), Right::Manage)?;
    if uid != own_uid && !call.peer().administrator && call.service().policy().names_administrator(uid) {
        let text = format!("uid {uid} is an administrator: only an administrator unloads what it passed");
        return Err(failure(ErrorCode::Forbidden, &text));
    }
    once(&call, (id, Op::Unload), Kind::Names, &payload, move |call| {
        let (store, name) = (&call.service().store, &request.name);
        let shown =
            call.own_sequences().map(|own| if uid == own_uid { own.get(name).copied() } else { None });
        let unloaded = if uid == own_uid {
            let unloaded = store.unload(uid, call.may(Right::Manage), name);
            unloaded.map_err(|error| of_store(&error))?
        } else {
            let none =
                || failure(ErrorCode::ModelNotFound, &format!("uid {uid} has passed no file as {name:?}"));
            let unloaded = store.unload_passed(uid, name).ok_or_else(none)?;
            tracing::info!(name: "unloaded", uid, by = own_uid, model = ?name, "a user's file was unloaded");
            unloaded
        };
        call.service().keep_state();
        Ok(UnloadReply {
            was_mapped: unloaded.was_mapped,
            draining_sequences: shown.map_or(unloaded.in_use, |own| own.unwrap_or(0)),
            ext: Ext::new(),
        })
    })
    .await
}

/// Kinds of requests about models.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It names a model.
    Names,
    /// It passes a file, whose header takes processor time.
    Passes,
}

/// Does `work`, which blocks, once for each request id. A repeated request waits for the first answer and gets a copy.
///
/// The work runs to its end, and its answer is kept, even if the client is gone: repeats exist for this case.
async fn once<T: wire::Message + Send + 'static>(
    call: &Call,
    (id, op): (u128, Op),
    kind: Kind,
    payload: &[u8],
    work: impl FnOnce(&Call) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let uid = call.peer().uid;
    let mut request = (op as u16).to_le_bytes().to_vec();
    request.extend_from_slice(payload);
    let ended = loop {
        let recalled = call.service().repeats.lock().recall(uid, id, &request);
        match recalled {
            Recall::New(ended) => break ended,
            Recall::Running(mut end) => while end.changed().await.is_ok() {},
            Recall::Answered(reply) => return wire::decode(&reply).map_err(|error| of_codec(&error)),
            Recall::Conflict => {
                let text =
                    format!("request_id {id:#x} was already used for another request: choose a new one");
                return Err(failure(ErrorCode::InvalidArgument, &text));
            }
        }
    };
    let running = Running { service: Arc::clone(call.service()), uid, id, _ended: ended };
    let work = move |call: &Call| {
        let reply = work(call)?;
        let bytes = wire::encode(&reply).map_err(|error| of_codec(&error))?;
        running.service.repeats.lock().remember(uid, id, &request, bytes);
        Ok(reply)
    };
    match kind {
        Kind::Names => call.blocking(work).await,
        Kind::Passes => call.header_work(work).await,
    }
}

/// A running request that its repeats wait for. Drops when the request was answered, or failed and was forgotten.
struct Running {
    service: Arc<Service>,
    uid: u32,
    id: u128,
    /// Must drop last: the table is up to date when the waiters wake.
    _ended: watch::Sender<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.service.repeats.lock().forget_running(self.uid, self.id);
    }
}

fn summary_of(call: &Call, name: &str) -> Result<ModelSummary, Failure> {
    let mut listing = call.service().store.status(call.peer().uid, name);
    if let Some(listing) = &mut listing {
        listing.in_use = listing.in_use.saturating_sub(1); // this request itself
    }
    let gone = || failure(ErrorCode::ModelNotFound, &format!("{name:?} was unloaded at the same time"));
    listing.map(|listing| summary(listing, call.own_sequences().as_ref())).ok_or_else(gone)
}

/// A model's summary. It counts the requests of `own` alone, if the client may not see others'.
fn summary(listing: Listing, own: Option<&BTreeMap<String, u32>>) -> ModelSummary {
    let sequences = own.map_or(listing.in_use, |own| own.get(&listing.name).copied().unwrap_or(0));
    ModelSummary {
        name: listing.name,
        state: match listing.status {
            ModelStatus::Registered => ModelState::Registered,
            ModelStatus::Mapped => ModelState::Mapped,
            ModelStatus::Draining => ModelState::Draining,
            ModelStatus::Poisoned => ModelState::Poisoned,
            ModelStatus::Unusable => ModelState::Unusable,
        },
        file_bytes: listing.file_bytes,
        architecture: label(&listing.architecture),
        sequences,
        reason: wire::cut_text(&listing.reason, limits::ERROR_BYTES_MAX).to_owned(),
        ext: Ext::new(),
    }
}

pub(super) async fn show(call: Call, request: ShowRequest) -> Result<ShowReply, Failure> {
    call.service().refuse_while_draining()?;
    let name = request.model.clone();
    let (lease, _) = call.blocking(move |call| call.acquire(&name)).await?;
    let lease = thinking::learn(&call, lease).await?;
    call.blocking(move |call| {
        let summary = summary_of(call, &request.model)?;
        describe(call, lease.model(), summary, &request, call.connection.limits.max_frame)
    })
    .await
}

/// A reply of at most `payload_bytes_max` bytes.
fn describe(
    call: &Call,
    model: &Model,
    summary: ModelSummary,
    request: &ShowRequest,
    payload_bytes_max: u32,
) -> Result<ShowReply, Failure> {
    let mut reply = overview(model, summary);
    reply.host = host::of_model(call, model);
    if request.full {
        let taken = wire::encode(&reply).map_err(|error| of_codec(&error))?.len();
        let mut room = (payload_bytes_max as usize).saturating_sub(taken).min(SHOW_BYTES);
        reply.metadata = metadata(model, request.skip_metadata as usize, &mut room);
        reply.tensors = tensors(model, request.skip_tensors as usize, &mut room);
    }
    Ok(reply)
}

fn metadata(model: &Model, skip: usize, room: &mut usize) -> Vec<MetadataEntry> {
    let entries = model.files.header().metadata().skip(skip).map(|(key, value)| metadata_entry(key, value));
    fill(room, entries, |e| e.key.len() + e.kind.len() + e.value.len() + 24)
}

fn tensors(model: &Model, skip: usize, room: &mut usize) -> Vec<TensorEntry> {
    let entries = model.files.tensors().skip(skip).map(|tensor| TensorEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name().to_owned(),
        dims: tensor.shape.dims().to_vec(),
        offset_bytes: tensor.range.start,
        bytes: tensor.range.end - tensor.range.start,
    });
    fill(room, entries, |e| e.name.len() + e.dtype.len() + 8 * e.dims.len() + 40)
}

/// The part of the reply that is shown without `full`.
fn overview(model: &Model, summary: ModelSummary) -> ShowReply {
    let header = model.files.header();
    let shape = &model.plan.shape;
    let vocab = model.tokenizer.vocab_size();
    ShowReply {
        summary,
        gguf_version: header.version(),
        parameters: model.files.tensors().map(|t| t.shape.elements()).fold(0, u64::saturating_add),
        weight_bytes: model.files.tensors().map(|t| t.range.end - t.range.start).sum(),
        context_length: model.plan.context_length,
        hidden: number(shape.hidden),
        layers: model.plan.program.layer_count(),
        heads: number(shape.heads),
        kv_heads: number(shape.kv_heads),
        head_dim: number(shape.head_dim),
        ffn: number(shape.ffn),
        vocab: number(vocab),
        tokenizer: model.tokenizer.kind().to_owned(),
        chat_template: matches!(model.chat_template, ChatTemplate::Source(_)),
        end_of_generation: model
            .tokenizer
            .end_of_generation()
            .iter()
            .copied()
            .take(limits::END_TOKENS_MAX)
            .collect(),
        types: types(model),
        metadata_total: number(header.metadata().count()),
        tensors_total: number(model.files.tensors().count()),
        metadata: Vec::new(),
        tensors: Vec::new(),
        host: HostMemory::default(),
        ext: notes(model),
    }
}

/// Notes that only some models have: experts, scaled positions, that it is a copy, tool calls, reasoning, and what encoders compute.
fn notes(model: &Model) -> Ext {
    let plan: &ExecutionPlan = &model.plan;
    let copy = model.copied.as_ref().map(|copy| {
        format!("{} bytes, because the server of its file system ({}) may hang", copy.bytes, copy.file_system)
    });
    let experts = plan
        .shape
        .experts
        .as_ref()
        .map(|e| format!("{} of {} used for each token, each {} wide", e.used, e.count, e.ffn));
    let rope = plan.program.ropes().first();
    let scaling = match rope.map_or(RopeScaling::None, |rope| rope.spec.scaling) {
        RopeScaling::None => None,
        RopeScaling::Linear { factor } => Some(format!("divided by {factor}")),
        RopeScaling::Yarn(yarn) => {
            Some(format!("YaRN by {} from {} tokens", yarn.factor, yarn.original_context))
        }
    };
    let factors = rope.and_then(|rope| plan.program.tensor(rope.factors?));
    let factors = factors.map(|tensor| format!("by {}", tensor.lazy.name()));
    let positions: Vec<String> = scaling.into_iter().chain(factors).collect();
    let positions = (!positions.is_empty()).then(|| positions.join(", "));
    let calls = match &model.chat_template {
        ChatTemplate::Source(source) => Some(Form::of_template(source).name().to_owned()),
        _ => None,
    };
    let thinking = model.thinking.get().cloned().flatten();
    let encoder = match (plan.program.encoder(), plan.program.classifier()) {
        (None, None) => None,
        (Some(_), None) => Some("embeddings".to_owned()),
        (_, Some(_)) => Some("embeddings, and the relevance of documents".to_owned()),
    };
    let notes = [
        (wire::EXT_SHOW_EXPERTS, experts),
        (wire::EXT_SHOW_POSITIONS, positions),
        (wire::EXT_SHOW_COPY, copy),
        (wire::EXT_SHOW_CALLS, calls),
        (wire::EXT_SHOW_THINKING, thinking),
        (wire::EXT_SHOW_ENCODER, encoder),
    ];
    notes.into_iter().filter_map(|(key, text)| Some((key, label(&text?).into_bytes()))).collect()
}

/// Takes entries until the remaining `room` (bytes) or a list's limit is used up.
pub(super) fn fill<T>(
    room: &mut usize,
    entries: impl Iterator<Item = T>,
    bytes: impl Fn(&T) -> usize,
) -> Vec<T> {
    let fits = |entry: &T| {
        let left = room.checked_sub(bytes(entry));
        *room = left.unwrap_or(0);
        left.is_some()
    };
    entries.take(limits::ENTRIES_MAX).take_while(fits).collect()
}

fn types(model: &Model) -> Vec<TypeCount> {
    let mut types: BTreeMap<u32, TypeCount> = BTreeMap::new();
    for tensor in model.files.tensors() {
        let count = types.entry(tensor.dtype.ggml()).or_insert_with(|| TypeCount {
            dtype: tensor.dtype.name().to_owned(),
            tensors: 0,
            bytes: 0,
        });
        count.tensors = count.tensors.saturating_add(1);
        count.bytes = count.bytes.saturating_add(tensor.range.end - tensor.range.start);
    }
    types.into_values().collect()
}

fn metadata_entry(key: &str, value: &Value) -> MetadataEntry {
    let (kind, value) = match value {
        Value::U8(v) => ("u8", v.to_string()),
        Value::I8(v) => ("i8", v.to_string()),
        Value::U16(v) => ("u16", v.to_string()),
        Value::I16(v) => ("i16", v.to_string()),
        Value::U32(v) => ("u32", v.to_string()),
        Value::I32(v) => ("i32", v.to_string()),
        Value::U64(v) => ("u64", v.to_string()),
        Value::I64(v) => ("i64", v.to_string()),
        Value::F32(v) => ("f32", v.to_string()),
        Value::F64(v) => ("f64", v.to_string()),
        Value::Bool(v) => ("bool", v.to_string()),
        Value::String(v) => ("string", shortened(v)),
        Value::Array(v) => array(v),
    };
    MetadataEntry { key: label(key), kind: kind.to_owned(), value }
}

fn array(array: &Array) -> (&'static str, String) {
    match array {
        Array::U8(v) => ("[u8]", elements(v.iter(), u8::to_string)),
        Array::I8(v) => ("[i8]", elements(v.iter(), i8::to_string)),
        Array::U16(v) => ("[u16]", elements(v.iter(), u16::to_string)),
        Array::I16(v) => ("[i16]", elements(v.iter(), i16::to_string)),
        Array::U32(v) => ("[u32]", elements(v.iter(), u32::to_string)),
        Array::I32(v) => ("[i32]", elements(v.iter(), i32::to_string)),
        Array::U64(v) => ("[u64]", elements(v.iter(), u64::to_string)),
        Array::I64(v) => ("[i64]", elements(v.iter(), i64::to_string)),
        Array::F32(v) => ("[f32]", elements(v.iter(), f32::to_string)),
        Array::F64(v) => ("[f64]", elements(v.iter(), f64::to_string)),
        Array::Bool(v) => ("[bool]", elements(v.iter(), bool::to_string)),
        Array::String(v) => {
            ("[string]", elements(v.iter(), |text| format!("{:?}", wire::cut_text(text, 64))))
        }
    }
}

fn elements<T>(values: impl ExactSizeIterator<Item = T>, text: impl Fn(T) -> String) -> String {
    let all = values.len();
    let shown: Vec<String> = values.take(SHOWN_ELEMENTS).map(text).collect();
    let rest = if all > SHOWN_ELEMENTS { format!(", ... ({all} in all)") } else { String::new() };
    format!("[{}{rest}]", shown.join(", "))
}

fn shortened(text: &str) -> String {
    let shown = wire::cut_text(text, SHOWN_BYTES);
    if shown.len() == text.len() {
        shown.to_owned()
    } else {
        format!("{shown}... ({} bytes in all)", text.len())
    }
}

fn label(text: &str) -> String {
    wire::cut_text(text, limits::LABEL_BYTES_MAX).to_owned()
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_and_say_so() {
        let entry = metadata_entry("k", &Value::Array(Array::U32((0..100).collect())));
        assert_eq!(
            (entry.kind.as_str(), entry.value.as_str()),
            ("[u32]", "[0, 1, 2, 3, 4, 5, 6, 7, ... (100 in all)]")
        );
        let entry = metadata_entry("k", &Value::String("é".repeat(1000)));
        assert_eq!(entry.value.len(), SHOWN_BYTES + "... (2000 bytes in all)".len());
        assert_eq!(metadata_entry("k", &Value::F32(0.5)).value, "0.5");
    }

    #[test]
    fn a_page_of_the_longest_names_fits_its_payload_and_wastes_none() {
        let longest = ModelSummary {
            name: "n".repeat(limits::NAME_BYTES_MAX),
            state: ModelState::Unusable,
            file_bytes: 1,
            architecture: "a".repeat(limits::LABEL_BYTES_MAX),
            sequences: 1,
            reason: "r".repeat(limits::ERROR_BYTES_MAX),
            ext: Ext::new(),
        };
        let mut room = page_room(wire::PAYLOAD_BYTES_MIN);
        let models = fill(&mut room, std::iter::repeat_n(&longest, 1000), |model| summary_bytes(model));
        let models: Vec<ModelSummary> = models.into_iter().cloned().collect();
        assert!(models.len() < 1000);
        let reply = ListReply { models, more: true, ext: Ext::new() };
        let encoded = wire::encode(&reply).unwrap().len();
        let limit = wire::PAYLOAD_BYTES_MIN as usize;
        assert!(encoded <= limit && encoded + summary_bytes(&longest) > limit, "{encoded}");
    }

    #[test]
    fn a_list_stops_where_the_room_does() {
        let mut room = 10;
        assert_eq!(fill(&mut room, [4, 4, 4, 1].into_iter(), |n| *n), [4, 4]);
        assert_eq!(
            fill(&mut room, [1].into_iter(), |n| *n),
            [0; 0],
            "a small entry must not follow one that did not fit"
        );
    }
}
