//! The names of the kernels in a cubin.

/// A cubin is an ELF file in which the code of kernel `f` is a section named `.text.f`. `None` if it is not one.
///
/// Source: ELF-64 object file format, version 1.5, sections "ELF header" and "Sections".
pub(super) fn kernels(cubin: &[u8]) -> Option<Vec<String>> {
    const MAGIC_CLASS_64_LITTLE: &[u8] = b"\x7fELF\x02\x01";
    if !cubin.starts_with(MAGIC_CLASS_64_LITTLE) {
        return None;
    }
    let (start, size) = (number(cubin, 40, 8)?, number(cubin, 58, 2)?);
    let section = |index: u64| {
        let start = usize::try_from(start.checked_add(index.checked_mul(size)?)?).ok()?;
        cubin.get(start..start.checked_add(size as usize)?)
    };
    let strings = section(number(cubin, 62, 2)?)?;
    let (from, len) = (number(strings, 24, 8)? as usize, number(strings, 32, 8)? as usize);
    let strings = cubin.get(from..from.checked_add(len)?)?;
    let mut names = Vec::new();
    for index in 0..number(cubin, 60, 2)? {
        let text = strings.get(number(section(index)?, 0, 4)? as usize..)?;
        let text = &text[..text.iter().position(|&byte| byte == 0)?];
        if let Some(kernel) = text.strip_prefix(b".text.") {
            names.push(std::str::from_utf8(kernel).ok()?.to_owned());
        }
    }
    names.sort_unstable();
    Some(names)
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}
