//! What of llama-bench's parameters the engine can do. What it can not is refused, rather than something else measured.

use super::parameters::{Placement, Row, SequenceParameters, SplitMode, TensorSplit, kv_name};
use crate::engine::Runtime;
use crate::error::{Error, Result};
use crate::placement::{self, Home, Names, Rule};

impl Row {
    /// Whether the engine can do it.
    ///
    /// # Errors
    /// [`Error::Argument`] with what it can do.
    pub fn check(&self, devices: usize) -> Result<()> {
        self.model.placement.check(devices)?;
        self.sequence.check()
    }
}

/// What each of so many devices gets of the layers; none for what is open.
///
/// # Errors
/// [`Error::Argument`] for a device or a share of one that is not there; [`Error::Unsupported`] for modes that cut matrices.
fn shares_of(mode: SplitMode, main: u32, split: &TensorSplit, devices: usize) -> Result<Vec<f64>> {
    let there = match devices {
        1 => "0 (there is one device; --devices N asks for more)".to_owned(),
        _ => format!("a device from 0 to {}", devices.saturating_sub(1)),
    };
    if main as usize >= devices {
        return Err(Error::argument("-mg", there, main));
    }
    if split.shares().iter().skip(devices).any(|share| *share > 0.0) {
        let expected = match devices {
            1 => "a share of one device (--devices N asks for more)".to_owned(),
            _ => format!("shares of {devices} devices"),
        };
        return Err(Error::argument("-ts", expected, split));
    }
    match mode {
        SplitMode::None => Ok((0..devices).map(|device| if device == main as usize { 1.0 } else { 0.0 }).collect()),
        SplitMode::Layer if split.shares().iter().all(|share| *share == 0.0) => Ok(Vec::new()),
        SplitMode::Layer => Ok(split.shares().iter().map(|share| f64::from(*share)).collect()),
        SplitMode::Row | SplitMode::Tensor if devices == 1 => {
            Err(Error::argument("-sm", "none or layer (there is one device)", mode.name()))
        }
        SplitMode::Row | SplitMode::Tensor => Err(Error::Unsupported {
            what: "matrices cut over devices",
            found: format!("-sm {}", mode.name()),
            advice: "-sm layer, which gives each device whole layers, or -sm none with -mg".to_owned(),
        }),
    }
}

/// What each device of a runtime gets of the layers: as is said, else as its free memory is.
///
/// # Errors
/// [`Error::Argument`] for a device or a share of one that is not there; [`Error::Unsupported`] for modes that cut matrices; those
/// of the devices.
pub fn shares(mode: SplitMode, main: u32, split: &TensorSplit, runtime: &Runtime) -> Result<Vec<f64>> {
    let shares = shares_of(mode, main, split, runtime.units().len())?;
    if shares.is_empty() && runtime.units().len() > 1 { runtime.free_shares() } else { Ok(shares) }
}

impl Placement {
    fn check(&self, devices: usize) -> Result<()> {
        self.placed()?;
        shares_of(self.split_mode, self.main_gpu, &self.tensor_split, devices).map(|_| ())
    }

    /// As the engine has it, on the devices of a runtime.
    ///
    /// # Errors
    /// As [`placed`](Self::placed), and as [`shares`].
    pub fn placed_on(&self, runtime: &Runtime) -> Result<placement::Placement> {
        let shares = shares(self.split_mode, self.main_gpu, &self.tensor_split, runtime)?;
        Ok(placement::Placement { shares, ..self.placed()? })
    }

    /// As the engine has it.
    ///
    /// # Errors
    /// [`Error::Argument`] for overrides that make no sense.
    pub fn placed(&self) -> Result<placement::Placement> {
        let rules = self.overrides.split(';').filter(|rule| !rule.is_empty());
        let mut rules = rules.map(str::parse::<Rule>).collect::<Result<Vec<_>, _>>().map_err(|found| {
            Error::argument("-ot", "PATTERN=CPU or PATTERN=CUDA0, several with `;` between them", found)
        })?;
        if self.cpu_moe > 0 {
            rules.push(Rule { names: Names::ExpertsBelow(self.cpu_moe as usize), home: Home::Host });
        }
        let device_layers = usize::try_from(self.gpu_layers).ok();
        Ok(placement::Placement { device_layers, rules, ..placement::Placement::default() })
    }
}

impl SequenceParameters {
    fn check(&self) -> Result<()> {
        if self.type_k != self.type_v {
            let found = format!("-ctk {} with -ctv {}", kv_name(self.type_k), kv_name(self.type_v));
            return Err(Error::argument("-ctk and -ctv", "the same type for both (f16, bf16 or f32)", found));
        }
        Ok(())
    }
}
