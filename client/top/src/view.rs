//! Draws everything as lines, and lines on a screen of any size.

use std::time::Instant;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use rocmforge_client::wire::{EventKind, ResidencyEntry, Rules, SequenceEntry, SequenceState};
use unicode_width::UnicodeWidthStr;

use crate::app::{App, Happening};
use crate::bar::{columns, letter_of, part_colour, segments, strip};
use crate::sample::{Rates, Sample};
use crate::text::{age, bytes, cut, fit, fit_right, model_name, printable, words, wrapped};

/// Most lines of a bar's legend.
const LEGEND_LINES: usize = 3;

/// Columns of a model's line without its name, parts and notes.
const NUMBER_COLUMNS: usize = 39;

/// Head of the notes, and most columns that names leave them.
const NOTES: &str = "RULES, LOADING";
const NOTE_COLUMNS: usize = 24;

/// Fewest lines of a screen on which a text that is too long takes a second line, instead of being cut.
const ROOMY: usize = 20;

/// Most columns of a strip of parts; Enter shows all parts of a model with more.
const STRIP_COLUMNS: usize = 36;

const HELP: &str = "q end  up/down, j/k select  Enter details  s sort  ? help";

const LETTERS: [&str; 4] = [
    "memory: A, B, C ... a model's weights, k KV, a activations, s staging of loads, g graphs,",
    "        + kept for the next allocation, . free, o other programs, * more models, | end of the budget",
    "parts (embedding, layers, head): # resident, - partly, > loading, . absent",
    "page up/down, home/end move faster; Esc hides help and details; Ctrl-C ends as q does",
];

/// Draws a frame over a whole buffer.
pub fn draw(app: &App, buffer: &mut Buffer) {
    let area = buffer.area;
    for (line, y) in lines(app, area.width.into(), Some(area.height.into())).iter().zip(area.y..area.bottom())
    {
        buffer.set_line(area.x, y, line, area.width);
    }
}

/// A frame of `width` columns. With a height it has at most that many lines, otherwise as many as needed.
pub fn lines(app: &App, width: usize, height: Option<usize>) -> Vec<Line<'static>> {
    let fitted = |text: &str| match height.is_none_or(|height| height >= ROOMY) {
        true => wrapped(text, width),
        false => vec![cut(text, width)],
    };
    let mut top = head(app, &fitted);
    if app.help && height.is_some() {
        top.extend(LETTERS.iter().map(|text| dim(cut(text, width))));
    }
    if let Some((sample, _)) = &app.sample {
        for (number, device) in (0u32..).zip(&sample.residency.devices) {
            top.extend(device_lines(app, sample, number, device, width, &fitted));
        }
    }
    let lists = [models(app, width), requests(app, width), events(app, width)];
    let foot =
        height.map(|_| dim(cut(&format!("{HELP}   sorted by {}", words(&format!("{:?}", app.sort))), width)));
    let Some(height) = height else {
        top.extend(lists.into_iter().flat_map(|list| list.all()));
        return top;
    };
    let room = height.saturating_sub(top.len() + 1);
    let given = share(room, [lists[0].height(), lists[1].height(), lists[2].height()]);
    for (list, given) in lists.into_iter().zip(given) {
        top.extend(list.window(given));
    }
    // On a small terminal the last lines are cut, the line of keys first.
    top.resize_with(top.len().max(height.saturating_sub(1)), Line::default);
    top.extend(foot);
    top.truncate(height);
    top
}

/// Divides `room` lines among the lists: models get two lines for each line of another list, and no list gets more
/// than it wants.
fn share(mut room: usize, wanted: [usize; 3]) -> [usize; 3] {
    let mut given = [0; 3];
    while room > 0 && given != wanted {
        for at in [0, 0, 1, 2] {
            if room > 0 && given[at] < wanted[at] {
                given[at] += 1;
                room -= 1;
            }
        }
    }
    given
}

/// A title, column heads, and rows, some of which may not fit.
struct List {
    title: String,
    head: Option<Line<'static>>,
    rows: Vec<Line<'static>>,
    /// Row that must be visible.
    seen: usize,
}

impl List {
    fn height(&self) -> usize {
        1 + usize::from(self.head.is_some()) + self.rows.len()
    }

    fn all(self) -> Vec<Line<'static>> {
        let height = self.height();
        self.window(height)
    }

    fn window(self, height: usize) -> Vec<Line<'static>> {
        let heads = 1 + usize::from(self.head.is_some());
        let (all, room) = (self.rows.len(), height.saturating_sub(heads));
        let first = self.seen.saturating_sub(room / 2).min(all.saturating_sub(room));
        let shown = first + room.min(all);
        let title = match room.min(all) {
            some if some == all => self.title,
            0 => format!("{}, {all} not shown", self.title),
            _ => format!("{}, {} to {shown} of {all}", self.title, first + 1),
        };
        let title = Line::styled(title, Style::new().add_modifier(Modifier::BOLD));
        let rows = self.rows.into_iter().skip(first).take(room);
        [title].into_iter().chain(self.head).chain(rows).take(height).collect()
    }
}

