//! What of llama-bench's parameters the engine can do. What it can not is refused, rather than something else measured.

use super::parameters::{FlashAttn, Placement, Row, SequenceParameters, SplitMode, kv_name};
use crate::error::{Error, Result};

impl Row {
    /// Whether the engine can do it with a model of so many layers.
    ///
    /// # Errors
    /// [`Error::Argument`] with what it can do.
    pub fn check(&self, layers: usize) -> Result<()> {
        self.model.placement.check(layers)?;
        self.sequence.check()
    }
}

impl Placement {
    /// Everything is on one device, for now.
    fn check(&self, layers: usize) -> Result<()> {
        let whole = self.gpu_layers == -1 || usize::try_from(self.gpu_layers).is_ok_and(|count| count >= layers);
        if !whole {
            let expected = format!("-1, or at least the model's {layers} layers (all of them are on the device)");
            return Err(Error::argument("-ngl", expected, self.gpu_layers));
        }
        if self.cpu_moe != 0 {
            return Err(Error::argument("-ncmoe", "0 (all experts are on the device)", self.cpu_moe));
        }
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
        if !self.overrides.is_empty() {
            return Err(Error::argument("-ot", "nothing (all tensors are on the device)", &self.overrides));
        }
        Ok(())
    }
}

impl SequenceParameters {
    fn check(&self) -> Result<()> {
        if self.flash_attn == FlashAttn::Off {
            return Err(Error::argument("-fa", "on or auto", "off"));
        }
        if self.type_k != self.type_v {
            let found = format!("-ctk {} with -ctv {}", kv_name(self.type_k), kv_name(self.type_v));
            return Err(Error::argument("-ctk and -ctv", "the same type for both (f16, bf16 or f32)", found));
        }
        Ok(())
    }
}
