//! Objects, in one array or a line each. The samples follow llama-bench's fields, ours follow the samples.

use super::{LLAMA, Measured, OURS, Record, Setup, Value};

/// An object of an array, over several lines, without its end of line.
pub(super) fn row(record: &Record<'_>, setup: &Setup, first: bool) -> String {
    let before = if first { "" } else { ",\n" };
    let lines: Vec<String> = entries(record, setup).into_iter().map(|entry| format!("    {entry}")).collect();
    format!("{before}  {{\n{}\n  }}", lines.join(",\n"))
}

/// An object on a line.
pub(super) fn line(record: &Record<'_>, setup: &Setup) -> String {
    format!("{{{}}}\n", entries(record, setup).join(", "))
}

fn entries(record: &Record<'_>, setup: &Setup) -> Vec<String> {
    let entry = |(name, value): (&str, Value)| format!("\"{name}\": {}", word(&value));
    let samples = |name: &str, words: Vec<String>| format!("\"{name}\": [ {} ]", words.join(", "));
    let measured = record.measured();
    let ns = measured.map_or_else(Vec::new, |measured| measured.samples_ns.iter().map(u64::to_string).collect());
    let ts = measured.map_or_else(Vec::new, Measured::samples_ts);
    let ts = ts.into_iter().map(|sample| word(&Value::Real(sample))).collect();
    let names = |list: &[(&'static str, super::Kind)]| list.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    let mut entries: Vec<String> = names(&LLAMA).into_iter().zip(record.llama(setup)).map(entry).collect();
    entries.push(samples("samples_ns", ns));
    entries.push(samples("samples_ts", ts));
    entries.extend(names(&OURS).into_iter().zip(record.ours(setup)).map(entry));
    entries
}

fn word(value: &Value) -> String {
    match value {
        Value::Nothing => "null".to_owned(),
        Value::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        Value::Bool(is) => is.to_string(),
        Value::Real(number) if !number.is_finite() => "null".to_owned(),
        value => value.to_string(),
    }
}