fn dim(text: String) -> Line<'static> {
    Line::styled(text, Style::new().fg(Color::DarkGray))
}

fn head(app: &App, fitted: &dyn Fn(&str) -> Vec<String>) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some((sample, _)) = &app.sample {
        let status = &sample.status;
        let stopping = if status.draining { ", stopping" } else { "" };
        let text = format!(
            "rocmforged {}{stopping}, up {}, {} connections, {} models mapped, memory {}, mapped files {}",
            printable(&status.version),
            age(status.uptime_ms),
            status.connections,
            status.models_mapped,
            bytes(status.rss_anon_bytes),
            bytes(status.rss_file_bytes)
        );
        lines.extend(fitted(&text).into_iter().map(Line::raw));
    }
    if let Some((why, since)) = &app.gone {
        let for_long = age(u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX));
        let text = format!("no answer for {for_long}, asking again: {}", printable(why));
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        lines.extend(fitted(&text).into_iter().map(|text| Line::styled(text, style)));
    }
    lines
}

fn device_lines(
    app: &App,
    sample: &Sample,
    number: u32,
    device: &rocmforge_client::wire::DeviceMemory,
    width: usize,
    fitted: &dyn Fn(&str) -> Vec<String>,
) -> Vec<Line<'static>> {
    let name = format!("{} {}", printable(&device.kind), printable(&device.device));
    let queue = format!("{} running, {} waiting", device.sequences_running, device.sequences_queued);
    let memory = match device.budget_bytes {
        0 => format!("weights are read in place, KV {}", bytes(kv_of(sample, number))),
        budget => format!("budget {}, {} available", bytes(budget), bytes(device.available_bytes)),
    };
    let title = fitted(&format!("{name}: {memory}; {queue}")).into_iter();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut lines: Vec<_> = title.map(|text| Line::styled(text, bold)).collect();
    if device.budget_bytes > 0 {
        lines.extend(bar(number, device, &sample.residency.models, width));
    }
    let rates = usize::try_from(number).ok().and_then(|at| app.rates.get(at).copied().flatten());
    lines.extend(fitted(&rate_text(rates)).into_iter().map(Line::raw));
    let sums = format!(
        "total: {} loads of {}, {} hits; {} parts evicted, {}; {} steps waited {:.1} s for weights",
        device.loads,
        bytes(device.load_bytes),
        device.hits,
        device.evictions,
        bytes(device.evicted_bytes),
        device.load_waits,
        device.load_wait_us as f64 / 1e6
    );
    lines.extend(fitted(&sums).into_iter().map(dim));
    lines
}

/// Bytes of KV pages. If weights are read in place, only the status has them.
fn kv_of(sample: &Sample, number: u32) -> u64 {
    let at = usize::try_from(number).unwrap_or(usize::MAX);
    sample.status.devices.get(at).map_or(0, |device| device.kv_bytes)
}

fn rate_text(rates: Option<Rates>) -> String {
    let Some(rates) = rates else { return "no rates yet".to_owned() };
    format!(
        "{:.1} tokens/s, prompts {:.1} tokens/s; load {}/s, evict {}/s; {:.1} hits/s, {:.1} misses/s",
        rates.tokens_per_second,
        rates.prompt_tokens_per_second,
        bytes(rates.load_bytes_per_second as u64),
        bytes(rates.evicted_bytes_per_second as u64),
        rates.hits_per_second,
        rates.misses_per_second
    )
}

fn bar(
    number: u32,
    device: &rocmforge_client::wire::DeviceMemory,
    models: &[ResidencyEntry],
    width: usize,
) -> Vec<Line<'static>> {
    let segments = segments(number, device, models);
    let inner = width.saturating_sub(2);
    let total = device.total_bytes.max(device.budget_bytes);
    let mark = u128::from(device.budget_bytes) * inner as u128 / u128::from(total.max(1));
    let mark = usize::try_from(mark).ok().filter(|_| device.budget_bytes < total);
    let mut spans = vec![Span::raw("[")];
    for (at, segment) in columns(&segments, inner).into_iter().enumerate() {
        let segment = &segments[segment];
        let letter = if Some(at) == mark { '|' } else { segment.letter };
        spans.push(Span::styled(letter.to_string(), Style::new().fg(segment.colour)));
    }
    spans.push(Span::raw("]"));
    let mut lines = vec![Line::from(spans), Line::default()];
    for segment in segments.iter().filter(|segment| segment.bytes > 0) {
        let text = format!("{} {} {}  ", segment.letter, cut(&segment.name, 28), bytes(segment.bytes));
        let taken = lines.last().map_or(0, Line::width);
        if taken > 0 && taken + text.trim_end().width() > width {
            if lines.len() > LEGEND_LINES {
                break;
            }
            lines.push(Line::default());
        }
        if let Some(line) = lines.last_mut() {
            line.push_span(Span::styled(text, Style::new().fg(segment.colour)));
        }
    }
    lines
}

