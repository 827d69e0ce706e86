//! llama.cpp's own bench: Debian's build in a private directory, without changes to the system.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::host;

/// The bench and the libraries it links to. From Debian's unstable suite: the stable suites have no llama.cpp.
const PACKAGES: [&str; 9] = [
    "llama.cpp-tools",
    "libllama0",
    "libggml0",
    "libc6",
    "libstdc++6",
    "libgcc-s1",
    "libgomp1",
    "libssl3t64",
    "libzstd1",
];

/// A runnable llama-bench.
pub struct LlamaBench {
    program: PathBuf,
    /// Its own dynamic linker and libraries; `None` if it uses the system's.
    root: Option<Root>,
}

struct Root {
    linker: PathBuf,
    libraries: Vec<PathBuf>,
    /// Folder of the kernels for each processor; llama-bench looks for them in the working directory.
    backends: PathBuf,
}

/// One line of llama-bench's output.
#[derive(Clone, Debug, Deserialize)]
pub struct Measured {
    build_commit: String,
    build_number: u64,
    cpu_info: String,
    backends: String,
    n_threads: u64,
    n_prompt: u64,
    n_gen: u64,
    flash_attn: serde_json::Value,
    #[serde(rename = "avg_ts")]
    tokens_per_s: f64,
}

/// A measurement.
#[derive(Clone, Copy)]
pub enum What {
    /// Prefill of a prompt of this many tokens.
    Prefill(u64),
    /// Decode of this many tokens after an empty context.
    Decode(u64),
}

impl LlamaBench {
    /// Uses the given program, or Debian's package unpacked below `work`.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason.
    pub fn get(given: Option<&Path>, work: &Path) -> Result<Self> {
        if let Some(program) = given {
            return Ok(Self { program: program.into(), root: None });
        }
        let root = work.join("llama.cpp");
        let program = root.join("usr/bin/llama-bench");
        if !program.is_file() {
            unpack(&root)?;
        }
        let missing =
            || Error::Unavailable { what: "llama-bench", why: "the packages lack an expected file".into() };
        let linker = find_by(&root, &|name| name.starts_with("ld-linux")).ok_or_else(missing)?;
        let library = |name: &str| find(&root, name).and_then(|path| path.parent().map(Path::to_path_buf));
        let libraries = ["libc.so.6", "libllama.so.0", "libllama-bench-impl.so"]
            .into_iter()
            .filter_map(library)
            .collect();
        let backend = find_by(&root, &|name| name.starts_with("libggml-cpu")).ok_or_else(missing)?;
        let backends = backend.parent().ok_or_else(missing)?.to_path_buf();
        Ok(Self { program, root: Some(Root { linker, libraries, backends }) })
    }

    /// Tokens per second, with the faster of flash attention on and off, and the build that ran.
    ///
    /// # Errors
    /// [`Error::Command`], [`Error::Unexpected`].
    pub fn measure(&self, model: &Path, threads: usize, what: What) -> Result<Measured> {
        let mut command = match &self.root {
            None => Command::new(&self.program),
            Some(root) => {
                let mut command = Command::new(&root.linker);
                let paths: Vec<_> = root.libraries.iter().map(|dir| dir.to_string_lossy()).collect();
                command
                    .arg("--library-path")
                    .arg(paths.join(":"))
                    .arg(&self.program)
                    .current_dir(&root.backends);
                command
            }
        };
        let (prompt, generated) = match what {
            What::Prefill(n) => (n, 0),
            What::Decode(n) => (0, n),
        };
        command.arg("-m").arg(model).args([
            "-t",
            &threads.to_string(),
            "-o",
            "json",
            "-r",
            "2",
            "-fa",
            "0,1",
        ]);
        command.args(["-p", &prompt.to_string(), "-n", &generated.to_string()]);
        // llama-bench names each directory that it does not find; its status shows real errors.
        let shown = host::shown(&command);
        let output = command.stdin(Stdio::null()).output().map_err(Error::io(shown.clone()))?;
        host::check_interrupted()?;
        if !output.status.success() {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            return Err(Error::Command { command: shown, status: output.status });
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let all: Vec<Measured> = serde_json::from_str(&text)
            .map_err(|_| Error::Unexpected { what: "llama-bench", text: text.clone() })?;
        let wanted = all.into_iter().filter(|m| (m.n_prompt, m.n_gen) == (prompt, generated));
        wanted
            .max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s))
            .ok_or(Error::Unexpected { what: "llama-bench", text })
    }
}

