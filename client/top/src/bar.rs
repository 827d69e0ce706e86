//! A device's memory as a row of letters, and a model's parts as another.

use ratatui::style::Color;
use rocmforge_client::wire::{
    DeviceMemory, PART_ABSENT, PART_LOADING, PART_PARTIAL, PART_RESIDENT, ResidencyEntry,
};

use crate::text::model_name;

/// Colours of models' weights, over and over.
const MODEL_COLOURS: [Color; 6] =
    [Color::Green, Color::Cyan, Color::Magenta, Color::Blue, Color::LightGreen, Color::LightCyan];

/// Letters of models' weights; those with fewer bytes share one.
const LETTERS: usize = 26;

/// Who has memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// In the bar.
    pub letter: char,
    /// In the legend.
    pub name: String,
    /// How much.
    pub bytes: u64,
    /// In the bar.
    pub colour: Color,
}

/// The letter of a model in its device's bar: the place of its weights among all.
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

/// Who has a device's memory, in the order of the bar; the last but one is what is free. Nothing where weights are read in place.
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
        segment('k', "keys and values", device.kv_bytes, Color::Yellow),
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

/// For each of so many columns, the segment that has it. A segment with bytes has a column where there are enough of them.
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
        // The largest can spare one; with more segments than columns, the last go without.
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

/// A model's parts in at most so many columns: where one stands for several, it is `#` or `.` when all are, `>` when one is on its
/// way.
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

/// A letter that a later daemon may send is shown as one of ours.
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
