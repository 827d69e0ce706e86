//! Prints one frame, or lines of JSON.

use std::io::{IsTerminal, Write};

use serde_json::json;

use crate::app::App;
use crate::arguments::Arguments;
use crate::watch::{self, Update};
use crate::{Failure, text, view};

/// Columns of a frame that goes to no terminal.
const COLUMNS: usize = 100;

/// Most columns of a frame.
const COLUMNS_MAX: usize = 1000;

/// Prints a frame after one interval. Never returns a signal's number: signals end the program by themselves.
pub fn frame(arguments: &Arguments, out: &mut dyn Write) -> Result<Option<u8>, Failure> {
    let app = two_samples(arguments)?;
    let stated = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let columns = stated.or_else(of_terminal).unwrap_or(COLUMNS).min(COLUMNS_MAX);
    for line in view::lines(&app, columns, None) {
        writeln!(out, "{}", line.to_string().trim_end())?;
    }
    out.flush()?;
    Ok(None)
}

/// Columns of the terminal that the frame is printed on.
fn of_terminal() -> Option<usize> {
    let size = std::io::stdout().is_terminal().then(ratatui::crossterm::terminal::size)?;
    size.ok().map(|(columns, _)| columns.into()).filter(|columns| *columns > 0)
}

fn two_samples(arguments: &Arguments) -> Result<App, Failure> {
    let options = arguments.options();
    options.check()?;
    let mut app = App::default();
    let mut samples = 0;
    for update in watch::start(&options, arguments.interval)? {
        samples += u32::from(matches!(update, Update::Sample(..)));
        match update {
            Update::Gone(error) => return Err(error.into()),
            update => app.update(update),
        }
        if samples == 2 {
            break;
        }
    }
    Ok(app)
}

/// Prints one sample per line. If the daemon goes away later, prints a line for that too.
pub fn json_lines(arguments: &Arguments, out: &mut dyn Write) -> Result<Option<u8>, Failure> {
    if arguments.once {
        let app = two_samples(arguments)?;
        print(&app, out)?;
        return Ok(None);
    }
    let options = arguments.options();
    options.check()?;
    let mut app = App::default();
    for update in watch::start(&options, arguments.interval)? {
        match update {
            Update::Gone(error) if app.sample.is_none() => return Err(error.into()),
            Update::Gone(error) => {
                let what = json!({
                    "name": error.code_name(),
                    "message": text::printable(&error.to_string()),
                });
                writeln!(out, "{}", json!({ "error": what }))?;
                out.flush()?;
                app.update(Update::Gone(error));
            }
            update @ Update::Events(_) => app.update(update),
            update @ Update::Sample(..) => {
                app.update(update);
                print(&app, out)?;
                app.happened.clear();
                app.missed = 0;
            }
        }
    }
    Ok(None)
}

fn print(app: &App, out: &mut dyn Write) -> Result<(), Failure> {
    if let Some((sample, _)) = &app.sample {
        let mut happened: Vec<_> = app.happened.iter().cloned().collect();
        happened.reverse();
        writeln!(out, "{}", sample.to_json(&app.rates, &happened, app.missed))?;
        out.flush()?;
    }
    Ok(())
}
