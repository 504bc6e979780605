//! From bytes to a checked table of contents.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::cursor::{ARRAY_CAP, Cursor, bad};
use super::map::Bytes;
use super::types::{Check, ValueType};
use super::value::Value;
use super::{Gguf, Key, QuantType, TensorInfo};
use crate::error::Result;

const KEY_CAP: u64 = 1 << 16;
const TENSOR_CAP: u64 = 1 << 18;
const ALIGNMENT_CAP: u64 = 1 << 20;
const DEFAULT_ALIGNMENT: u64 = 32;
/// A key-value pair takes a length, a type and at least one byte.
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;
/// A tensor info takes a name length, a rank, one dimension, a type and an offset.
const LEAST_INFO_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

pub(super) fn parse(bytes: Bytes) -> Result<Gguf> {
    let all: &[u8] = bytes.as_ref();
    let mut cursor = Cursor::new(all);

    let magic = all.get(..4).unwrap_or(all);
    if magic != b"GGUF" {
        return Err(cursor.bad(
            Check::Magic,
            "the start of the file",
            format!("{:?}", magic.escape_ascii().to_string()),
        ));
    }
    cursor.take(4, "the magic")?;
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        let order = if version > 0xffff { " (a big-endian file?)" } else { "" };
        return Err(bad(Check::Version, 4, "the version", format!("{version}{order}")));
    }
    // The infos follow the pairs, so both least sizes are checked against what is left now.
    let tensor_count = cursor.count("the number of tensors", LEAST_INFO_BYTES, TENSOR_CAP)?;
    let key_count = cursor.count("the number of metadata keys", LEAST_KEY_BYTES, KEY_CAP)?;

    let (keys, key_index) = keys(&mut cursor, key_count)?;
    let value = |name: &str| {
        let key = keys.get(*key_index.get(name)? as usize)?;
        Some((key, Value::read(key.ty, all.get(key.start..key.end)?)?))
    };
    let alignment_bytes = match value("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some((key, value)) => match value {
            Value::U32(align) if align.is_power_of_two() && u64::from(align) <= ALIGNMENT_CAP => align.into(),
            other => {
                let found = format!("{} {other}", other.value_type());
                return Err(bad(Check::Alignment, key.start as u64, "general.alignment", found));
            }
        },
    };

    let (mut tensors, tensor_index) = infos(&mut cursor, tensor_count, alignment_bytes)?;
    let data_start = (cursor.at() as u64).next_multiple_of(alignment_bytes);
    place(&mut tensors, data_start, all.len() as u64)?;

    Ok(Gguf {
        bytes: Arc::new(bytes),
        more: Vec::new(),
        version,
        alignment_bytes,
        data_start,
        keys,
        key_index,
        tensors,
        tensor_index,
    })
}

type Index = HashMap<Box<str>, u32>;

fn keys(cursor: &mut Cursor<'_>, count: u64) -> Result<(Vec<Key>, Index)> {
    let mut keys = Vec::new();
    let mut index = Index::new();
    for number in 0..count {
        let at = cursor.at() as u64;
        let name = cursor.string("a metadata key")?;
        if name.is_empty() {
            return Err(bad(Check::KeyName, at, format!("metadata key {number}"), "an empty name"));
        }
        let what = format!("metadata key {}", name.escape_debug());
        let id = cursor.u32(&what)?;
        let ty = ValueType::from_id(id).ok_or_else(|| bad(Check::ValueType, at, &*what, id.to_string()))?;
        let start = cursor.at();
        if ty == ValueType::Array {
            let id = cursor.u32(&what)?;
            let element = ValueType::from_id(id)
                .filter(|element| *element != ValueType::Array)
                .ok_or_else(|| bad(Check::ElementType, start as u64, &*what, id.to_string()))?;
            let elements = cursor.count(&what, element.least_bytes(), ARRAY_CAP)?;
            cursor.skip(element, elements, &what)?;
        } else {
            cursor.skip(ty, 1, &what)?;
        }
        let name: Box<str> = name.into();
        match index.entry(name.clone()) {
            Entry::Occupied(_) => return Err(bad(Check::DuplicateKey, at, what, "a second one")),
            Entry::Vacant(vacant) => vacant.insert(keys.len() as u32),
        };
        keys.push(Key { name, ty, start, end: cursor.at() });
    }
    Ok((keys, index))
}

