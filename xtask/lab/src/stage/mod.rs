//! Parts of the check that need the library. `cargo xtask check` runs each as a program of its own.

mod comgr;

use std::path::PathBuf;
use std::time::Duration;

use xtask::check::Done;
use xtask::error::{Error, Result};
use xtask::host::Programs;
use xtask::lookalike::{self, Variant};

use crate::{gpu_report, kernels, soak};

#[derive(clap::Args)]
pub struct Args {
    part: Part,
    /// File for the note and for what was skipped
    #[arg(long, value_name = "FILE")]
    result: PathBuf,
    /// Run the long form
    #[arg(long)]
    long: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Part {
    /// The kept code objects
    Objects,
    /// The GPU owners' report, made on the look-alike
    Report,
    /// Ten seconds of many clients
    Soak,
    /// A minute without a client
    Pause,
}

/// Targets compiled again in each run of the long form. All 15 take seven minutes on two cores; `cargo xtask kernels --check` compiles
/// them all.
const COMPILED: usize = 2;

/// How long no client is connected; by then idle models have freed everything but their weights.
const PAUSE_TIME: Duration = Duration::from_secs(62);

const SOAK_TIME: Duration = Duration::from_secs(10);

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let programs = if args.long { Programs::Release } else { Programs::Tested };
    let done = match args.part {
        Part::Objects => objects(args.long)?,
        Part::Report => {
            gpu_report::on_lookalike(&lookalike::build(Variant::Wave32)?)?;
            Done::default()
        }
        Part::Soak => soak::soak(&programs.build()?, SOAK_TIME, 16, 1).map(Done::note)?,
        Part::Pause => match soak::across_sessions(&programs.build()?, PAUSE_TIME) {
            Err(error @ Error::ToolMissing { .. }) => Done::skipped(error.to_string()),
            other => Done::note(other?),
        },
    };
    done.write(&args.result)
}

/// A digest shows quickly that the archive is complete, passed the gates and was made from these sources. AMD's own
/// reader reads all kept objects. The long form compiles some targets again, to confirm the digest, and the NVIDIA body.
fn objects(long: bool) -> Result<Done> {
    kernels::check_made_from()?;
    let read = comgr::run()?;
    if !long {
        return Ok(read);
    }
    let kept = kernels::check(&kernels::drawn(COMPILED))?;
    println!("{}", kernels::build_nvidia()?.display());
    Ok(Done { note: format!("{kept}; {}", read.note), skipped: read.skipped })
}
