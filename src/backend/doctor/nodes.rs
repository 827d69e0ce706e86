//! Finds AMD GPUs on the PCI bus and checks the kernel nodes through which programs reach them.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Check, State};

/// AMD's PCI vendor id.
const VENDOR: &str = "0x1002";

/// Display controllers (0x03) and accelerators (0x12) by the first byte of their class.
const CLASSES: [&str; 2] = ["0x03", "0x12"];

/// Most entries read of a folder; the folders read here hold some dozens.
const ENTRIES_MAX: usize = 4096;

/// Findings under `/sys` and `/dev`.
#[derive(Debug)]
pub(super) struct Nodes {
    /// AMD GPUs on the bus.
    amd: Vec<String>,
    kfd: Node,
    render: Vec<Node>,
    /// Text of `/etc/group`: each line has the name first and the number after the second colon.
    groups: String,
}

#[derive(Debug)]
struct Node {
    path: PathBuf,
    /// Group that owns the node; `None` if the node does not exist.
    group: Option<u32>,
    /// Why it could not be opened for reading and writing.
    refused: Option<ErrorKind>,
}

impl Nodes {
    /// Reads the nodes below `root`.
    pub fn read(root: &Path) -> Self {
        let dri = root.join("dev/dri");
        let mut render: Vec<PathBuf> =
            list(&dri).into_iter().filter(|path| name(path).starts_with("renderD")).collect();
        render.sort();
        Self {
            amd: amd_gpus(&root.join("sys/bus/pci/devices")),
            kfd: Node::read(root.join("dev/kfd")),
            render: render.into_iter().map(Node::read).collect(),
            groups: fs::read_to_string(root.join("etc/group")).unwrap_or_default(),
        }
    }

    /// Whether there is an AMD GPU.
    pub fn has_amd(&self) -> bool {
        !self.amd.is_empty()
    }

    /// `works` says that a GPU was reached: missing nodes are then notes, because nothing needed them.
    pub fn checks(&self, works: bool) -> Vec<Check> {
        let fault = if works || !self.has_amd() { State::Note } else { State::Problem };
        let mut checks = vec![self.bus(), self.kfd(fault), self.render(fault)];
        // A note needs no action.
        checks.iter_mut().filter(|check| check.state == State::Note).for_each(|check| check.advice.clear());
        checks
    }

    fn bus(&self) -> Check {
        let name = "AMD GPU";
        if self.amd.is_empty() {
            return Check::new(name, State::Note, "none on the PCI bus", "");
        }
        Check::new(name, State::Good, self.amd.join(", "), "")
    }

    fn kfd(&self, fault: State) -> Check {
        let name = "/dev/kfd";
        match (self.kfd.group, self.kfd.refused) {
            (None, _) => Check::new(
                name,
                fault,
                "does not exist",
                "load the amdgpu driver (modprobe amdgpu; its messages: dmesg | grep amdgpu); in a container, pass \
                 --device=/dev/kfd --device=/dev/dri",
            ),
            (Some(_), None) => Check::new(name, State::Good, "can be opened", ""),
            (Some(group), Some(why)) => Check::new(name, fault, cannot(why), self.join_group(why, group)),
        }
    }

    fn render(&self, fault: State) -> Check {
        let name = "/dev/dri";
        let nodes: Vec<String> = self.render.iter().map(|node| super::nodes::name(&node.path)).collect();
        let bad = self.render.iter().find_map(|node| Some((node, node.group?, node.refused?)));
        match bad {
            _ if nodes.is_empty() => Check::new(
                name,
                fault,
                "no render node",
                "load the GPU's driver; in a container, pass --device=/dev/dri",
            ),
            None => Check::new(name, State::Good, format!("{} can be opened", nodes.join(", ")), ""),
            Some((node, group, why)) => {
                let found = format!("{} {}", super::nodes::name(&node.path), cannot(why));
                Check::new(name, fault, found, self.join_group(why, group))
            }
        }
    }

    /// Advice for a node that is owned by `group` and could not be opened.
    fn join_group(&self, why: ErrorKind, group: u32) -> String {
        if why != ErrorKind::PermissionDenied {
            return "see the kernel's messages: dmesg | grep amdgpu".into();
        }
        let uid = rustix::process::getuid().as_raw();
        let mine = rustix::process::getegid().as_raw() == group
            || rustix::process::getgroups().is_ok_and(|all| all.iter().any(|gid| gid.as_raw() == group));
        let group = self.group_name(group);
        if mine {
            return format!(
                "the daemon is in group {group}, so its confinement forbids it: check DeviceAllow= of its systemd unit, or the \
                 container's devices"
            );
        }
        format!(
            "let the daemon's user (uid {uid}) join the group: usermod -aG {group} USER, or SupplementaryGroups={group} in its \
             systemd unit; then restart it"
        )
    }

