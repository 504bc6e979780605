//! What of llama-bench's parameters the engine can do. What it can not is refused, rather than something else measured.

use super::parameters::{Placement, Row, SequenceParameters, SplitMode, kv_name};
use crate::error::{Error, Result};
use crate::placement::{self, Home, Names, Rule};

impl Row {
    /// Whether the engine can do it.
    ///
    /// # Errors
    /// [`Error::Argument`] with what it can do.
    pub fn check(&self) -> Result<()> {
        self.model.placement.check()?;
        self.sequence.check()
    }
}

impl Placement {
    /// There is one device, for now, and the host.
    fn check(&self) -> Result<()> {
        self.placed()?;
        if !matches!(self.split_mode, SplitMode::None | SplitMode::Layer) {
            return Err(Error::argument("-sm", "none or layer (there is one device)", self.split_mode.name()));
        }
        if self.main_gpu != 0 {
            let expected = "0 (there is one device; --device cuda:N chooses it)";
            return Err(Error::argument("-mg", expected, self.main_gpu));
        }
        if self.tensor_split.shares().iter().skip(1).any(|share| *share > 0.0) {
            return Err(Error::argument("-ts", "a share of one device (there is one)", &self.tensor_split));
        }
        Ok(())
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
