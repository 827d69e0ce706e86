//! A GPU's memory as the kernel's driver counts it: a second opinion beside the runtime's count and ours.
//!
//! `/sys/class/drm/cardN/device` is the device of a card. Its `uevent` names the PCI address. With amdgpu,
//! `mem_info_vram_used` and `mem_info_vram_total` are bytes of its memory over all programs. Other drivers lack these
//! files.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Most cards to look at.
const CARDS_MAX: usize = 1024;

/// The sysfs files of one card.
#[derive(Debug)]
pub struct CardMemory {
    used: File,
    total: u64,
}

impl CardMemory {
    /// Finds the card at `pci`, such as `0000:03:00.0`. `None` when the kernel's driver has no memory files. `root` is
    /// `/`.
    pub fn find(root: &Path, pci: &str) -> Option<Self> {
        let cards = fs::read_dir(root.join("sys/class/drm")).into_iter().flatten().take(CARDS_MAX);
        let devices = cards.filter_map(|card| Some(card.ok()?.path().join("device")));
        let device = devices.into_iter().find(|device| !pci.is_empty() && is_at(device, pci))?;
        let total = parse(&fs::read_to_string(device.join("mem_info_vram_total")).ok()?)?;
        // Kept open, so that it can be read when the process has no file descriptor left.
        Some(Self { used: File::open(device.join("mem_info_vram_used")).ok()?, total })
    }

    /// Bytes in use by all programs together.
    pub fn used(&self) -> Option<u64> {
        let mut text = [0; 32];
        let bytes = self.used.read_at(&mut text, 0).ok()?;
        parse(std::str::from_utf8(text.get(..bytes)?).ok()?)
    }

    /// Bytes of memory in total.
    pub fn total(&self) -> u64 {
        self.total
    }
}

/// Whether the device is at `pci`. Connectors (`card0-DP-1`) lie beside cards; their `device` is the card.
fn is_at(device: &Path, pci: &str) -> bool {
    let Ok(uevent) = fs::read_to_string(device.join("uevent")) else { return false };
    let slot = uevent.lines().find_map(|line| line.strip_prefix("PCI_SLOT_NAME="));
    slot.is_some_and(|slot| slot.trim().eq_ignore_ascii_case(pci))
}

fn parse(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(root: &Path, number: u32, pci: &str, files: &[(&str, &str)]) {
        let device = root.join(format!("sys/class/drm/card{number}/device"));
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("uevent"), format!("DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_SLOT_NAME={pci}\n"))
            .unwrap();
        files.iter().for_each(|(name, text)| fs::write(device.join(name), text).unwrap());
    }

    #[test]
    fn a_cards_memory_is_found_by_its_place() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("sys/class/drm/version")).unwrap();
        card(
            root.path(),
            0,
            "0000:03:00.0",
            &[("mem_info_vram_total", "17163091968\n"), ("mem_info_vram_used", "1\n")],
        );
        card(
            root.path(),
            1,
            "0000:c4:00.0",
            &[("mem_info_vram_total", "4096\n"), ("mem_info_vram_used", "1024\n")],
        );
        card(root.path(), 2, "0000:05:00.0", &[]);
        card(root.path(), 3, "0000:06:00.0", &[("mem_info_vram_total", "many"), ("mem_info_vram_used", "1")]);
        let find = |pci| CardMemory::find(root.path(), pci);
        let found = find("0000:C4:00.0").unwrap();
        assert_eq!((found.total(), found.used()), (4096, Some(1024)));
        fs::write(root.path().join("sys/class/drm/card1/device/mem_info_vram_used"), "2048\n").unwrap();
        assert_eq!(found.used(), Some(2048), "read anew");
        for none in ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0", ""] {
            assert!(find(none).is_none(), "{none}");
        }
        assert!(CardMemory::find(Path::new("/nowhere"), "0000:03:00.0").is_none());
    }
}
