//! Writing GGUF files, version 3.

use std::io::Write;
use std::path::Path;

use super::QuantType;
use super::types::ValueType;
use crate::error::{Error, Result};

/// A metadata value to be written.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum MetaValue {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    U64(u64),
    Strings(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
    Bools(Vec<bool>),
}

macro_rules! from {
    ($($ty:ty => $variant:ident;)*) => {$(
        impl From<$ty> for MetaValue {
            fn from(value: $ty) -> Self {
                Self::$variant(value.into())
            }
        }
    )*};
}

from! {
    u32 => U32; i32 => I32; f32 => F32; bool => Bool; String => String; &str => String; u64 => U64;
    Vec<String> => Strings; Vec<f32> => F32s; Vec<i32> => I32s; Vec<u32> => U32s; Vec<bool> => Bools;
}

/// Collects metadata and tensors, then writes them as one file.
#[derive(Debug, Default)]
pub struct Writer {
    keys: Vec<(String, MetaValue)>,
    tensors: Vec<Tensor>,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    ty: QuantType,
    dims: Vec<u64>,
    data: Data,
}

/// Writes a tensor's bytes.
type Make = dyn Fn(&mut dyn Write) -> std::io::Result<()>;

/// A tensor's bytes: there, made while writing, or written by somebody else.
enum Data {
    Memory(Vec<u8>),
    Made(Box<Make>),
    Apart,
}

impl std::fmt::Debug for Data {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Made(_) => f.write_str("made while writing"),
            Self::Apart => f.write_str("written apart"),
        }
    }
}

/// Where everything stands in a file.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The file's beginning, up to the first tensor.
    pub(crate) header: Vec<u8>,
    /// Where each tensor begins in the file, and its bytes.
    pub(crate) places: Vec<(u64, u64)>,
    /// Size of the file.
    pub(crate) bytes: u64,
}

const ALIGNMENT: u64 = 32;

impl Writer {
    /// An empty file.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a metadata key.
    pub fn put(&mut self, key: impl Into<String>, value: impl Into<MetaValue>) -> &mut Self {
        let key = key.into();
        self.keys.retain(|(name, _)| *name != key);
        self.keys.push((key, value.into()));
        self
    }

    /// Adds a tensor; `dims` has the contiguous dimension first, `data` its blocks in order.
    pub fn tensor(&mut self, name: impl Into<String>, ty: QuantType, dims: &[u64], data: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), ty, dims: dims.to_vec(), data: Data::Memory(data) });
        self
    }

    /// Adds a tensor of floats.
    pub fn tensor_f32(&mut self, name: impl Into<String>, dims: &[u64], values: &[f32]) -> &mut Self {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, QuantType::F32, dims, data)
    }

    /// Adds a tensor whose bytes are made when the file is written, so that files larger than memory can be.
    pub fn tensor_with(
        &mut self,
        name: impl Into<String>,
        ty: QuantType,
        dims: &[u64],
        make: impl Fn(&mut dyn Write) -> std::io::Result<()> + 'static,
    ) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), ty, dims: dims.to_vec(), data: Data::Made(Box::new(make)) });
        self
    }

    /// Adds a tensor whose bytes are not written here but where [`plan`](Self::plan) says.
    pub(crate) fn tensor_apart(&mut self, name: impl Into<String>, ty: QuantType, dims: &[u64]) -> &mut Self {
        self.tensors.push(Tensor { name: name.into(), ty, dims: dims.to_vec(), data: Data::Apart });
        self
    }

    /// Number of tensors so far.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The file in memory.
    ///
    /// # Errors
    /// As [`write_to`](Self::write_to).
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.write_to(&mut out)?;
        Ok(out)
    }

    /// Writes the file to a path; returns its size, bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if it can not be written, and as [`write_to`](Self::write_to).
    pub fn write_file(&self, path: &Path) -> Result<u64> {
        let file = std::fs::File::create(path).map_err(Error::io("can not create", path))?;
        let mut out = std::io::BufWriter::with_capacity(1 << 20, file);
        let bytes = self.write_to(&mut out)?;
        out.flush().map_err(Error::io("can not write", path))?;
        Ok(bytes)
    }

    /// Writes the file; returns its size, bytes.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a tensor's shape and bytes do not agree, [`Error::Output`] if writing fails.
    pub fn write_to(&self, out: &mut dyn Write) -> Result<u64> {
        let plan = self.plan()?;
        out.write_all(&plan.header).map_err(Error::Output)?;
        for (tensor, &(_, bytes)) in self.tensors.iter().zip(&plan.places) {
            let mut counted = Counted { out, bytes: 0 };
            match &tensor.data {
                Data::Memory(data) => counted.write_all(data).map_err(Error::Output)?,
                Data::Made(make) => make(&mut counted).map_err(Error::Output)?,
                Data::Apart => {}
            }
            if counted.bytes != bytes {
                return Err(Error::tensor(&*tensor.name, format!("{bytes} bytes"), counted.bytes));
            }
            let padding = bytes.next_multiple_of(ALIGNMENT) - bytes;
            out.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(Error::Output)?;
        }
        Ok(plan.bytes)
    }

    /// The header, and where the tensors go.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a tensor's shape makes no whole blocks, or does not fit a number.
    pub(crate) fn plan(&self) -> Result<Plan> {
        let mut header = Vec::new();
        header.extend_from_slice(b"GGUF");
        header.extend_from_slice(&3u32.to_le_bytes());
        header.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        header.extend_from_slice(&(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            string(&mut header, key);
            value.write(&mut header);
        }
        let mut offset = 0u64;
        let mut places = Vec::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let bytes = tensor.bytes()?;
            string(&mut header, &tensor.name);
            header.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                header.extend_from_slice(&dim.to_le_bytes());
            }
            header.extend_from_slice(&(tensor.ty as u32).to_le_bytes());
            header.extend_from_slice(&offset.to_le_bytes());
            places.push((offset, bytes));
            offset += bytes.next_multiple_of(ALIGNMENT);
        }
        pad(&mut header);
        let start = header.len() as u64;
        places.iter_mut().for_each(|(begin, _)| *begin += start);
        Ok(Plan { header, places, bytes: start + offset })
    }
}

struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

impl Tensor {
    fn bytes(&self) -> Result<u64> {
        let rows = self.dims.iter().skip(1).try_fold(1u64, |product, &dim| product.checked_mul(dim));
        let row = self.dims.first().and_then(|&elements| self.ty.row_bytes(usize::try_from(elements).ok()?).ok());
        let bytes = row.zip(rows).and_then(|(row, rows)| rows.checked_mul(row as u64));
        bytes.ok_or_else(|| Error::tensor(&*self.name, "whole blocks of a size that fits", format!("{:?}", self.dims)))
    }
}

impl MetaValue {
    fn write(&self, out: &mut Vec<u8>) {
        fn array<T: Copy, const N: usize>(out: &mut Vec<u8>, ty: ValueType, list: &[T], bytes: impl Fn(T) -> [u8; N]) {
            tag(out, ValueType::Array);
            tag(out, ty);
            out.extend_from_slice(&(list.len() as u64).to_le_bytes());
            list.iter().for_each(|&value| out.extend_from_slice(&bytes(value)));
        }
        match self {
            Self::U32(value) => scalar(out, ValueType::U32, &value.to_le_bytes()),
            Self::I32(value) => scalar(out, ValueType::I32, &value.to_le_bytes()),
            Self::F32(value) => scalar(out, ValueType::F32, &value.to_le_bytes()),
            Self::U64(value) => scalar(out, ValueType::U64, &value.to_le_bytes()),
            Self::Bool(value) => scalar(out, ValueType::Bool, &[u8::from(*value)]),
            Self::String(value) => {
                tag(out, ValueType::String);
                string(out, value);
            }
            Self::Strings(list) => {
                tag(out, ValueType::Array);
                tag(out, ValueType::String);
                out.extend_from_slice(&(list.len() as u64).to_le_bytes());
                list.iter().for_each(|text| string(out, text));
            }
            Self::F32s(list) => array(out, ValueType::F32, list, f32::to_le_bytes),
            Self::I32s(list) => array(out, ValueType::I32, list, i32::to_le_bytes),
            Self::U32s(list) => array(out, ValueType::U32, list, u32::to_le_bytes),
            Self::Bools(list) => array(out, ValueType::Bool, list, |value| [u8::from(value)]),
        }
    }
}

fn tag(out: &mut Vec<u8>, ty: ValueType) {
    out.extend_from_slice(&(ty as u32).to_le_bytes());
}

fn scalar(out: &mut Vec<u8>, ty: ValueType, bytes: &[u8]) {
    tag(out, ty);
    out.extend_from_slice(bytes);
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
}
