//! The log of RAPIDS' memory manager: `Thread,Time,Action,Pointer,Size,Stream`.
//!
//! Actions are `allocate`, `free` (`deallocate` in some versions' documentation) and `allocate failure`; pointers are
//! hexadecimal, with or without `0x`, or `(nil)`. No member holds a comma or a line break, so a row is split at its
//! commas. Source: `logging_resource_adaptor` and the replay benchmark of rapidsai/rmm.

use evergraph_pool::Purpose;

use super::event::{Event, Streams, size};
use super::lines::bad;
use crate::error::Result;

/// Where the columns are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Columns {
    action: usize,
    pointer: usize,
    size: usize,
    stream: usize,
    count: usize,
}

/// Finds the columns by their names.
pub(super) fn columns(number: u64, line: &str) -> Result<Columns> {
    let names: Vec<&str> = line.split(',').map(bare).collect();
    let place = |name: &str| {
        let expected = "a trace: a JSON header, or RMM's Thread,Time,Action,Pointer,Size,Stream";
        names.iter().position(|found| *found == name).ok_or_else(|| bad(number, expected, line))
    };
    Ok(Columns {
        action: place("Action")?,
        pointer: place("Pointer")?,
        size: place("Size")?,
        stream: place("Stream")?,
        count: names.len(),
    })
}

/// Reads a row; `None` if it tells of an allocation that failed.
pub(super) fn event(number: u64, line: &str, columns: &Columns, streams: &mut Streams) -> Result<Option<Event>> {
    let mut row = [""; 4];
    let mut count = 0;
    for (place, text) in line.split(',').enumerate() {
        let wanted = [columns.action, columns.pointer, columns.size, columns.stream];
        if let Some(at) = wanted.iter().position(|column| *column == place) {
            row[at] = bare(text);
        }
        count = place + 1;
    }
    if count != columns.count {
        return Err(bad(number, format!("{} columns", columns.count), format!("{count}: {line}")));
    }
    let [action, pointer, bytes, stream] = row;
    let id = address(pointer).ok_or_else(|| bad(number, "a hexadecimal pointer", pointer))?;
    let bytes = size(number, bytes.parse().map_err(|_| bad(number, "a size in bytes", bytes))?)?;
    let stream = streams.number(number, stream)?;
    match action {
        "allocate" => Ok(Some(Event::Alloc { id, bytes, purpose: Purpose::Scratch, stream })),
        "free" | "deallocate" => Ok(Some(Event::Free { id, bytes: Some(bytes), stream: Some(stream) })),
        "allocate failure" => Ok(None),
        other => Err(bad(number, "allocate, free or allocate failure", other)),
    }
}

fn address(text: &str) -> Option<u64> {
    if text == "(nil)" {
        return Some(0);
    }
    let digits = text.strip_prefix("0x").unwrap_or(text);
    // `from_str_radix` would take a sign.
    if digits.starts_with(['+', '-']) { None } else { u64::from_str_radix(digits, 16).ok() }
}

fn bare(text: &str) -> &str {
    let text = text.trim();
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}