fn models(app: &App, width: usize) -> List {
    let models = app.models();
    let all = app.sample.as_ref().map_or(&[][..], |(sample, _)| &sample.residency.models);
    let longest = models.iter().map(|model| model.parts.len()).max().unwrap_or(0);
    let noted = models.iter().map(|model| notes(model).width()).max().unwrap_or(0);
    // Names and strips share the columns that the numbers and the notes leave.
    let room = width.saturating_sub(NUMBER_COLUMNS + noted.clamp(NOTES.len(), NOTE_COLUMNS));
    let strip_columns = longest.clamp(5, STRIP_COLUMNS).min(room / 2).max(5);
    let name_columns = room.saturating_sub(strip_columns).clamp(8, 32);
    let columns =
        [name_columns, strip_columns, width.saturating_sub(NUMBER_COLUMNS + name_columns + strip_columns)];
    let row = |model: &&ResidencyEntry| {
        model_line(model, letter_of(model, all), columns, Some(model.id) == app.selected)
    };
    let mut rows: Vec<_> = models.iter().map(row).collect();
    let seen = app.selected_at().unwrap_or(0);
    if app.details
        && let Some(model) = models.get(seen)
    {
        let details = details(model, width);
        let after = (seen + 1).min(rows.len());
        rows.splice(after..after, details);
    }
    let head = format!(
        "  {} {} {} {} {} {} {}",
        fit("MODEL", name_columns),
        fit("PARTS", strip_columns),
        fit_right("WEIGHTS", 10),
        fit_right("KV", 10),
        fit_right("REQ", 4),
        fit_right("IDLE", 7),
        NOTES
    );
    List { title: format!("Models: {}", models.len()), head: Some(dim(cut(&head, width))), rows, seen }
}

fn model_line(model: &ResidencyEntry, letter: char, columns: [usize; 3], selected: bool) -> Line<'static> {
    let [name_columns, strip_columns, note_columns] = columns;
    let name = fit(&model_name(&model.model), name_columns);
    let style = if selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
    let mut spans = vec![Span::styled(format!("{letter} {name}"), style), Span::raw(" ")];
    let strip = fit(&strip(&model.parts, strip_columns), strip_columns);
    spans
        .extend(strip.chars().map(|part| Span::styled(part.to_string(), Style::new().fg(part_colour(part)))));
    let idle = model.idle_ms.map_or("-".to_owned(), age);
    spans.push(Span::raw(format!(
        " {} {} {} {} {}",
        fit_right(&bytes(model.weight_bytes), 10),
        fit_right(&bytes(model.kv_bytes), 10),
        fit_right(&model.sequences.to_string(), 4),
        fit_right(&idle, 7),
        cut(&notes(model), note_columns)
    )));
    Line::from(spans)
}

/// The progress of a load, and the rules.
fn notes(model: &ResidencyEntry) -> String {
    let mut notes = rules(&model.rules);
    if let Some(loading) = &model.loading {
        let share = loading.device_bytes as f64 * 100.0 / loading.device_bytes_total.max(1) as f64;
        let total = bytes(loading.device_bytes_total);
        notes.insert(0, format!("loading {share:.0}% of {total}"));
    }
    notes.join(", ")
}

fn rules(rules: &Rules) -> Vec<String> {
    let parts = [
        rules.pinned.then(|| "pinned".to_owned()),
        (rules.priority > 0).then(|| format!("priority {}", rules.priority)),
        (rules.layers_min > 0).then(|| format!("keeps {} layers", rules.layers_min)),
        (rules.idle_s > 0).then(|| format!("evicted after {} s", rules.idle_s)),
    ];
    parts.into_iter().flatten().collect()
}

