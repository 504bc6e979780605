//! What loaders read from a file's metadata: numbers of the architecture, one for all blocks or one for each.

use evergraph_kernels::ops::Scoring;

use crate::error::{Error, Result};
use crate::gguf::{Gguf, Value};

/// Most blocks that a model may have.
pub(super) const MOST_BLOCKS: u64 = 512;
/// Greatest width of a residual stream or of a feed-forward part.
pub(super) const MOST_WIDTH: u64 = 1 << 20;
/// Most heads of a block.
pub(super) const MOST_HEADS: u64 = 1 << 12;
/// Most elements of a head.
pub(super) const MOST_HEAD_DIM: u64 = 1 << 14;
/// Most experts of a block.
const MOST_EXPERTS: u64 = 1024;

/// The keys of a file that start with its architecture's name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a> {
    file: &'a Gguf,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(file: &'a Gguf) -> Result<Self> {
        Ok(Self { file, architecture: file.architecture()? })
    }

    /// The whole key.
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.file.get_str(&self.name(key))
    }

    /// A number from 1 to `most`.
    pub(super) fn size(&self, key: &str, most: u64) -> Result<usize> {
        self.file.require_in(&self.name(key), 1..=most).map(|value| value as usize)
    }

    /// As [`size`](Self::size), with a value for a file without the key.
    pub(super) fn size_or(&self, key: &str, most: u64, default: usize) -> Result<usize> {
        Ok(self.file.get_in(&self.name(key), 1..=most)?.map_or(default, |value| value as usize))
    }

    /// A number from 0 to `most`; 0 for a file without the key.
    pub(super) fn count(&self, key: &str, most: u64) -> Result<usize> {
        Ok(self.file.get_in(&self.name(key), 0..=most)?.unwrap_or(0) as usize)
    }

    /// A number from 1 to `most` for each block: a list, or one number for all.
    pub(super) fn sizes(&self, key: &str, blocks: usize, most: u64) -> Result<Vec<usize>> {
        let name = self.name(key);
        let Some(Value::Array(list)) = self.file.get(&name) else { return Ok(vec![self.size(key, most)?; blocks]) };
        let fits = |value: &u64| (1..=most).contains(value);
        let sizes: Vec<usize> = list
            .iter()
            .take(blocks)
            .map_while(|value| value.as_u64().filter(fits))
            .map(|value| value as usize)
            .collect();
        if sizes.len() == blocks {
            return Ok(sizes);
        }
        let expected = format!("an integer from 1 to {most}, or a list of {blocks} such");
        Err(Error::metadata(name, expected, Value::Array(list)))
    }

    /// A number from 0 to `most` for each block, from a list of at least as many.
    pub(super) fn counts(&self, key: &str, blocks: usize, most: u64) -> Result<Vec<usize>> {
        let name = self.name(key);
        let expected = || format!("a list of {blocks} integers from 0 to {most}");
        let Some(Value::Array(list)) = self.file.get(&name) else {
            let found = self.file.get(&name).map_or_else(|| "none".to_owned(), |value| value.to_string());
            return Err(Error::metadata(name, expected(), found));
        };
        let whole = |value: Value<'_>| value.as_u64().filter(|value| *value <= most).map(|value| value as usize);
        let counts: Vec<usize> = list.iter().take(blocks).map_while(whole).collect();
        if counts.len() == blocks { Ok(counts) } else { Err(Error::metadata(name, expected(), Value::Array(list))) }
    }

    /// A number for each block, from a list or one for all; none where it is 0, or the key is missing.
    pub(super) fn limits(&self, key: &str, blocks: usize) -> Result<Vec<Option<f32>>> {
        let name = self.name(key);
        let found = self.file.get(&name);
        let limits: Vec<f32> = match found {
            None => return Ok(vec![None; blocks]),
            Some(Value::Array(list)) => list.iter().take(blocks).map_while(Value::as_f32).collect(),
            Some(value) => value.as_f32().map_or_else(Vec::new, |limit| vec![limit; blocks]),
        };
        if limits.len() == blocks && limits.iter().all(|limit| limit.is_finite()) {
            return Ok(limits.into_iter().map(|limit| Some(limit).filter(|limit| *limit > 0.0)).collect());
        }
        let found = found.map_or_else(String::new, |value| value.to_string());
        Err(Error::metadata(name, format!("a number, or a list of {blocks} such"), found))
    }

    /// Whether something is so; not, for a file without the key.
    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        Ok(self.file.get_bool(&self.name(key))?.unwrap_or(false))
    }

    /// A number above 0; a file without the key must have a default.
    pub(super) fn positive(&self, key: &str, default: Option<f32>) -> Result<f32> {
        let found = self.file.get_f32(&self.name(key))?;
        match found.or(default) {
            Some(value) if value > 0.0 => Ok(value),
            Some(value) => Err(Error::metadata(self.name(key), "a positive number", value)),
            None => Err(Error::metadata(self.name(key), "a positive number", "no such key")),
        }
    }

    /// A number above 0, if the key is there and not 0.
    pub(super) fn positive_or_none(&self, key: &str) -> Result<Option<f32>> {
        match self.file.get_f32(&self.name(key))? {
            None | Some(0.0) => Ok(None),
            Some(_) => self.positive(key, None).map(Some),
        }
    }

    /// Experts of a block and experts used for a token; none for a model without.
    pub(super) fn experts(&self) -> Result<Option<(usize, usize)>> {
        match self.count("expert_count", MOST_EXPERTS)? {
            0 => Ok(None),
            count => Ok(Some((count, self.size("expert_used_count", count as u64)?))),
        }
    }

    /// How experts are scored; `usual` for a file that does not say.
    pub(super) fn scoring(&self, usual: Scoring) -> Result<Scoring> {
        match self.file.get_in(&self.name("expert_gating_func"), 0..=u64::MAX)? {
            None | Some(0) => Ok(usual),
            Some(1) => Ok(Scoring::Softmax),
            Some(2) => Ok(Scoring::Sigmoid),
            Some(4) => Ok(Scoring::SqrtSoftplus),
            Some(other) => Err(Error::Unsupported {
                what: "this way to score experts (expert_gating_func)",
                found: other.to_string(),
                advice: "a model with 1 (softmax), 2 (sigmoid) or 4 (square root of softplus)".to_owned(),
            }),
        }
    }

    /// Whether the weights of a token's experts are divided by their sum, and their factor.
    pub(super) fn expert_weights(&self) -> Result<(bool, f32)> {
        let scale = self.positive_or_none("expert_weights_scale")?.unwrap_or(1.0);
        Ok((self.flag("expert_weights_norm")?, scale))
    }

    /// Elements of a head that positions turn, in pairs.
    pub(super) fn turned(&self, most: u64) -> Result<usize> {
        let key = "rope.dimension_count";
        let turned = self.size(key, most)?;
        if turned.is_multiple_of(2) {
            Ok(turned)
        } else {
            Err(Error::metadata(self.name(key), "an even number", turned))
        }
    }

    /// The sliding window, tokens; none where it is missing or 0.
    pub(super) fn window(&self) -> Result<Option<u32>> {
        let window = self.count("attention.sliding_window", i32::MAX as u64)? as u32;
        Ok((window > 0).then_some(window))
    }

    /// Which blocks see a sliding window only: all but every N-th, or as a list says. `period` is for a file without
    /// the key; with none it must be there.
    pub(super) fn local_blocks(&self, blocks: usize, period: Option<u64>) -> Result<Vec<bool>> {
        let name = self.name("attention.sliding_window_pattern");
        let fail = |found: String| Error::metadata(&*name, format!("a period, or a list of {blocks} bools"), found);
        let every = |period: u64| Ok((0..blocks).map(|index| index as u64 % period < period - 1).collect());
        match (self.file.get(&name), period) {
            (None, Some(period)) => every(period),
            (None, None) => Err(fail("no such key".to_owned())),
            (Some(Value::Array(list)), _) => {
                let local: Vec<bool> = list.iter().take(blocks).map_while(Value::as_bool).collect();
                if local.len() == blocks { Ok(local) } else { Err(fail(Value::Array(list).to_string())) }
            }
            (Some(value), _) => match value.as_u64() {
                Some(period @ 1..=MOST_BLOCKS) => every(period),
                _ => Err(fail(value.to_string())),
            },
        }
    }

    /// Number of tokens: the rows of the embedding of this width, which the tokenizer must agree with.
    pub(super) fn vocabulary(&self, width: usize) -> Result<usize> {
        let name = "token_embd.weight";
        let expected = || format!("shape [V, {width}]");
        let tensor = self.file.tensor(name).ok_or_else(|| Error::tensor(name, expected(), "no such tensor"))?;
        let rows = match tensor.shape()[..] {
            [rows, _] if rows <= i32::MAX as u64 => rows as usize,
            _ => return Err(Error::tensor(name, expected(), format!("{:?}", tensor.shape()))),
        };
        let key = "tokenizer.ggml.tokens";
        if let Some(tokens) = self.file.get_strings(key)?
            && tokens.len() != rows
        {
            return Err(Error::metadata(key, format!("{rows} tokens, one for each row of {name}"), tokens.len()));
        }
        Ok(rows)
    }
}

/// Whether heads can be shared out evenly over key heads.
pub(super) fn check_heads(key: String, heads: usize, kv_heads: usize) -> Result<()> {
    if heads.is_multiple_of(kv_heads) {
        return Ok(());
    }
    Err(Error::metadata(key, format!("a divisor of {heads}"), kv_heads))
}
