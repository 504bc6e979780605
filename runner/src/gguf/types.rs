//! Value types, and the rules that files must keep.

use std::fmt;

/// Type of a metadata value, as numbered on disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// The type with this number.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Size of one element on disk, bytes; for strings and arrays the least that one takes.
    #[must_use]
    pub fn least_bytes(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | String => 8,
            Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_ascii_lowercase())
    }
}

/// The rules that a file must keep, one for each way to break it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Check {
    /// The file starts with `GGUF`.
    Magic,
    /// Version 2 or 3, little endian.
    Version,
    /// The file goes on for as long as it says.
    Truncated,
    /// A count or length fits in the rest of the file and under the cap.
    Count,
    /// Text is UTF-8.
    Utf8,
    /// Keys are not empty.
    KeyName,
    /// Keys occur once.
    DuplicateKey,
    /// A value type that exists.
    ValueType,
    /// An array's element type exists and is not itself an array.
    ElementType,
    /// A bool is 0 or 1.
    Bool,
    /// `general.alignment` is a sane u32 power of two.
    Alignment,
    /// Tensor names have 1 to 63 bytes.
    TensorName,
    /// Tensor names occur once.
    DuplicateTensor,
    /// 1 to 4 dimensions.
    DimensionCount,
    /// Every dimension is at least 1 and the product fits.
    Dimensions,
    /// A tensor type that is known.
    TensorType,
    /// A row is whole blocks.
    RowBlocks,
    /// A tensor's size fits in 64 bits.
    TensorBytes,
    /// A tensor starts on the alignment.
    OffsetAlignment,
    /// A tensor lies inside the file.
    TensorRange,
    /// Tensors do not overlap.
    Overlap,
    /// Not one part of a split model.
    Split,
}

impl Check {
    /// The rule in words: "expected …".
    #[must_use]
    pub fn rule(self) -> &'static str {
        match self {
            Self::Magic => "the four bytes GGUF",
            Self::Version => "version 2 or 3, little endian",
            Self::Truncated => "the file to go on",
            Self::Count => "a number that fits in the rest of the file and under the cap",
            Self::Utf8 => "UTF-8 text",
            Self::KeyName => "a name of at least one byte",
            Self::DuplicateKey => "each key once",
            Self::ValueType => "a value type from 0 to 12",
            Self::ElementType => "an element type from 0 to 12, arrays in arrays excepted",
            Self::Bool => "0 or 1",
            Self::Alignment => "a u32 power of two from 1 to 2^20",
            Self::TensorName => "a name of 1 to 63 bytes",
            Self::DuplicateTensor => "each tensor name once",
            Self::DimensionCount => "1 to 4 dimensions",
            Self::Dimensions => "dimensions of at least 1 whose product is below 2^63",
            Self::TensorType => "a known tensor type",
            Self::RowBlocks => "rows of whole blocks",
            Self::TensorBytes => "a size below 2^63 bytes",
            Self::OffsetAlignment => "an offset on the file's alignment",
            Self::TensorRange => "a tensor inside the file",
            Self::Overlap => "tensors that do not overlap",
            Self::Split => "a model in one piece",
        }
    }

    /// What to try.
    #[must_use]
    pub fn advice(self) -> &'static str {
        match self {
            Self::Magic => "give a GGUF model file; other formats must be converted first",
            Self::Version => "convert the model again with a current converter, for a little-endian machine",
            Self::Truncated | Self::TensorRange => "get the file again, the download looks incomplete",
            Self::TensorType => "another quantisation of the model (Q4_K_M, Q8_0, F16 …)",
            Self::Split => "open the first part by its path, NAME-00001-of-0000N.gguf, with the others beside it",
            _ => "get the file again from a source you trust, it is damaged or hostile",
        }
    }
}
