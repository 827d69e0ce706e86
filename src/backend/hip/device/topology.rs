//! Architectures as the kernel's driver reports them, for runtimes that report none.
//!
//! `/sys/class/kfd/kfd/topology/nodes/N/properties` has lines of a name and a number. `gfx_target_version` is 0 for a
//! CPU, else
//! `major * 10000 + minor * 100 + stepping`. `location_id` packs bus, device and function as PCI does; `domain` is the
//! PCI domain.

use std::fs;
use std::path::Path;

/// Most nodes to look at. A machine has one per socket and one per GPU or GPU partition.
const NODES_MAX: usize = 1024;

/// A GPU node.
#[derive(Clone, Copy, Debug)]
struct Node {
    version: u32,
    domain: u32,
    location: u32,
}

/// The architecture of the GPU at `pci`, such as `0000:03:00.0`. For an empty `pci`, the architecture that all GPUs
/// share. `root` is `/`.
pub(in crate::backend::hip) fn arch_at(root: &Path, pci: &str) -> Option<String> {
    let nodes = gpus(&root.join("sys/class/kfd/kfd/topology/nodes"));
    let version = if pci.is_empty() {
        let first = nodes.first()?.version;
        nodes.iter().all(|node| node.version == first).then_some(first)?
    } else {
        let (domain, location) = parse_pci(pci)?;
        // GPU partitions differ in the function number.
        let is_same = |node: &&Node, mask| node.domain == domain && node.location & mask == location & mask;
        let find = |mask| nodes.iter().find(|node| is_same(node, mask));
        find(u32::MAX).or_else(|| find(!7))?.version
    };
    Some(name(version))
}

/// Name of a version: 90010 is `gfx90a`.
fn name(version: u32) -> String {
    format!("gfx{}{:x}{:x}", version / 10_000, version / 100 % 100, version % 100)
}

/// Parses `domain:bus:device.function` into the domain and the packed 16-bit rest.
fn parse_pci(text: &str) -> Option<(u32, u32)> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    let (bus, device, function) = (hex(bus)?, hex(device)?, hex(function)?);
    (bus < 256 && device < 32 && function < 8).then_some((hex(domain)?, bus << 8 | device << 3 | function))
}

fn gpus(nodes: &Path) -> Vec<Node> {
    let entries = fs::read_dir(nodes).into_iter().flatten().take(NODES_MAX);
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("properties")).ok());
    texts.filter_map(|text| parse_node(&text)).collect()
}

/// `None` for a CPU and for unreadable text.
fn parse_node(text: &str) -> Option<Node> {
    let number = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once(' '));
        values.find(|(key, _)| *key == name).and_then(|(_, value)| value.trim().parse::<u32>().ok())
    };
    let version = number("gfx_target_version").filter(|version| *version != 0)?;
    // Kernels before 5.3 have no domain; it is 0 there.
    Some(Node { version, domain: number("domain").unwrap_or(0), location: number("location_id")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these nodes.
    fn machine(nodes: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (number, text) in nodes.iter().enumerate() {
            let folder = root.path().join(format!("sys/class/kfd/kfd/topology/nodes/{number}"));
            fs::create_dir_all(&folder).expect("made");
            fs::write(folder.join("properties"), text).expect("written");
        }
        root
    }

    const CPU: &str = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nlocation_id 0\ndomain 0\n";
    /// A GPU at 0000:03:00.0.
    const CARD: &str = "cpu_cores_count 0\nsimd_count 192\nmem_banks_count 1\ngfx_target_version 110000\nvendor_id 4098\n\
                        device_id 29772\nlocation_id 768\ndomain 0\n";
    /// A GPU at 0001:c4:00.0, its third partition.
    const PART: &str = "gfx_target_version 90402\nlocation_id 50178\ndomain 1\n";

    #[test]
    fn a_device_is_found_where_it_is_plugged_in() {
        let root = machine(&[CPU, CARD, PART, "not a node", "gfx_target_version x\nlocation_id 1\n"]);
        let at = |pci| arch_at(root.path(), pci);
        assert_eq!(at("0000:03:00.0").as_deref(), Some("gfx1100"));
        assert_eq!(at("0001:C4:00.2").as_deref(), Some("gfx942"));
        assert_eq!(at("0001:c4:00.0").as_deref(), Some("gfx942"), "another part of the same device");
        for nowhere in
            ["0000:04:00.0", "0001:03:00.0", "0000:00:00.0", "03:00.0", "no place", "0:3:0", "0:3:20.0"]
        {
            assert_eq!(at(nowhere), None, "{nowhere}");
        }
    }

    #[test]
    fn without_a_place_only_one_kind_of_gpu_is_an_answer() {
        assert_eq!(arch_at(machine(&[CPU, CARD, CARD]).path(), "").as_deref(), Some("gfx1100"));
        assert_eq!(arch_at(machine(&[CPU, CARD, PART]).path(), ""), None);
        assert_eq!(arch_at(machine(&[CPU]).path(), ""), None);
        assert_eq!(arch_at(Path::new("/nowhere"), "0000:03:00.0"), None);
    }

    #[test]
    fn versions_are_named_as_compilers_do() {
        for (version, arch) in [
            (90_006, "gfx906"),
            (90_010, "gfx90a"),
            (90_500, "gfx950"),
            (100_306, "gfx1036"),
            (120_001, "gfx1201"),
        ] {
            assert_eq!(name(version), arch);
        }
    }
}
