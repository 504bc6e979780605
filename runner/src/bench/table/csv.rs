//! Comma-separated values: names in the first line, every value in quotes.

use super::{Value, fields};

pub(super) fn header() -> String {
    let names: Vec<&str> = fields().map(|(name, _)| name).collect();
    format!("{}\n", names.join(","))
}

pub(super) fn row(values: &[Value]) -> String {
    let quoted: Vec<String> = values.iter().map(|value| quote(&value.to_string())).collect();
    format!("{}\n", quoted.join(","))
}

fn quote(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}
