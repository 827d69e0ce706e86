//! `cargo xtask attack`: one user takes all it can get from a private daemon; measures what that costs the others.
//!
//! Each attack runs as one user or several. Beside them, another user asks for short answers, one after another, and so
//! does root. Their times are compared with those beside a fair neighbour, who asks for one answer after another. These are
//! measured just before each attack: a machine that others use is slower at one time than at another.

mod shares;
mod users;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use xtask::daemon::{self, Daemon};
use xtask::error::{Error, Result};
use xtask::{host, lookalike};

use rocmforge_test_support::hanging::HangingFs;
use users::{Attack, Times};

use crate::soak::process::Process;
pub use users::{UserArgs, as_user};

const INNOCENT: u32 = 54_320;
/// The first attacker; those beside it have the numbers after it.
const ATTACKER_UIDS_FROM: u32 = 54_321;

/// Most times of the innocent user, in those beside a fair neighbour.
const MEDIAN_MOST: f64 = 2.0;
const WORST_MOST: f64 = 3.0;
/// Longest answer to root, if a fair neighbour lets it have that.
const ROOT_MOST: Duration = Duration::from_secs(1);
/// Room for a whole answer of each of 32 users of a model like SmolLM2: 23 KB a token.
const KV_MIB: u64 = 400;
/// Memory that the daemon's configuration lets requests, answers, headers and KV pages take, and 256 MiB more.
const MEMORY_MIB_MOST: u64 = 2 * 256 + 1024 + KV_MIB + 256;
/// Memory that may stay after an attack, and the time until then.
const LEFT_MIB_MOST: u64 = 64;
const REST: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub struct Args {
    /// Only this attack
    #[arg(long, value_name = "NAME")]
    only: Option<Attack>,
    /// Short answers that the innocent user asks for during each attack [default: 100, and 40 on the look-alike]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Users that attack at the same time; as many fair neighbours are what it is compared with
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    users: u32,
    /// A model file [default: SmolLM2, which is fetched, and a tiny one for the look-alike]
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Where the attacks compute
    #[arg(long, default_value = "cpu", value_enum)]
    backend: Backend,
    /// Only users with unequal demand, without attacks
    #[arg(long, conflicts_with = "only")]
    shares: bool,
}

/// Where the attacks compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// This machine's processors
    Cpu,
    /// This machine's GPU
    Hip,
    /// A library that runs a GPU's kernels on the processors
    Lookalike,
}

impl Backend {
    /// The daemon's configuration, and its environment.
    fn config(self) -> Result<(String, Vec<(&'static str, PathBuf)>)> {
        let (name, more) = match self {
            Self::Cpu => ("cpu", ""),
            Self::Hip => ("hip", ""),
            Self::Lookalike => ("hip", "[limits]\nstep_rows = 32\n"),
        };
        // Without reuse, a prompt that an attacker repeats costs as much as a new one.
        let config =
            format!("[device]\nbackend = '{name}'\n[kv]\nbudget_mib = {KV_MIB}\nreuse = 'off'\n{more}");
        let library = match self {
            Self::Lookalike => vec![("ROCMFORGE_HIP_LIB", lookalike::build(lookalike::Variant::Wave32)?)],
            Self::Cpu | Self::Hip => Vec::new(),
        };
        Ok((config, library))
    }
}

/// The daemon, and a second directory of models that can hang.
struct Target {
    daemon: Daemon,
    backend: Backend,
    far: Option<HangingFs>,
    far_file: PathBuf,
}

/// One line of the table.
struct Row {
    attack: Attack,
    innocent: Times,
    root: Times,
    memory_mib: u64,
    left_mib: u64,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        let text = "it starts processes of several users: run it as root".to_owned();
        return Err(Error::Unexpected { what: "the user", text });
    }
    let binaries = daemon::build()?;
    let models = models(args)?;
    let target = Target::start(&binaries, models.path(), args.backend)?;
    let mut faults = Vec::new();
    if !args.shares {
        attack(&target, args, &mut faults)?;
    }
    if args.only.is_none() {
        shares::run(&target, &mut faults)?;
    }
    target.daemon.stop()?;
    if faults.is_empty() { Ok(()) } else { Err(Error::Attacked { faults: faults.join("\n  ") }) }
}

