//! Choice of the code object for a device.

/// The entry of `have` for `arch`: its exact name first, then its generic family.
pub(super) fn choose<'a>(arch: &str, have: &'a [String]) -> Option<&'a str> {
    let named = |name: &str| have.iter().find(|have| *have == name).map(String::as_str);
    named(arch).or_else(|| generic_of(arch).and_then(named))
}

/// The generic target that runs on `arch`, by LLVM's table. gfx9-generic is left out: it lacks the four-byte product,
/// and nothing is built for it. gfx908 and gfx90a belong to no family.
pub fn generic_of(arch: &str) -> Option<&'static str> {
    const FAMILIES: [(&str, &[&str]); 5] = [
        ("gfx9-4-generic", &["gfx940", "gfx941", "gfx942", "gfx950"]),
        ("gfx10-1-generic", &["gfx1010", "gfx1011", "gfx1012", "gfx1013"]),
        ("gfx10-3-generic", &["gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"]),
        (
            "gfx11-generic",
            &["gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"],
        ),
        ("gfx12-generic", &["gfx1200", "gfx1201"]),
    ];
    FAMILIES.iter().find(|(_, members)| members.contains(&arch)).map(|(family, _)| *family)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_target_goes_before_its_family_and_others_are_none() {
        let have: Vec<String> =
            ["gfx1100", "gfx11-generic", "gfx90a", "gfx9-4-generic"].map(String::from).into();
        assert_eq!(choose("gfx1100", &have), Some("gfx1100"));
        assert_eq!(choose("gfx1102", &have), Some("gfx11-generic"));
        assert_eq!(choose("gfx942", &have), Some("gfx9-4-generic"));
        assert_eq!(choose("gfx90a", &have), Some("gfx90a"));
        // In neither family, by LLVM's table.
        assert_eq!(choose("gfx908", &have), None);
        // Vega 10: nothing is built for it.
        assert_eq!(choose("gfx900", &have), None);
        assert_eq!(choose("gfx1201", &have), None);
        assert_eq!(choose("sm_90", &have), None);
    }
}