impl Measured {
    /// Tokens per second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens_per_s
    }

    /// The build, and the processor it reports.
    pub fn build(&self) -> String {
        let Self { build_commit, build_number, cpu_info, backends, n_threads, .. } = self;
        format!("build {build_number} ({build_commit}), {backends}, {n_threads} threads, {cpu_info}")
    }

    /// The fastest flags.
    pub fn flags(&self) -> String {
        format!("-fa {}", self.flash_attn)
    }
}

/// Downloads the packages with apt and unpacks them below `root`. apt's lists and cache stay there too.
fn unpack(root: &Path) -> Result<()> {
    let unavailable = |why: &str| Error::Unavailable { what: "llama-bench", why: why.into() };
    if !host::have("apt-get") || !host::have("dpkg-deb") {
        return Err(unavailable("this is not Debian; name your own llama-bench with --llama-bench"));
    }
    let mirror = mirror().ok_or_else(|| unavailable("the apt sources name no Debian mirror"))?;
    eprintln!("downloading Debian's llama.cpp-tools to {}", root.display());
    let apt = root.with_extension("apt");
    for below in ["lists/partial", "cache/archives/partial", "deb"] {
        let dir = apt.join(below);
        fs::create_dir_all(&dir).map_err(Error::at(&dir))?;
    }
    let source = apt.join("sid.sources");
    let keyring = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let text = format!("Types: deb\nURIs: {mirror}\nSuites: sid\nComponents: main\nSigned-By: {keyring}\n");
    fs::write(&source, text).map_err(Error::at(&source))?;
    let mut options = Vec::new();
    let lists = apt.join("lists");
    let cache = apt.join("cache");
    for (key, value) in [
        ("Dir::Etc::sourcelist", source.as_path()),
        ("Dir::Etc::sourceparts", Path::new("/dev/null")),
        ("Dir::State::Lists", &lists),
        ("Dir::Cache", &cache),
    ] {
        options.push(format!("-o{key}={}", value.display()));
    }
    options.push("-oAPT::Sandbox::User=root".into());
    let apt_get = |arguments: &[&str]| {
        host::run(
            Command::new("apt-get").args(&options).arg("-qq").args(arguments).current_dir(apt.join("deb")),
        )
    };
    apt_get(&["update"])?;
    apt_get(&[&["download"], &PACKAGES[..]].concat())?;
    let unpacked = root.with_extension("new");
    for entry in fs::read_dir(apt.join("deb")).map_err(Error::at(&apt))? {
        let package = entry.map_err(Error::at(&apt))?.path();
        host::run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&unpacked))?;
    }
    fs::rename(&unpacked, root).map_err(Error::at(&unpacked))?;
    fs::remove_dir_all(&apt).map_err(Error::at(&apt))
}

/// The mirror this machine's apt uses for Debian.
fn mirror() -> Option<String> {
    let parts =
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let files = std::iter::once(PathBuf::from("/etc/apt/sources.list")).chain(parts);
    let texts = files.filter_map(|path| fs::read_to_string(path).ok()).collect::<Vec<_>>().join("\n");
    let lines = texts.lines().filter(|line| line.starts_with("deb ") || line.starts_with("URIs:"));
    lines
        .flat_map(str::split_whitespace)
        .find(|word| word.trim_end_matches('/').ends_with("/debian"))
        .map(str::to_owned)
}

fn find(dir: &Path, name: &str) -> Option<PathBuf> {
    find_by(dir, &|found| found == name)
}

/// The first file below `dir` whose name matches. Links to files count; links to directories are not followed.
fn find_by(dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Some(found) = find_by(&path, wanted) {
                return Some(found);
            }
        } else if wanted(&entry.file_name().to_string_lossy()) && path.is_file() {
            return Some(path);
        }
    }
    None
}