    fn group_name(&self, gid: u32) -> String {
        let line = self.groups.lines().find(|line| line.split(':').nth(2) == Some(&gid.to_string()));
        line.and_then(|line| line.split(':').next()).map_or_else(|| gid.to_string(), str::to_owned)
    }
}

impl Node {
    fn read(path: PathBuf) -> Self {
        let group = fs::metadata(&path).ok().map(|meta| meta.gid());
        let opened = group.map(|_| OpenOptions::new().read(true).write(true).open(&path));
        let refused = opened.and_then(|opened| opened.err().map(|error| error.kind()));
        Self { path, group, refused }
    }
}

fn cannot(why: ErrorKind) -> String {
    format!("cannot be opened: {why}")
}

/// AMD GPUs on the bus, as PCI address and device number.
fn amd_gpus(devices: &Path) -> Vec<String> {
    let text =
        |path: &Path, file: &str| fs::read_to_string(path.join(file)).unwrap_or_default().trim().to_owned();
    let mut found: Vec<String> = list(devices)
        .iter()
        .filter(|path| text(path, "vendor") == VENDOR)
        .filter(|path| CLASSES.iter().any(|class| text(path, "class").starts_with(class)))
        .map(|path| format!("{} (device {})", name(path), text(path, "device")))
        .collect();
    found.sort();
    found
}

fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).take(ENTRIES_MAX).collect()
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("it lies in a folder")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    const GPU: [(&str, &str); 3] = [
        ("sys/bus/pci/devices/0000:03:00.0/vendor", "0x1002\n"),
        ("sys/bus/pci/devices/0000:03:00.0/class", "0x030000\n"),
        ("sys/bus/pci/devices/0000:03:00.0/device", "0x744c\n"),
    ];

    #[test]
    fn a_machine_without_a_gpu_has_notes_only() {
        let root = machine(&[
            ("sys/bus/pci/devices/0000:00:01.0/vendor", "0x1022"),
            ("sys/bus/pci/devices/0000:00:02.0/vendor", "0x1002"),
            ("sys/bus/pci/devices/0000:00:02.0/class", "0x040300"),
        ]);
        let nodes = Nodes::read(root.path());
        assert!(!nodes.has_amd());
        assert!(
            nodes.checks(false).iter().all(|check| check.state == State::Note && check.advice.is_empty())
        );
    }

    #[test]
    fn a_gpu_without_its_driver_is_told_what_to_load() {
        let root = machine(&GPU);
        let checks = Nodes::read(root.path()).checks(false);
        assert_eq!(checks[0].found, "0000:03:00.0 (device 0x744c)");
        assert_eq!((checks[1].state, checks[2].state), (State::Problem, State::Problem));
        assert!(checks[1].advice.contains("modprobe amdgpu"));
        // Missing nodes that nothing needed are no problem.
        assert!(Nodes::read(root.path()).checks(true).iter().all(|check| check.state != State::Problem));
    }

    #[test]
    fn nodes_that_open_are_good() {
        let mut files = GPU.to_vec();
        files.extend([("dev/kfd", ""), ("dev/dri/renderD128", ""), ("dev/dri/card0", "")]);
        let root = machine(&files);
        let checks = Nodes::read(root.path()).checks(false);
        assert!(checks.iter().all(|check| check.state == State::Good), "{checks:?}");
        assert_eq!(checks[2].found, "renderD128 can be opened");
    }

    #[test]
    fn a_refused_node_names_its_group() {
        // Built by hand: root opens everything, so the test cannot cause a real refusal.
        let node = |group| Node {
            path: "/dev/kfd".into(),
            group: Some(group),
            refused: Some(ErrorKind::PermissionDenied),
        };
        let theirs = 4_000_000_001;
        let nodes = Nodes {
            amd: vec!["one".into()],
            kfd: node(theirs),
            render: vec![node(rustix::process::getegid().as_raw())],
            groups: format!("video:x:44:\nrender:x:{theirs}:someone\n"),
        };
        let checks = nodes.checks(false);
        assert_eq!(checks[1].state, State::Problem);
        assert!(checks[1].advice.contains("usermod -aG render USER"), "{}", checks[1].advice);
        assert!(checks[2].advice.contains("DeviceAllow="), "{}", checks[2].advice);
    }
}