/// All parts of a model, and its other numbers.
fn details(model: &ResidencyEntry, width: usize) -> Vec<Line<'static>> {
    let count = |letter| model.parts.chars().filter(|part| *part == letter).count();
    let place = match model.eviction_place {
        0 => "never evicted".to_owned(),
        place => format!("place {place} in the eviction order"),
    };
    let mut lines = vec![format!(
        "    number {}, {} parts: {} resident, {} loading, {} absent; activations {}; {place}",
        model.id,
        model.parts.chars().count(),
        count('#'),
        count('>'),
        count('.'),
        bytes(model.scratch_bytes)
    )];
    if let Some(loading) = &model.loading {
        lines.push(format!(
            "    loading: {} of {} tensors, {} of {}",
            loading.tensors,
            loading.tensors_total,
            bytes(loading.device_bytes),
            bytes(loading.device_bytes_total)
        ));
    }
    let parts: Vec<char> = strip(&model.parts, usize::MAX).chars().collect();
    let columns = width.saturating_sub(10).max(1);
    for (row, group) in parts.chunks(columns).enumerate() {
        lines.push(format!("    {:4} {}", row * columns, group.iter().collect::<String>()));
    }
    lines.into_iter().map(|line| Line::raw(cut(&line, width))).collect()
}

fn requests(app: &App, width: usize) -> List {
    let all = app.sample.as_ref().map_or(&[][..], |(sample, _)| &sample.ps.sequences);
    let mut sequences: Vec<_> = all.iter().collect();
    // Running requests first, then the waiting ones in queue order.
    sequences.sort_by_key(|sequence| (sequence.queue_position, sequence.id));
    let waits = |state| matches!(state, SequenceState::Queued | SequenceState::Preparing);
    let waiting = all.iter().filter(|sequence| waits(sequence.state)).count();
    let name_columns = width.saturating_sub(59).clamp(8, 32);
    let head = format!(
        "  {} {} {} {} {} {}",
        fit("MODEL", name_columns),
        fit("STATE", 12),
        fit_right("UID", 6),
        fit_right("PROMPT", 13),
        fit_right("GENERATED", 13),
        fit_right("AGE", 8)
    );
    let rows: Vec<_> =
        sequences.into_iter().map(|sequence| request_line(sequence, name_columns, width)).collect();
    List {
        title: format!("Requests: {} running, {waiting} waiting", all.len() - waiting),
        head: (!rows.is_empty()).then(|| dim(cut(&head, width))),
        rows,
        seen: 0,
    }
}

fn request_line(sequence: &SequenceEntry, name_columns: usize, width: usize) -> Line<'static> {
    let state = words(&format!("{:?}", sequence.state));
    let state = match sequence.queue_position {
        0 => state,
        place => format!("{state} ({place})"),
    };
    let text = format!(
        "  {} {} {} {} {} {}",
        fit(&model_name(&sequence.model), name_columns),
        fit(&state, 12),
        fit_right(&sequence.uid.to_string(), 6),
        fit_right(&format!("{}/{}", sequence.prefilled_tokens, sequence.prompt_tokens), 13),
        fit_right(&format!("{}/{}", sequence.generated_tokens, sequence.max_tokens), 13),
        fit_right(&age(sequence.age_ms), 8)
    );
    let colour = match sequence.state {
        SequenceState::Queued | SequenceState::Preparing => Color::DarkGray,
        SequenceState::Stalled => Color::Red,
        SequenceState::Prefill => Color::Yellow,
        SequenceState::Decode => Color::Reset,
    };
    Line::styled(cut(&text, width), Style::new().fg(colour))
}

fn events(app: &App, width: usize) -> List {
    let now = Instant::now();
    let row = |happening: &Happening| Line::raw(cut(&event_text(happening, now), width));
    let missed = if app.missed > 0 { format!(", {} missed", app.missed) } else { String::new() };
    List {
        title: format!("Events, latest first{missed}"),
        head: None,
        rows: app.happened.iter().map(row).collect(),
        seen: 0,
    }
}

fn event_text(happening: &Happening, now: Instant) -> String {
    let ago = now.saturating_duration_since(happening.at).as_millis();
    let ago = age(u64::try_from(ago).unwrap_or(u64::MAX));
    let entry = &happening.entry;
    let name = model_name(&entry.model);
    let about = match entry.kind {
        EventKind::Loaded | EventKind::Evicted if happening.count > 1 => {
            format!("{name}, {} parts, {}", happening.count, bytes(happening.bytes))
        }
        EventKind::Loaded | EventKind::Evicted => {
            format!("{name} {}, {}", part(entry.part, entry.parts), bytes(happening.bytes))
        }
        EventKind::DeviceLost => printable(&entry.text),
        EventKind::ModelMapped | EventKind::ModelUnmapped => name,
        EventKind::ModelPoisoned => format!("{name}: {}", printable(&entry.text)),
    };
    format!("  {} ago  {}  {about}", fit_right(&ago, 7), fit(&words(&format!("{:?}", entry.kind)), 14))
}

/// Name of a part of a model.
fn part(number: u32, count: u32) -> String {
    match number {
        0 => "embedding".to_owned(),
        head if head.saturating_add(1) == count => "head".to_owned(),
        layer => format!("layer {}", layer - 1),
    }
}
