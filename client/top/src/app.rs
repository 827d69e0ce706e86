//! State of the view: the daemon's samples and events, and the keys' settings.

use std::collections::VecDeque;
use std::time::Instant;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rocmforge_client::wire::{EventEntry, EventKind, ResidencyEntry};

use crate::sample::{Rates, Sample};
use crate::watch::Update;

/// Most lines of events.
const EVENTS_KEPT: usize = 200;

/// Models that page up and page down move by.
const PAGE: isize = 10;

/// Order of the models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// By bytes on the device, largest first.
    #[default]
    Weights,
    /// By name.
    Name,
    /// By requests, most first.
    Requests,
    /// By idle time, longest first.
    Idle,
    /// By place in the eviction order.
    Leaves,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Weights => Self::Name,
            Self::Name => Self::Requests,
            Self::Requests => Self::Idle,
            Self::Idle => Self::Leaves,
            Self::Leaves => Self::Weights,
        }
    }
}

/// One event, or several consecutive ones of one kind about one model.
#[derive(Clone, Debug)]
pub struct Happening {
    /// The first event.
    pub entry: EventEntry,
    /// Number of events.
    pub count: u64,
    /// Device bytes of all of them.
    pub bytes: u64,
    /// Time of the last one.
    pub at: Instant,
}

/// Everything that is drawn.
#[derive(Debug, Default)]
pub struct App {
    /// The last sample and its time.
    pub sample: Option<(Sample, Instant)>,
    /// Rates of each device since the sample before.
    pub rates: Vec<Option<Rates>>,
    /// Why the daemon does not answer, and since when.
    pub gone: Option<(String, Instant)>,
    /// Events, the latest first.
    pub happened: VecDeque<Happening>,
    /// Number of events that the daemon dropped.
    pub missed: u64,
    /// Order of the models.
    pub sort: Sort,
    /// Number of the selected model.
    pub selected: Option<u64>,
    /// Shows all parts of the selected model.
    pub details: bool,
    /// Shows the help.
    pub help: bool,
}

impl App {
    /// Takes in an update from the threads that ask the daemon.
    pub fn update(&mut self, update: Update) {
        match update {
            Update::Sample(sample, at) => {
                self.gone = None;
                let earlier = self.sample.take();
                self.rates = match &earlier {
                    Some((earlier, _)) => sample.rates_since(earlier),
                    None => vec![None; sample.residency.devices.len()],
                };
                self.sample = Some((*sample, at));
                self.keep_selection();
            }
            Update::Gone(error) => {
                let since = self.gone.take().map_or_else(Instant::now, |(_, since)| since);
                self.gone = Some((error.to_string(), since));
                self.rates.fill(None);
            }
            Update::Events(item) => {
                self.missed += item.missed;
                item.events.into_iter().for_each(|entry| self.happens(entry));
            }
        }
    }

    fn happens(&mut self, entry: EventEntry) {
        let parts = matches!(entry.kind, EventKind::Loaded | EventKind::Evicted);
        let (bytes, at) = (entry.device_bytes, Instant::now());
        match self.happened.front_mut() {
            Some(last) if parts && (last.entry.kind, last.entry.id) == (entry.kind, entry.id) => {
                last.count += 1;
                last.bytes += bytes;
                last.at = at;
            }
            _ => self.happened.push_front(Happening { entry, count: 1, bytes, at }),
        }
        self.happened.truncate(EVENTS_KEPT);
    }

    /// Models in the chosen order.
    pub fn models(&self) -> Vec<&ResidencyEntry> {
        let models = self.sample.as_ref().map_or(&[][..], |(sample, _)| &sample.residency.models);
        let mut models: Vec<_> = models.iter().collect();
        match self.sort {
            Sort::Weights => models.sort_by_key(|model| (u64::MAX - model.weight_bytes, model.id)),
            Sort::Name => models.sort_by_key(|model| (model.model.is_empty(), &model.model, model.id)),
            Sort::Requests => models.sort_by_key(|model| (u32::MAX - model.sequences, model.id)),
            Sort::Idle => models.sort_by_key(|model| (u64::MAX - model.idle_ms.unwrap_or(0), model.id)),
            // 0 means never evicted: the wrap puts it last.
            Sort::Leaves => models.sort_by_key(|model| (model.eviction_place.wrapping_sub(1), model.id)),
        }
        models
    }

    /// Index of the selected model in [`App::models`].
    pub fn selected_at(&self) -> Option<usize> {
        self.models().iter().position(|model| Some(model.id) == self.selected)
    }

    /// Selects another model if the selected one is gone.
    fn keep_selection(&mut self) {
        if self.selected_at().is_none() {
            self.selected = self.models().first().map(|model| model.id);
        }
    }

    fn select(&mut self, step: isize) {
        let models = self.models();
        let at = self.selected_at().unwrap_or(0).saturating_add_signed(step);
        let id = models.get(at.min(models.len().saturating_sub(1))).map(|model| model.id);
        self.selected = id;
    }

    /// Handles a key. Returns `Some` if the program is to end; for Ctrl-C with the signal's number, because a
    /// terminal in raw mode delivers it as a key.
    pub fn key(&mut self, key: KeyEvent) -> Option<Option<u8>> {
        const SIGINT: u8 = 2;
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Some(Some(SIGINT)),
            KeyCode::Char('q') => return Some(None),
            KeyCode::Esc if self.help || self.details => (self.help, self.details) = (false, false),
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Enter => self.details = !self.details,
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::PageUp => self.select(-PAGE),
            KeyCode::PageDown => self.select(PAGE),
            KeyCode::Home => self.select(isize::MIN),
            KeyCode::End => self.select(isize::MAX),
            _ => {}
        }
        None
    }
}
