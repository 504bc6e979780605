//! Sizes in bytes as people write them.

/// Reads `512`, `64KiB`, `7.8GiB`, `2G` (= GiB) or `10GB` (decimal).
///
/// # Errors
/// A text that says what is wrong.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|char: char| !char.is_ascii_digit() && char != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("`{unit}` is no unit; use KiB, MiB, GiB, TiB, or KB, MB, GB, TB")),
    };
    let bad = || format!("`{text}` is no size; write for example 512MiB or 7.8GiB");
    let bytes = if number.contains('.') {
        let value: f64 = number.parse().map_err(|_| bad())?;
        let bytes = value * factor as f64;
        (bytes < 9.0e18).then_some(bytes as u64)
    } else {
        number.parse::<u64>().map_err(|_| bad())?.checked_mul(factor)
    };
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(|| format!("`{text}` does not fit in 64 bits"))
}

/// Writes a number of bytes for people: `7.8 GiB`.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