impl Target {
    fn start(binaries: &Path, models: &Path, backend: Backend) -> Result<Self> {
        let far_dir = models.join("far");
        std::fs::create_dir(&far_dir).map_err(Error::at(&far_dir))?;
        let file = models.join(format!("{}.gguf", users::MODEL));
        let bytes = std::fs::read(&file).map_err(Error::at(&file))?;
        let name = format!("{}.gguf", users::FAR);
        let far = HangingFs::mount(&far_dir, &[(&name, &bytes)]);
        let far =
            far.inspect_err(|error| println!("nothing hangs: this machine cannot mount FUSE: {error}")).ok();
        let (config, environment) = backend.config()?;
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        let daemon = Daemon::start_with(binaries, &[models, &far_dir], &config, &environment)?;
        open_to_all(&daemon.socket())?;
        Ok(Self { daemon, backend, far, far_file: far_dir.join(name) })
    }

    /// This program again, as that user.
    fn user(&self, attack: Attack, requests: u32, uid: u32) -> Result<Child> {
        use std::os::unix::process::CommandExt;
        // Other users may not read this program where it was built.
        let program = self.daemon.socket().with_file_name("attack");
        if !program.exists() {
            let own = std::env::current_exe().map_err(Error::io("this program"))?;
            std::fs::copy(&own, &program).map_err(Error::at(&program))?;
        }
        // A session of its own, as each user's login is: the kernel may then give each an equal share of the processors.
        let mut command = Command::new("setsid");
        command
            .arg(program)
            .arg("attack-as")
            .arg(attack.to_string())
            .arg("--socket")
            .arg(self.daemon.socket());
        command.arg("--requests").arg(requests.to_string()).arg("--far").arg(&self.far_file);
        if self.backend == Backend::Lookalike {
            command.arg("--emulated");
        }
        command.uid(uid).gid(uid).stdout(Stdio::piped());
        command.spawn().map_err(Error::io("setsid"))
    }
}

/// Prints a line for each attack; what is wrong goes to `faults`.
fn attack(target: &Target, args: &Args, faults: &mut Vec<String>) -> Result<()> {
    let requests = args.requests.unwrap_or(if args.backend == Backend::Lookalike { 40 } else { 100 });
    let start_mib = memory_mib(target.daemon.pid())?;
    println!(
        "{:<14}{:>10}{:>10}{:>8}{:>10}{:>10}{:>8}{:>10}{:>10}{:>10}",
        "attack", "fair p50", "p50 ms", "x", "fair p99", "p99 ms", "x", "root ms", "RSS MiB", "left MiB"
    );
    let possible = |attack: &&Attack| **attack != Attack::Hanging || target.far.is_some();
    for attack in Attack::ALL.iter().filter(possible).filter(|a| args.only.is_none_or(|only| only == **a)) {
        let [fair, row] = [Attack::Fair, *attack].map(|attack| {
            host::check_interrupted()?;
            measure(target, attack, args.users, requests, start_mib)
        });
        show(&row?, &fair?, faults);
    }
    Ok(())
}

/// A directory with the model under the name that all users ask for.
fn models(args: &Args) -> Result<tempfile::TempDir> {
    let models = tempfile::tempdir().map_err(Error::io("temporary directory"))?;
    let model = match (&args.model, args.backend) {
        (Some(model), _) => model.clone(),
        (None, Backend::Lookalike) => host::root().join("tests/models/tinystories-260k-f32.gguf"),
        (None, Backend::Cpu | Backend::Hip) => xtask::models::ensure(xtask::models::SMOLLM2)?,
    };
    std::fs::copy(&model, models.path().join(format!("{}.gguf", users::MODEL))).map_err(Error::at(&model))?;
    // The attacker opens a file in there.
    std::fs::set_permissions(models.path(), std::fs::Permissions::from_mode(0o755))
        .map_err(Error::at(models.path()))?;
    Ok(models)
}

fn open_to_all(socket: &Path) -> Result<()> {
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(Error::at(path))
    };
    socket.parent().map_or(Ok(()), |dir| open(dir, 0o755))?;
    open(socket, 0o666)
}

