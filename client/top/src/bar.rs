//! A device's memory as a row of letters, and a model's parts as another row.

use ratatui::style::Color;
use rocmforge_client::wire::{
    DeviceMemory, PART_ABSENT, PART_LOADING, PART_PARTIAL, PART_RESIDENT, ResidencyEntry,
};

use crate::text::model_name;

/// Colours of models' weights, used in turn.
const MODEL_COLOURS: [Color; 6] =
    [Color::Green, Color::Cyan, Color::Magenta, Color::Blue, Color::LightGreen, Color::LightCyan];

/// Letters of models' weights; smaller models share one.
const LETTERS: usize = 26;

/// A part of a device's memory with one use.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Its letter in the bar.
    pub letter: char,
    /// Its name in the legend.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its colour in the bar.
    pub colour: Color,
}

/// The letter of a model in its device's bar, by the rank of its weights among all models.
pub fn letter_of(model: &ResidencyEntry, all: &[ResidencyEntry]) -> char {
    let larger = |other: &&ResidencyEntry| {
        other.device == model.device
            && (other.weight_bytes > model.weight_bytes
                || (other.weight_bytes == model.weight_bytes && other.id < model.id))
    };
    let place = all.iter().filter(larger).count();
    match u8::try_from(place) {
        _ if model.weight_bytes == 0 => ' ',
        Ok(place) if usize::from(place) < LETTERS => char::from(b'A' + place),
        _ => '*',
    }
}

/// A device's memory by use, in the order of the bar; the free memory comes second to last. Empty if weights are read
/// in place.
pub fn segments(number: u32, device: &DeviceMemory, models: &[ResidencyEntry]) -> Vec<Segment> {
    let total = device.total_bytes.max(device.budget_bytes);
    let mut here: Vec<_> = models.iter().filter(|m| m.device == number && m.weight_bytes > 0).collect();
    here.sort_by_key(|model| (u64::MAX - model.weight_bytes, model.id));
    let segment =
        |letter, name: &str, bytes, colour| Segment { letter, name: name.to_owned(), bytes, colour };
    let mut segments: Vec<_> = here
        .iter()
        .take(LETTERS)
        .zip(MODEL_COLOURS.iter().cycle())
        .map(|(model, colour)| Segment {
            letter: letter_of(model, models),
            name: model_name(&model.model),
            bytes: model.weight_bytes,
            colour: *colour,
        })
        .collect();
    let named: u64 = segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.bytes));
    let others = device.others_bytes.min(total);
    let held = [
        segment('*', "other weights", device.weight_bytes.saturating_sub(named), Color::Gray),
        segment('k', "KV", device.kv_bytes, Color::Yellow),
        segment('a', "activations", device.scratch_bytes, Color::LightYellow),
        segment('s', "staging", device.staging_bytes, Color::LightBlue),
        segment('g', "graphs", device.graph_bytes, Color::LightMagenta),
    ];
    segments.extend(held);
    let owned = segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.bytes));
    let taken = device.taken_bytes.max(owned);
    segments.push(segment('+', "kept", taken - owned, Color::Gray));
    let free = total.saturating_sub(taken).saturating_sub(others);
    segments.push(segment('.', "free", free, Color::DarkGray));
    segments.push(segment('o', "other programs", others, Color::Red));
    segments
}

/// The segment of each column. A segment with bytes has at least one column, if there are enough columns.
pub fn columns(segments: &[Segment], width: usize) -> Vec<usize> {
    let sum = segments.iter().fold(0u128, |sum, segment| sum + u128::from(segment.bytes));
    if sum == 0 || width == 0 {
        return Vec::new();
    }
    let exact = |segment: &Segment| u128::from(segment.bytes) * width as u128;
    let mut shares: Vec<usize> = segments.iter().map(|segment| (exact(segment) / sum) as usize).collect();
    for (share, segment) in shares.iter_mut().zip(segments) {
        *share = (*share).max(usize::from(segment.bytes > 0));
    }
    let given = |shares: &[usize]| shares.iter().sum::<usize>();
    while given(&shares) > width {
        // The largest can spare a column; with more segments than columns, the last get none.
        let largest = (0..shares.len()).max_by_key(|at| shares[*at]).unwrap_or(0);
        shares[largest] -= 1;
    }
    while given(&shares) < width {
        let lacks = |at: &usize| exact(&segments[*at]) as i128 - (shares[*at] as u128 * sum) as i128;
        let most = (0..shares.len()).max_by_key(lacks).unwrap_or(0);
        shares[most] += 1;
    }
    shares.iter().enumerate().flat_map(|(at, share)| std::iter::repeat_n(at, *share)).collect()
}

/// A model's parts in at most `width` columns. A column for several parts is `#` or `.` if all of them are, and `>`
/// if any is loading.
pub fn strip(parts: &str, width: usize) -> String {
    let parts: Vec<char> = parts.chars().map(known).collect();
    if parts.len() <= width {
        return parts.into_iter().collect();
    }
    let column = |at: usize| {
        let group = &parts[at * parts.len() / width..(at + 1) * parts.len() / width];
        match group {
            _ if group.contains(&PART_LOADING) => PART_LOADING,
            [first, rest @ ..] if rest.iter().all(|part| part == first) => *first,
            _ => PART_PARTIAL,
        }
    };
    (0..width).map(column).collect()
}

/// Maps a letter of a later daemon to a known one.
fn known(part: char) -> char {
    if [PART_ABSENT, PART_LOADING, PART_RESIDENT].contains(&part) { part } else { PART_PARTIAL }
}

/// Colour of a part.
pub fn part_colour(part: char) -> Color {
    match part {
        PART_RESIDENT => Color::Green,
        PART_LOADING => Color::Yellow,
        PART_PARTIAL => Color::Cyan,
        _ => Color::DarkGray,
    }
}
