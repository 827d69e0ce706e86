//! Tells files on file systems whose server may hang: FUSE, network and cluster file systems.
//!
//! A page of such a file may never come, and the thread that reads it then stands still for good. Any user may mount
//! FUSE. So the store maps no such file. It maps a copy in memory (`copy`). A client may pass one only if the
//! configuration allows it. The kernel lists this process's mounts and each descriptor's mount by itself. Only for a
//! file of another mount namespace must the file system be asked.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;

/// Most bytes read of a list of mounts; a machine with a thousand mounts has 200 KB.
const MOUNTS_BYTES_MAX: u64 = 8 << 20;

/// Types of file systems that a server or another machine provides, as the kernel names them. Those with a dot, such as
/// `fuse.sshfs`, count by their first part.
const SERVED: [&str; 34] = [
    "9p",
    "acfs",
    "afs",
    "autofs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "davfs",
    "fuse",
    "fuseblk",
    "fusectl",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "lustre_lite",
    "ncp",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "prl_fs",
    "pvfs2",
    "quobyte",
    "smb2",
    "smb3",
    "smbfs",
    "vboxsf",
    "virtiofs",
    "vmhgfs",
    "wekafs",
];

/// Local file systems by the numbers that `statfs` reports. For overlays see [`is_own_overlay`].
const LOCAL: [(&str, u64); 18] = [
    ("bcachefs", 0xca45_1a4e),
    ("btrfs", 0x9123_683e),
    ("erofs", 0xe0f5_e1e2),
    ("exfat", 0x2011_bab0),
    ("ext4", 0xef53),
    ("f2fs", 0xf2f5_2010),
    ("hugetlbfs", 0x9584_58f6),
    ("iso9660", 0x9660),
    ("jfs", 0x3153_464a),
    ("nilfs2", 0x3434),
    ("ntfs3", 0x7366_746e),
    ("ramfs", 0x8584_58f6),
    ("squashfs", 0x7371_7368),
    ("tmpfs", 0x0102_1994),
    ("udf", 0x1501_3346),
    ("vfat", 0x4d44),
    ("xfs", 0x5846_5342),
    ("zfs", 0x2fc1_2fc1),
];

/// Those of them that keep files in memory.
const IN_MEMORY: [&str; 3] = ["hugetlbfs", "ramfs", "tmpfs"];

/// The number of an overlay.
const OVERLAY: u64 = 0x794c_7630;

/// Name of the file systems of mounts that this process does not see.
pub(super) const FOREIGN: &str = "a mount of another namespace";

/// The type of the file system that a file is on, if its server may hang. Asks the file system of a mount that is not in
/// this process's namespace: call it on a thread that may be lost.
pub(super) fn served(file: &File) -> Option<String> {
    match file_system_of(file) {
        Some(kind) => is_served(&kind).then_some(kind),
        None => {
            let kind = rustix::fs::fstatfs(file).map(|stat| stat.f_type as u64 & u64::from(u32::MAX));
            let local = match kind {
                Ok(OVERLAY) => is_own_overlay(file),
                Ok(kind) => LOCAL.iter().any(|(_, number)| *number == kind),
                Err(_) => false,
            };
            (!local).then(|| FOREIGN.to_owned())
        }
    }
}

/// True for a local file in memory that nobody else need hold, or with holes. The memory of one without a name goes with its last open
/// file, which may be the daemon's. So does that of a file system that only another namespace has: any user makes one, and it ends
/// with its processes. Pages of holes are made when the daemon reads them, and count as its own.
pub(super) fn only_holds_memory(file: &File) -> bool {
    let is_whole = |stat: rustix::fs::Stat| {
        let is_known = || type_of_device(stat.st_dev).is_some();
        stat.st_nlink > 0 && stat.st_blocks * 512 >= stat.st_size && is_known()
    };
    is_in_memory(file) && !rustix::fs::fstat(file).is_ok_and(is_whole)
}

/// True for a file on a local file system that keeps files in memory.
pub(super) fn is_in_memory(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| {
        let kind = stat.f_type as u64 & u64::from(u32::MAX);
        LOCAL.iter().any(|(name, number)| *number == kind && IN_MEMORY.contains(name))
    })
}

