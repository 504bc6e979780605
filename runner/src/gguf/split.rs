//! Models in several files: `NAME-00001-of-00003.gguf` and so on, opened by the name of the first.
//!
//! The first file has the metadata; the others have their number and tensors. Names of the others are made from that
//! of the first, so that nothing outside its folder is opened.

use std::path::Path;
use std::sync::Arc;

use super::{Bytes, Gguf, parse};
use crate::error::{Error, Result};

/// What a part says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    /// Its number, from 0.
    number: u64,
    /// How many there are.
    count: u64,
    /// Tensors of all of them together, if it says so.
    tensors: Option<u64>,
}

impl Part {
    /// None for a file that is a whole model.
    fn of(file: &Gguf) -> Result<Option<Self>> {
        let Some(count) = file.get_in("split.count", 1..=u64::from(u16::MAX))?.filter(|&count| count > 1) else {
            return Ok(None);
        };
        let number = file.require_in("split.no", 0..=count - 1)?;
        Ok(Some(Self { number, count, tensors: file.get_u64("split.tensors.count")? }))
    }

    fn agrees_with(self, other: Self) -> bool {
        let tensors = self.tensors.zip(other.tensors);
        (self.number, self.count) == (other.number, other.count) && tensors.is_none_or(|(a, b)| a == b)
    }
}

/// The name of a part, but for its number and the count; and these two.
fn name_parts(path: &Path) -> Option<(&str, u64, u64)> {
    let number = |digits: &str| {
        let all = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
        all.then(|| digits.parse().ok())?
    };
    let (rest, count) = path.file_name()?.to_str()?.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, part) = rest.rsplit_once('-')?;
    Some((prefix, number(part)?, number(count)?))
}

fn part_name(prefix: &str, number: u64, count: u64) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", number + 1)
}

/// Opens the file at `path`, and with it the other parts of a split model; `read` gets at the bytes of each.
pub(super) fn open(path: &Path, read: &dyn Fn(&Path) -> Result<Bytes>) -> Result<Gguf> {
    let mut whole = parse::parse(read(path)?)?;
    let Some(first) = Part::of(&whole)? else { return Ok(whole) };
    let count = first.count;
    let fail =
        |path: &Path, expected: String, found: String| Err(Error::Split { path: path.to_owned(), expected, found });
    let Some((prefix, number, named)) = name_parts(path) else {
        let expected = part_name("NAME", first.number, count);
        return fail(
            path,
            format!("the name {expected}, as it is part {} of {count}", first.number + 1),
            "another".to_owned(),
        );
    };
    if (number, named) != (first.number + 1, count) {
        let found = format!("{} of {count} inside", first.number + 1);
        return fail(path, "the number that its name says".to_owned(), found);
    }
    if first.number != 0 {
        let expected = format!("the first part, {}", part_name(prefix, 0, count));
        return fail(path, expected, format!("part {number}"));
    }
    for number in 1..count {
        let path = path.with_file_name(part_name(prefix, number, count));
        let part = match read(&path) {
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return fail(&path, format!("part {} of {count}", number + 1), "no such file".to_owned());
            }
            read => parse::parse(read?).map_err(|error| in_file(&path, error))?,
        };
        let expected = Part { number, ..first };
        match Part::of(&part).map_err(|error| in_file(&path, error))? {
            Some(found) if found.agrees_with(expected) => {}
            Some(found) => {
                let tell = |part: Part| {
                    let tensors = part.tensors.map(|tensors| format!(" with {tensors} tensors in all"));
                    format!("part {} of {}{}", part.number + 1, part.count, tensors.unwrap_or_default())
                };
                return fail(&path, tell(expected), tell(found));
            }
            None => {
                return fail(&path, format!("part {} of {count}", number + 1), "a model in one file".to_owned());
            }
        }
        if let (Some(other), Ok(own)) = (part.get("general.architecture"), whole.architecture())
            && other.as_str() != Some(own)
        {
            return fail(&path, format!("a part of a {own} model"), other.to_string());
        }
        if let Err(tensor) = whole.join(part) {
            let found = format!("tensor {} a second time", tensor.escape_debug());
            return fail(&path, "each tensor in one part".to_owned(), found);
        }
    }
    match first.tensors {
        Some(tensors) if tensors != whole.tensors.len() as u64 => {
            fail(path, format!("{tensors} tensors in all parts"), whole.tensors.len().to_string())
        }
        _ => Ok(whole),
    }
}

/// An error of a part, with its name.
fn in_file(path: &Path, error: Error) -> Error {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match error {
        Error::BadFile(mut bad) => {
            bad.what = format!("{name}: {}", bad.what);
            Error::BadFile(bad)
        }
        Error::Metadata { key, expected, found } => {
            Error::Metadata { key: format!("{key} of {name}"), expected, found }
        }
        other => other,
    }
}

impl Gguf {
    /// Takes over the tensors of another part; returns the name of one that is there already.
    fn join(&mut self, part: Self) -> std::result::Result<(), Box<str>> {
        self.more.push(part.bytes);
        // At most 65535 parts, and as many tensors as fit their files.
        let number = self.more.len() as u16;
        for mut tensor in part.tensors {
            if self.tensor_index.insert(tensor.name.clone(), self.tensors.len() as u32).is_some() {
                return Err(tensor.name);
            }
            tensor.part = number;
            self.tensors.push(tensor);
        }
        Ok(())
    }

    /// The bytes of all files, the first one's first.
    pub fn parts(&self) -> impl Iterator<Item = &Arc<Bytes>> {
        std::iter::once(&self.bytes).chain(&self.more)
    }
}

#[cfg(test)]
mod tests;
