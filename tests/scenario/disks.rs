//! A disk that fails under a mapped model: its requests fail; the daemon and other models do not.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use rocmforge_client::wire::{ErrorCode, GenerateRequest};

use crate::common;
use crate::forge::wide_llama;
use crate::rig::{Rig, answer, code, story};

const DISK_BYTES: u64 = 64 << 20;
/// Bytes that the failing disk keeps: enough for the file system itself and the model's header.
const LEFT_BYTES: u64 = 2 << 20;

/// A file system in a file, mounted through a loop device until drop.
struct Disk {
    image: PathBuf,
    at: PathBuf,
}

impl Disk {
    /// Makes a disk with one file of these bytes, none of them cached. `None` if this machine has no loop devices or
    /// forbids mounting.
    fn with(dir: &Path, name: &str, bytes: &[u8]) -> Option<Self> {
        let disk = Self { image: dir.join("image"), at: dir.join("disk") };
        fs::create_dir(&disk.at).unwrap();
        File::create(&disk.image).unwrap().set_len(DISK_BYTES).unwrap();
        let made = run(Command::new("mkfs.ext2").args(["-q", "-F", "-N", "16"]).arg(&disk.image));
        if !made || !disk.mount() {
            return None;
        }
        fs::write(disk.at.join(name), bytes).unwrap();
        // Unmounts and mounts again, so that later reads come from the image.
        (run(Command::new("umount").arg(&disk.at)) && disk.mount()).then_some(disk)
    }

    fn mount(&self) -> bool {
        run(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.at))
    }

    /// From now on, reading uncached data is an I/O error.
    fn fail(&self) {
        File::options().write(true).open(&self.image).unwrap().set_len(LEFT_BYTES).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run(Command::new("umount").arg("--lazy").arg(&self.at));
    }
}

fn run(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

#[test]
fn an_error_of_the_disk_fails_its_model_alone() {
    if !rustix::process::geteuid().is_root() {
        return common::not_run("only root can mount a disk that fails");
    }
    let mut rig = Rig::idle();
    let bytes = wide_llama(5).build().bytes;
    assert!(bytes.len() as u64 > 4 * LEFT_BYTES, "{} bytes", bytes.len());
    let Some(disk) = Disk::with(rig.dir.path(), "wide.gguf", &bytes) else {
        return common::not_run("this machine cannot mount a disk from a file");
    };
    std::os::unix::fs::symlink(disk.at.join("wide.gguf"), rig.model("wide")).unwrap();
    rig.configure("[device]\nbackend = 'cpu'\n");
    rig.run();
    let client = rig.client();
    let whole = answer(&client, &story(100)).unwrap();
    client.load("wide").unwrap();
    disk.fail();
    let request = GenerateRequest { model: "wide".into(), max_tokens: 4, ..story(4) };
    let neighbour = rig.client();
    let mut other = neighbour.generate(&story(100)).unwrap();
    assert_eq!(code(answer(&client, &request)), ErrorCode::ModelCorrupt as u16);
    assert_eq!(crate::rig::collect(&mut other).unwrap(), whole, "the other model's tokens changed");
    rig.assert_idle();
    rig.assert_serves();
    rig.signal(rustix::process::Signal::TERM);
    assert!(rig.ended().success());
}
