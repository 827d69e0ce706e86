//! The terminal: taken over, drawn on, and always restored.

use std::io::{self, Stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::TryRecvError;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, execute};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::app::App;
use crate::arguments::Arguments;
use crate::watch::{self, Update};
use crate::{Failure, view};

/// Longest delay before a key, an update or a signal is noticed: too short for a person to see.
const TURN: Duration = Duration::from_millis(50);

/// True while the program controls the terminal.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Control of the terminal. Dropping it restores the terminal, and so does a panic, so that its message is readable.
#[derive(Debug)]
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// Those of the terminal.
    pub fn open() -> io::Result<Self> {
        let otherwise = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            give_back();
            otherwise(info);
        }));
        TAKEN.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        let opened = execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        // From here on the drop restores it.
        opened.map(|terminal| Self { terminal }).inspect_err(|_| give_back())
    }

    fn draw(&mut self, app: &App) -> io::Result<()> {
        self.terminal.draw(|frame| view::draw(app, frame.buffer_mut()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Restores the terminal once, so that later output stays. A terminal that is gone needs nothing.
fn give_back() {
    if !TAKEN.swap(false, Ordering::SeqCst) {
        return;
    }
    let _ = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
    let _ = disable_raw_mode();
}

/// Watches until a key or a signal ends it; returns the signal's number.
pub fn run(arguments: &Arguments) -> Result<Option<u8>, Failure> {
    let options = arguments.options();
    options.check()?;
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let value = usize::try_from(number).unwrap_or(0);
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value)?;
    }
    let updates = watch::start(&options, arguments.interval)?;
    let mut app = App::default();
    // If the daemon never answered, that is an error on the normal screen. If it goes away later, the view waits for
    // it.
    while app.sample.is_none() {
        match updates.recv_timeout(TURN) {
            Ok(Update::Gone(error)) => return Err(error.into()),
            Ok(update) => app.update(update),
            Err(_) if signal.load(Ordering::Relaxed) != 0 => break,
            Err(_) => {}
        }
    }
    let mut screen = Screen::open()?;
    loop {
        match signal.load(Ordering::Relaxed) {
            0 => {}
            number => return Ok(u8::try_from(number).ok()),
        }
        loop {
            match updates.try_recv() {
                Ok(update) => app.update(update),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(io::Error::other("the thread that asks the daemon ended").into());
                }
            }
        }
        screen.draw(&app)?;
        if event::poll(TURN)?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && let Some(end) = app.key(key)
        {
            return Ok(end);
        }
    }
}
