//! Reads and writes the metadata of code objects: a MessagePack map in an ELF note.

use std::fmt::Write;

use object::{Object, ObjectSection};
use rmpv::Value;
use xtask::error::{Error, Result};

const SECTION: &str = ".note";
const KERNELS: &str = "amdhsa.kernels";

/// `NT_AMDGPU_METADATA`.
const TYPE: u32 = 32;
const OWNER: &[u8] = b"AMDGPU\0";

fn broken(text: impl Into<String>) -> Error {
    Error::Unexpected { what: "an object of the compiler", text: text.into() }
}

/// The metadata of an object.
pub fn read(bytes: &[u8]) -> Result<Value> {
    let elf = object::File::parse(bytes).map_err(|error| broken(error.to_string()))?;
    let section = elf.section_by_name(SECTION).ok_or_else(|| broken("it has no metadata"))?;
    let data = section.data().map_err(|error| broken(error.to_string()))?;
    let description = description(data).ok_or_else(|| broken("its note is not AMD's"))?;
    rmpv::decode::read_value(&mut &*description).map_err(|error| broken(error.to_string()))
}

/// Content of the one note in `data`: lengths of name and content, type, the name padded to a multiple of 4, the
/// content.
fn description(data: &[u8]) -> Option<&[u8]> {
    let number = |at: usize| Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?));
    let (name, length, kind) = (number(0)? as usize, number(4)? as usize, number(8)?);
    let owner = data.get(12..12 + name)?;
    let start = 12 + name.next_multiple_of(4);
    (owner == OWNER && kind == TYPE).then_some(())?;
    data.get(start..start + length)
}

/// Marks the note so that the linker leaves it out.
pub fn exclude(mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    /// ELF64 offsets: the section headers' position in the file header, and the flags in a section header.
    const SECTIONS_AT: usize = 0x28;
    const HEADER: usize = 64;
    const FLAGS_IN_HEADER: usize = 8;
    let elf = object::File::parse(&*bytes).map_err(|error| broken(error.to_string()))?;
    let index = elf.section_by_name(SECTION).ok_or_else(|| broken("it has no metadata"))?.index().0;
    let field = |at: usize| {
        let bytes: Option<[u8; 8]> = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or_else(|| broken("its header ends early"))
    };
    let at = field(SECTIONS_AT)? as usize + index * HEADER + FLAGS_IN_HEADER;
    let flags = field(at)? | u64::from(object::elf::SHF_EXCLUDE);
    bytes[at..at + 8].copy_from_slice(&flags.to_le_bytes());
    Ok(bytes)
}

/// Joins all maps into one with the kernels of all, sorted by name. The other entries must be equal in all maps.
pub fn join(all: &[Value]) -> Result<Value> {
    let mut kernels = Vec::new();
    let mut rest: Option<Vec<(Value, Value)>> = None;
    for value in all {
        let map = value.as_map().ok_or_else(|| broken("its metadata is not a map"))?;
        let (own, others): (Vec<_>, Vec<_>) =
            map.iter().cloned().partition(|(key, _)| key.as_str() == Some(KERNELS));
        for (_, list) in own {
            kernels.extend(list.as_array().cloned().unwrap_or_default());
        }
        match &rest {
            None => rest = Some(others),
            Some(before) if *before == others => {}
            Some(_) => return Err(broken("two files differ in target or version")),
        }
    }
    kernels.sort_by(|a, b| name(a).cmp(&name(b)));
    if let Some(twice) = kernels.windows(2).find(|two| name(&two[0]) == name(&two[1])) {
        let name = name(&twice[0]).unwrap_or_default().to_owned();
        return Err(Error::Gates { faults: format!("two kernels are called {name}") });
    }
    let mut map = rest.unwrap_or_default();
    map.push((Value::from(KERNELS), Value::Array(kernels)));
    map.sort_by(|(a, _), (b, _)| a.as_str().cmp(&b.as_str()));
    Ok(Value::Map(map))
}

/// A kernel's name.
pub fn name(kernel: &Value) -> Option<&str> {
    field(kernel, ".name")?.as_str()
}

/// The entry `key` of a kernel.
pub fn field<'a>(map: &'a Value, key: &str) -> Option<&'a Value> {
    map.as_map()?.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, value)| value)
}

/// The kernels of joined metadata.
pub fn kernels(metadata: &Value) -> Option<&[Value]> {
    field(metadata, KERNELS)?.as_array().map(Vec::as_slice)
}

/// Assembly that emits a note with `metadata`.
pub fn assembly(metadata: &Value) -> Result<String> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, metadata).map_err(|error| broken(error.to_string()))?;
    let mut text = format!(
        ".section {SECTION},\"a\",@note\n.p2align 2\n.long {}\n.long {}\n.long {TYPE}\n.asciz \"AMDGPU\"\n.p2align 2\n",
        OWNER.len(),
        bytes.len()
    );
    for line in bytes.chunks(32) {
        let numbers: Vec<String> = line.iter().map(u8::to_string).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, ".byte {}", numbers.join(","));
    }
    text.push_str(".p2align 2\n");
    Ok(text)
}
