//! GGUF model files, versions 2 and 3: a reader that trusts nothing, and a writer.
//!
//! ```
//! use evergraph_runner::gguf::{Bytes, Gguf, QuantType, Writer};
//!
//! let mut writer = Writer::new();
//! writer.put("general.architecture", "gemma3");
//! writer.tensor("output_norm.weight", QuantType::F32, &[2], vec![0; 8]);
//! let file = Gguf::parse(Bytes::copy_of(&writer.to_bytes()?))?;
//! assert_eq!(file.architecture()?, "gemma3");
//! assert_eq!(file.tensor("output_norm.weight").map(|tensor| tensor.shape().to_vec()), Some(vec![2]));
//! # Ok::<(), evergraph_runner::Error>(())
//! ```
//!
//! Layout: `GGUF`, version, counts, key-value pairs, tensor infos, padding, tensor data. Everything is checked
//! before it is used and before memory is taken for it ([`Check`] lists the rules); metadata and weights are
//! then read in place, so opening a file of any size costs its header.

mod cursor;
mod map;
mod parse;
mod split;
mod types;
mod value;
mod write;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

pub use evergraph_kernels::quant::QuantType;
pub use map::{Bytes, BytesRange};
pub use types::{Check, ValueType};
pub use value::{Array, ArrayIter, Value};
pub use write::{MetaValue, Writer};

use crate::error::{Error, Result};

/// A model file, or all files of a split model: metadata and a table of tensors, over bytes that stay where they are.
#[derive(Debug)]
pub struct Gguf {
    bytes: Arc<Bytes>,
    /// The other files of a split model.
    more: Vec<Arc<Bytes>>,
    version: u32,
    alignment_bytes: u64,
    data_start: u64,
    keys: Vec<Key>,
    key_index: HashMap<Box<str>, u32>,
    tensors: Vec<TensorInfo>,
    tensor_index: HashMap<Box<str>, u32>,
}

#[derive(Debug)]
struct Key {
    name: Box<str>,
    ty: ValueType,
    /// Where the value lies in the file.
    start: usize,
    end: usize,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    name: Box<str>,
    dims: [u64; 4],
    rank: u8,
    ty: QuantType,
    /// Which file it is in.
    part: u16,
    start: u64,
    bytes: u64,
}

impl TensorInfo {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dimensions, the contiguous one first (`ne` in ggml).
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Its shape in row-major order: the contiguous dimension last.
    #[must_use]
    pub fn shape(&self) -> Vec<u64> {
        self.dims().iter().rev().copied().collect()
    }

    /// Its element type.
    #[must_use]
    pub fn quant_type(&self) -> QuantType {
        self.ty
    }

    /// Which file of a split model it is in, from 0.
    #[must_use]
    pub fn part(&self) -> usize {
        self.part.into()
    }

    /// Where its data starts in that file, bytes.
    #[must_use]
    pub fn start_bytes(&self) -> u64 {
        self.start
    }

    /// Its size, bytes, without padding.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }
}

impl Gguf {
    /// Maps and checks a file, and all other files of a split model, of which this must be the first. See [`Bytes`] for
    /// what mapping means.
    ///
    /// # Errors
    /// [`Error::Io`] if a file can not be mapped, [`Error::BadFile`] if it breaks a rule of the format,
    /// [`Error::Split`] for files that are no whole model together.
    pub fn open(path: &Path) -> Result<Self> {
        split::open(path, &Bytes::map)
    }

    /// As [`open`](Self::open), but with files read into memory.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn read(path: &Path) -> Result<Self> {
        split::open(path, &Bytes::read)
    }

    /// Checks bytes that are already there.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they break a rule of the format, or are a part of a split model.
    pub fn parse(bytes: Bytes) -> Result<Self> {
        let file = parse::parse(bytes)?;
        match file.key_index.get("split.count").zip(file.get("split.count")) {
            Some((&key, count)) if count.as_u64() != Some(1) => {
                let at = file.keys.get(key as usize).map_or(0, |key| key.start as u64);
                Err(cursor::bad(Check::Split, at, "split.count", count.to_string()))
            }
            _ => Ok(file),
        }
    }

    /// The bytes of the whole file; of a split model, of the first one, which has the metadata.
    #[must_use]
    pub fn bytes(&self) -> &Arc<Bytes> {
        &self.bytes
    }

    /// The format's version: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// What tensor offsets are multiples of, bytes.
    #[must_use]
    pub fn alignment_bytes(&self) -> u64 {
        self.alignment_bytes
    }

    /// Where tensor data starts, bytes.
    #[must_use]
    pub fn data_start_bytes(&self) -> u64 {
        self.data_start
    }

    /// The tensors in the file's order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index.get(name).and_then(|&index| self.tensors.get(index as usize))
    }

    /// A tensor's data.
    #[must_use]
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        let Some(bytes) = self.parts().nth(tensor.part.into()) else { return &[] };
        let bytes: &[u8] = (**bytes).as_ref();
        // Checked when the file was opened; a tensor of another file gives nothing.
        let range = tensor.start as usize..tensor.start.saturating_add(tensor.bytes) as usize;
        bytes.get(range).unwrap_or_default()
    }

    /// Metadata in the file's order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.keys.iter().filter_map(|key| Some((&*key.name, self.value(key)?)))
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let index = *self.key_index.get(key)?;
        self.value(self.keys.get(index as usize)?)
    }

    fn value(&self, key: &Key) -> Option<Value<'_>> {
        Value::read(key.ty, (*self.bytes).as_ref().get(key.start..key.end)?)
    }

    fn get_as<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(Error::metadata(key, expected, format!("{} {value}", value.value_type()))),
        }
    }

    /// An unsigned integer of any width, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>> {
        self.get_as(key, "an unsigned integer", Value::as_u64)
    }

    /// An unsigned integer in a range, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else or out of range.
    pub fn get_in(&self, key: &str, range: std::ops::RangeInclusive<u64>) -> Result<Option<u64>> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.get_as(key, &expected, |value| value.as_u64().filter(|number| range.contains(number)))
    }

    /// An unsigned integer in a range.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the key is missing, or the value is something else or out of range.
    pub fn require_in(&self, key: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.get_in(key, range)?.ok_or_else(|| Error::metadata(key, expected, "no such key"))
    }

    /// A finite float, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>> {
        self.get_as(key, "a finite float", Value::as_f32)
    }

    /// A truth value, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>> {
        self.get_as(key, "a bool", Value::as_bool)
    }

    /// Text, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>> {
        self.get_as(key, "a string", Value::as_str)
    }

    /// An array of strings, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_strings(&self, key: &str) -> Result<Option<Array<'_>>> {
        self.get_as(key, "an array of strings", |value| {
            value.as_array().filter(|array| array.element_type() == ValueType::String)
        })
    }

    /// An array, if the key is there.
    ///
    /// # Errors
    /// [`Error::Metadata`] if the value is something else.
    pub fn get_array(&self, key: &str) -> Result<Option<Array<'_>>> {
        self.get_as(key, "an array", Value::as_array)
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// [`Error::Metadata`] if it is missing or not text.
    pub fn architecture(&self) -> Result<&str> {
        let key = "general.architecture";
        self.get_str(key)?.ok_or_else(|| Error::metadata(key, "a string", "no such key"))
    }
}

#[cfg(test)]
mod tests;
