//! Metadata values, viewed in place.

use std::fmt;

use super::types::ValueType;

/// A metadata value. Strings and arrays borrow from the file.
#[derive(Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// Reads a value of a type from checked bytes; `None` if they are too short.
    pub(super) fn read(ty: ValueType, bytes: &'a [u8]) -> Option<Self> {
        macro_rules! number {
            ($variant:ident, $ty:ty) => {
                Value::$variant(<$ty>::from_le_bytes(bytes.first_chunk().copied()?))
            };
        }
        Some(match ty {
            ValueType::U8 => number!(U8, u8),
            ValueType::I8 => number!(I8, i8),
            ValueType::U16 => number!(U16, u16),
            ValueType::I16 => number!(I16, i16),
            ValueType::U32 => number!(U32, u32),
            ValueType::I32 => number!(I32, i32),
            ValueType::F32 => number!(F32, f32),
            ValueType::U64 => number!(U64, u64),
            ValueType::I64 => number!(I64, i64),
            ValueType::F64 => number!(F64, f64),
            ValueType::Bool => Value::Bool(*bytes.first()? != 0),
            ValueType::String => Value::String(string(bytes)?.0),
            ValueType::Array => {
                let element = ValueType::from_id(u32::from_le_bytes(bytes.first_chunk().copied()?))?;
                let count = u64::from_le_bytes(bytes.get(4..)?.first_chunk().copied()?);
                Value::Array(Array { element, count: usize::try_from(count).ok()?, bytes: bytes.get(12..)? })
            }
        })
    }

    /// As an unsigned integer, from any integer or bool type that holds one.
    #[must_use]
    pub fn as_u64(self) -> Option<u64> {
        match self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            Self::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    /// As a signed integer, from any integer type that holds one.
    #[must_use]
    pub fn as_i64(self) -> Option<i64> {
        match self {
            Self::I8(value) => Some(value.into()),
            Self::I16(value) => Some(value.into()),
            Self::I32(value) => Some(value.into()),
            Self::I64(value) => Some(value),
            _ => self.as_u64()?.try_into().ok(),
        }
    }

    /// As a finite float, from either float type.
    #[must_use]
    pub fn as_f32(self) -> Option<f32> {
        let value = match self {
            Self::F32(value) => value,
            Self::F64(value) => value as f32,
            _ => return None,
        };
        value.is_finite().then_some(value)
    }

    /// As a truth value, from a bool or an integer 0 or 1 (converters differ).
    #[must_use]
    pub fn as_bool(self) -> Option<bool> {
        match self.as_u64()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// As text.
    #[must_use]
    pub fn as_str(self) -> Option<&'a str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// As an array.
    #[must_use]
    pub fn as_array(self) -> Option<Array<'a>> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Its type.
    #[must_use]
    pub fn value_type(self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// As JSON; arrays are cut after `most` elements, the rest told as a last string. Floats that JSON
    /// has no word for become strings.
    #[must_use]
    pub fn to_json(self, most: usize) -> serde_json::Value {
        use serde_json::{Value as Json, json};
        let float = |value: f64| serde_json::Number::from_f64(value).map_or(json!(value.to_string()), Json::Number);
        match self {
            Self::F32(value) => match value.to_string().parse::<f64>() {
                // through the decimal form, so that 0.1 stays 0.1
                Ok(value) => float(value),
                Err(_) => json!(value.to_string()),
            },
            Self::F64(value) => float(value),
            Self::Bool(value) => json!(value),
            Self::String(text) => json!(text),
            Self::Array(array) => {
                let mut list: Vec<Json> = array.iter().take(most).map(|value| value.to_json(most)).collect();
                if array.len() > most {
                    list.push(json!(format!("… {} in all", array.len())));
                }
                Json::Array(list)
            }
            Self::U64(value) => json!(value),
            other => json!(other.as_i64()),
        }
    }
}

/// Reads a length-prefixed string; returns it and the bytes it took.
fn string(bytes: &[u8]) -> Option<(&str, usize)> {
    let length = usize::try_from(u64::from_le_bytes(bytes.first_chunk().copied()?)).ok()?;
    let end = length.checked_add(8)?;
    Some((std::str::from_utf8(bytes.get(8..end)?).ok()?, end))
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(text) => {
                let cut: String = text.chars().take(60).collect();
                let dots = if cut.len() < text.len() { "…" } else { "" };
                write!(f, "\"{}{dots}\"", cut.escape_debug())
            }
            Self::Array(array) => {
                write!(f, "{} × {} [", array.len(), array.element_type())?;
                for (index, value) in array.iter().take(6).enumerate() {
                    write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
                }
                write!(f, "{}]", if array.len() > 6 { ", …" } else { "" })
            }
            Self::F32(value) => write!(f, "{value}"),
            Self::F64(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::U64(value) => write!(f, "{value}"),
            other => write!(f, "{}", other.as_i64().unwrap_or_default()),
        }
    }
}

/// An array of values of one type, read in place.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    count: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Type of the elements.
    #[must_use]
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// Element `index`, in constant time; `None` past the end, and for strings, which have no fixed size.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        if index >= self.count || self.element == ValueType::String {
            return None;
        }
        let start = index.checked_mul(self.element.least_bytes() as usize)?;
        Value::read(self.element, self.bytes.get(start..)?)
    }

    /// The elements in order.
    pub fn iter(&self) -> ArrayIter<'a> {
        ArrayIter { element: self.element, left: self.count, bytes: self.bytes, at: 0 }
    }

    /// The strings of an array of strings, each with its offset in the array's bytes; empty for others.
    pub(crate) fn spans(&self) -> impl Iterator<Item = (usize, &'a str)> + use<'a> {
        let mut iter = self.iter();
        std::iter::from_fn(move || {
            let value = iter.next()?.as_str()?;
            Some((iter.at - value.len(), value))
        })
    }

    /// The bytes that [`spans`](Self::spans) counts in.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Value::Array(*self))
    }
}

impl<'a> IntoIterator for &Array<'a> {
    type Item = Value<'a>;
    type IntoIter = ArrayIter<'a>;
    fn into_iter(self) -> ArrayIter<'a> {
        self.iter()
    }
}

/// Iterator over an array's elements.
#[derive(Clone, Debug)]
pub struct ArrayIter<'a> {
    element: ValueType,
    left: usize,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Iterator for ArrayIter<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        if self.left == 0 {
            return None;
        }
        let rest = self.bytes.get(self.at..)?;
        let value = Value::read(self.element, rest)?;
        self.left -= 1;
        self.at += match value {
            Value::String(text) => 8 + text.len(),
            _ => self.element.least_bytes() as usize,
        };
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}
