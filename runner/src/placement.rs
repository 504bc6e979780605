//! Which of a model's tensors stay on the host. What is there is done there.

mod account;
mod fit;
mod layers;
mod plan;
mod table;

use std::fmt;
use std::str::FromStr;

pub use account::{Account, Share};
pub use fit::{Fitted, Needs, fit, rehearse};
pub use plan::{Candidate, Chosen, Limits, Room, choose};
use regex::Regex;
pub use table::table;

/// A side of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Home {
    /// The device that the model runs on.
    #[default]
    Device,
    /// The host, whatever the device is.
    Host,
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Host => "host",
        })
    }
}

/// Where a model's tensors go.
///
/// Blocks go as a whole ([`device_layers`](Self::device_layers)), and matrices of a block that is on the device may stay on
/// the host by name. The words are those of llama.cpp's flags, and so is their meaning.
#[derive(Clone, Debug, Default)]
pub struct Placement {
    /// `-ngl`: so many layers on the device, counted from the last; the output matrix is one more, behind the last block. None means all.
    pub device_layers: Option<usize>,
    /// Names of tensors, and where those go; the first that fits counts.
    pub rules: Vec<Rule>,
    /// Blocks that read the cache of another, and which: they are where it is.
    pub follows: Vec<(usize, usize)>,
    /// `-ts`: what each of several devices gets of the layers, in any unit. None means equal shares.
    pub shares: Vec<f64>,
    /// `-ncmoe` with a number for each device: of its first so many blocks, the experts stay on the host.
    pub host_experts: Vec<usize>,
}

/// Where tensors of some names go.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Which tensors.
    pub names: Names,
    /// Where to.
    pub home: Home,
}

/// Names of tensors.
#[derive(Clone, Debug)]
pub enum Names {
    /// Those in which the pattern is found (`-ot`).
    With(Regex),
    /// The experts of blocks below this number (`-ncmoe`; `-cmoe` is all).
    ExpertsBelow(usize),
}

impl Names {
    /// Whether a name is among them.
    #[must_use]
    pub fn contain(&self, name: &str) -> bool {
        match self {
            Self::With(pattern) => pattern.is_match(name),
            Self::ExpertsBelow(blocks) => expert_block(name).is_some_and(|block| block < *blocks),
        }
    }
}

/// The block that a tensor of experts belongs to.
pub(crate) fn expert_block(name: &str) -> Option<usize> {
    let (block, part) = in_block(name)?;
    let part = part.strip_suffix(".weight").unwrap_or(part);
    let experts = ["ffn_up", "ffn_down", "ffn_gate", "ffn_gate_up"];
    let stem = part.strip_suffix("_exps").or_else(|| part.strip_suffix("_chexps"))?;
    experts.contains(&stem).then_some(block)
}

/// The block that a tensor is in, and its name there.
pub(crate) fn in_block(name: &str) -> Option<(usize, &str)> {
    let (block, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((block.parse().ok()?, part))
}

impl FromStr for Rule {
    type Err = String;

    /// Reads `PATTERN=DEVICE`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (pattern, place) = text.rsplit_once('=').ok_or_else(|| format!("`{text}`: expected PATTERN=DEVICE"))?;
        let home = match place.to_ascii_lowercase().as_str() {
            "cpu" => Home::Host,
            "gpu" | "device" | "cuda0" | "cuda" | "cuda:0" => Home::Device,
            _ => return Err(format!("`{place}` in `{text}`: expected CPU, or CUDA0 for the device")),
        };
        let pattern = Regex::new(pattern).map_err(|error| format!("`{pattern}` is no pattern: {error}"))?;
        Ok(Self { names: Names::With(pattern), home })
    }
}

impl Placement {
    /// Where block `index` of `blocks` goes. The output matrix counts as block number `blocks`.
    #[must_use]
    pub fn block(&self, index: usize, blocks: usize) -> Home {
        let index = self.follows.iter().find(|(block, _)| *block == index).map_or(index, |(_, other)| *other);
        match self.device_layers {
            Some(layers) if index < (blocks + 1).saturating_sub(layers) => Home::Host,
            _ => Home::Device,
        }
    }

    /// Where a matrix goes that by its place in the model belongs to `home`.
    #[must_use]
    pub fn matrix(&self, name: &str, home: Home) -> Home {
        // A block that is on the host as a whole has nothing elsewhere.
        match home {
            Home::Host => Home::Host,
            Home::Device => self.rules.iter().find(|rule| rule.names.contain(name)).map_or(home, |rule| rule.home),
        }
    }

    /// As [`matrix`](Self::matrix), in a model of so many blocks on so many devices.
    #[must_use]
    pub fn matrix_among(&self, name: &str, home: Home, blocks: usize, devices: usize) -> Home {
        let ruled = self.rules.iter().any(|rule| rule.names.contain(name));
        match expert_block(name) {
            Some(block) if home == Home::Device && !ruled && self.experts_stay(block, blocks, devices) => Home::Host,
            _ => self.matrix(name, home),
        }
    }

    /// Whether all is on the device.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let devices = self.host_experts.iter().all(|budget| *budget == 0);
        devices && self.device_layers.is_none() && self.rules.iter().all(|rule| rule.home == Home::Device)
    }
}

#[cfg(test)]
mod tests;