fn measure(target: &Target, attack: Attack, users: u32, requests: u32, start_mib: u64) -> Result<Row> {
    let pid = target.daemon.pid();
    let uids = ATTACKER_UIDS_FROM..ATTACKER_UIDS_FROM + users;
    let attackers = uids.clone().map(|uid| target.user(attack, requests, uid)).collect::<Result<Vec<_>>>();
    let mut attackers = attackers?;
    thread::sleep(Duration::from_secs(3));
    let hangs = target.far.as_ref().filter(|_| attack == Attack::Hanging);
    hangs.inspect(|far| far.hang());
    let innocent = target.user(Attack::Ask, requests, INNOCENT)?;
    let root = target.user(Attack::Ask, requests / 4 + 1, 0)?;
    let watched = watch(pid, [innocent, root])?;
    attackers.iter_mut().for_each(|attacker| drop(attacker.kill()));
    // The kernel waits for the server when it closes the attacker's files.
    hangs.inspect(|far| far.answer());
    attackers.iter_mut().for_each(|attacker| drop(attacker.wait()));
    for uid in uids {
        let left = target.user(Attack::Leave, 0, uid)?.wait();
        left.map_err(Error::io("an attacker's last process"))?;
    }
    if attack != Attack::Fair {
        thread::sleep(REST);
    }
    let left_mib = memory_mib(pid)?.saturating_sub(start_mib);
    let [innocent, root] = watched.times;
    Ok(Row { attack, innocent, root, memory_mib: watched.memory_mib, left_mib })
}

struct Watched {
    times: [Times; 2],
    memory_mib: u64,
}

/// Waits for both, and reads the daemon's memory meanwhile.
fn watch(pid: u32, users: [Child; 2]) -> Result<Watched> {
    let threads = users.map(|user| thread::spawn(move || user.wait_with_output()));
    let mut memory_mib = 0;
    while !threads.iter().all(thread::JoinHandle::is_finished) {
        memory_mib = memory_mib.max(self::memory_mib(pid)?);
        host::check_interrupted()?;
        thread::sleep(Duration::from_millis(100));
    }
    let mut times = Vec::new();
    for thread in threads {
        let output = thread.join().map_err(|_| unexpected("a user's thread panicked"))?;
        let output = output.map_err(Error::io("a user"))?;
        times.push(
            Times::read(&String::from_utf8_lossy(&output.stdout))
                .ok_or_else(|| unexpected("a user ended early"))?,
        );
    }
    let times = times.try_into().map_err(|_| unexpected("a user is missing"))?;
    Ok(Watched { times, memory_mib })
}

fn unexpected(text: &str) -> Error {
    Error::Unexpected { what: "the attack", text: text.to_owned() }
}

fn show(row: &Row, fair: &Row, faults: &mut Vec<String>) {
    let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64().max(1e-6);
    let (median, worst) =
        (ratio(row.innocent.median, fair.innocent.median), ratio(row.innocent.worst, fair.innocent.worst));
    // Where a fair neighbour's answers take seconds, as on the look-alike, root's do.
    let root_most = ROOT_MOST.max(fair.root.worst.mul_f64(WORST_MOST));
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{:<14}{:>10.1}{:>10.1}{median:>8.2}{:>10.1}{:>10.1}{worst:>8.2}{:>10.1}{:>10}{:>10}",
        row.attack,
        ms(fair.innocent.median),
        ms(row.innocent.median),
        ms(fair.innocent.worst),
        ms(row.innocent.worst),
        ms(row.root.worst),
        row.memory_mib,
        row.left_mib
    );
    if row.attack == Attack::Busy {
        return; // what the machine itself lets one user do to others
    }
    let failed = row.innocent.failed + row.root.failed;
    let checks = [
        (failed > 0, format!("{failed} requests of others failed")),
        (median > MEDIAN_MOST, format!("p50 is {median:.2} times that beside a fair neighbour")),
        (worst > WORST_MOST, format!("p99 is {worst:.2} times that beside a fair neighbour")),
        (row.root.worst > root_most, format!("root waited for {:.2} s", row.root.worst.as_secs_f64())),
        (row.memory_mib > MEMORY_MIB_MOST, format!("the daemon took {} MiB", row.memory_mib)),
        (row.left_mib > LEFT_MIB_MOST, format!("{} MiB stayed", row.left_mib)),
    ];
    faults.extend(
        checks.into_iter().filter(|(fault, _)| *fault).map(|(_, text)| format!("{}: {text}", row.attack)),
    );
}

/// Resident memory of the process that is not of files.
fn memory_mib(pid: u32) -> Result<u64> {
    Ok(Process::of(pid).sample(Duration::ZERO)?.anon_kib >> 10)
}

/// Time of one request.
fn timed<T, E>(work: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<Duration, E> {
    let begun = Instant::now();
    work().map(|_| begun.elapsed())
}