/// True if a file is on an overlay that is mounted in this process's namespace too. The root of a container or of a
/// live system is one. They have the same file system id. Any user may make another overlay over FUSE in a namespace of
/// its own.
fn is_own_overlay(file: &File) -> bool {
    let id = rustix::fs::fstatvfs(file).map_or(0, |stat| stat.f_fsid);
    let own = |mounts: String| {
        let overlays = mounts.lines().filter(|line| line.contains(" - overlay "));
        let mut places = overlays.filter_map(|line| line.split(' ').nth(4).map(unescaped));
        places.any(|place| rustix::fs::statvfs(place.as_str()).is_ok_and(|stat| stat.f_fsid == id))
    };
    id != 0 && mounts().is_some_and(own)
}

/// The path of a `mountinfo`, which writes spaces, tabs, line ends and backslashes as octal numbers.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (escape, plain)| path.replace(escape, plain))
}

/// The type of the file system with that device number; `None` if no mount of this process's namespace has it.
pub(super) fn type_of_device(device: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    type_by(&mounts()?, 2, &format!("{major}:{minor}")).map(str::to_owned)
}

/// The type of the file system that a file is on; `None` if its mount is not one of this process's namespace.
fn file_system_of(file: &File) -> Option<String> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
    type_of(&mounts()?, mount_of(&info)?).map(str::to_owned)
}

fn mounts() -> Option<String> {
    let mut mounts = String::new();
    let list = File::open("/proc/self/mountinfo").ok()?;
    list.take(MOUNTS_BYTES_MAX).read_to_string(&mut mounts).ok()?;
    Some(mounts)
}

/// True if a server, which may hang, provides that type of file system.
fn is_served(file_system: &str) -> bool {
    let kind = file_system.split('.').next().unwrap_or(file_system);
    SERVED.contains(&kind)
}

/// The number of a descriptor's mount in its `fdinfo`.
fn mount_of(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// The type of that mount in a `mountinfo`.
fn type_of(mountinfo: &str, mount: u64) -> Option<&str> {
    type_by(mountinfo, 0, &mount.to_string())
}

/// The type of the first mount whose field has that value: the first field after the separator ` - `.
fn type_by<'a>(mountinfo: &'a str, field: usize, value: &str) -> Option<&'a str> {
    let line = mountinfo.lines().find(|line| line.split(' ').nth(field) == Some(value))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_number() {
        let mounts = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                      36 27 0:50 / /home/eve/x\\040-\\040y rw shared:3 master:1 - fuse.sshfs eve@host: rw,user_id=5\n\
                      236 27 8:1 / / rw - ext4 /dev/sda1 rw\n";
        assert_eq!(mount_of("pos:\t0\nflags:\t0100000\nmnt_id:\t36\nino:\t5\n"), Some(36));
        assert_eq!(type_of(mounts, 36), Some("fuse.sshfs"));
        assert_eq!(type_of(mounts, 236), Some("ext4"));
        assert_eq!((type_by(mounts, 2, "0:50"), type_by(mounts, 2, "0:5")), (Some("fuse.sshfs"), None));
        assert_eq!(unescaped("/home/eve/x\\040-\\040y"), "/home/eve/x - y");
        assert_eq!((type_of(mounts, 6), type_of("", 1), type_of("1 cut", 1)), (None, None, None));
    }

    #[test]
    fn network_and_user_file_systems_are_served_and_local_ones_are_not() {
        for kind in
            ["fuse", "fuse.sshfs", "fuseblk", "nfs4", "9p", "cifs", "virtiofs", "smbfs", "ceph", "gpfs"]
        {
            assert!(is_served(kind), "{kind}");
        }
        for kind in ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fusion", "proc"] {
            assert!(!is_served(kind), "{kind}");
        }
    }

    #[test]
    fn the_kernel_tells_an_open_files_type() {
        let status = File::open("/proc/self/status").unwrap();
        assert_eq!(file_system_of(&status).as_deref(), Some("proc"));
        let own = tempfile::tempfile().unwrap();
        assert!(file_system_of(&own).is_some_and(|kind| !is_served(&kind)));
        assert_eq!(served(&own), None);
        // No mount of this namespace has a memory file.
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
        assert_eq!((file_system_of(&memory), served(&memory)), (None, None));
        let device = rustix::fs::fstat(&status).unwrap().st_dev;
        assert_eq!(type_of_device(device).as_deref(), Some("proc"));
    }
}