fn infos(cursor: &mut Cursor<'_>, count: u64, alignment_bytes: u64) -> Result<(Vec<TensorInfo>, Index)> {
    let mut tensors = Vec::new();
    let mut index = Index::new();
    for number in 0..count {
        let at = cursor.at() as u64;
        let name = cursor.string("a tensor name")?;
        if name.is_empty() || name.len() > 63 {
            let what = format!("tensor {number}");
            return Err(bad(Check::TensorName, at, what, format!("a name of {} bytes", name.len())));
        }
        let what = format!("tensor {}", name.escape_debug());
        let name: Box<str> = name.into();
        let Entry::Vacant(vacant) = index.entry(name.clone()) else {
            return Err(bad(Check::DuplicateTensor, at, what, "a second one"));
        };
        vacant.insert(tensors.len() as u32);

        let rank = cursor.u32(&what)?;
        if !(1..=4).contains(&rank) {
            return Err(bad(Check::DimensionCount, at, what, rank.to_string()));
        }
        let mut dims = [1u64; 4];
        let mut elements = 1u64;
        for dim in &mut dims[..rank as usize] {
            *dim = cursor.u64(&what)?;
            elements = elements
                .checked_mul(*dim)
                .filter(|&elements| elements >= 1 && elements <= i64::MAX as u64)
                .ok_or_else(|| bad(Check::Dimensions, at, &*what, format!("a dimension of {dim}")))?;
        }
        let id = cursor.u32(&what)?;
        let ty =
            QuantType::from_id(id).ok_or_else(|| bad(Check::TensorType, at, &*what, format!("type number {id}")))?;
        if !dims[0].is_multiple_of(ty.block_size() as u64) {
            let found = format!("{} elements of {ty}, which has blocks of {}", dims[0], ty.block_size() as u64);
            return Err(bad(Check::RowBlocks, at, what, found));
        }
        let bytes = (elements / ty.block_size() as u64)
            .checked_mul(ty.type_bytes() as u64)
            .filter(|bytes| {
                bytes.checked_next_multiple_of(alignment_bytes).is_some_and(|bytes| bytes <= i64::MAX as u64)
            })
            .ok_or_else(|| bad(Check::TensorBytes, at, &*what, format!("{elements} elements of {ty}")))?;
        let offset = cursor.u64(&what)?;
        if !offset.is_multiple_of(alignment_bytes) {
            let found = format!("offset {offset} with an alignment of {alignment_bytes}");
            return Err(bad(Check::OffsetAlignment, at, what, found));
        }
        tensors.push(TensorInfo { name, dims, rank: rank as u8, ty, part: 0, start: offset, bytes });
    }
    Ok((tensors, index))
}

/// Turns offsets into positions in the file; no tensor may leave it or touch another.
fn place(tensors: &mut [TensorInfo], data_start: u64, file_bytes: u64) -> Result<()> {
    for tensor in tensors.iter_mut() {
        let offset = tensor.start;
        let start = data_start.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => tensor.start = start,
            _ => {
                let found = format!(
                    "offset {offset} + {} bytes, in {} bytes of data",
                    tensor.bytes,
                    file_bytes.saturating_sub(data_start)
                );
                return Err(bad(
                    Check::TensorRange,
                    data_start,
                    format!("tensor {}", tensor.name.escape_debug()),
                    found,
                ));
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.start);
    for pair in order.windows(2) {
        if pair[0].start + pair[0].bytes > pair[1].start {
            let what = format!("tensor {}", pair[1].name.escape_debug());
            let found = format!("an overlap with {}", pair[0].name.escape_debug());
            return Err(bad(Check::Overlap, pair[1].start, what, found));
        }
    }
    Ok(())
}
