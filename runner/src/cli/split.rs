//! Flags that say how a model is split over devices.

use serde_json::{Value, json};

use super::output::say;
use crate::bench::{SplitMode, TensorSplit, shares};
use crate::engine::Runtime;
use crate::error::Result;
use crate::models::Decoder;
use crate::placement::{Home, Placement};

/// How a model is split over devices.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct SplitFlags {
    /// How a model is split over devices: none (all of it on -mg), layer (whole layers); row and tensor are not there yet (also -sm)
    #[arg(long, value_name = "MODE", default_value = "layer", value_parser = SplitMode::parse)]
    split_mode: SplitMode,
    /// Shares of the devices, such as 3,1; by default as their free memory is (also -ts)
    #[arg(long, value_name = "A,B,…", default_value = "0", value_parser = parts)]
    tensor_split: TensorSplit,
    /// The device of a model that is not split (also -mg)
    #[arg(long, value_name = "N", default_value_t = 0)]
    main_gpu: u32,
}

fn parts(text: &str) -> std::result::Result<TensorSplit, String> {
    TensorSplit::parse(&text.replace(',', "/"))
}

impl SplitFlags {
    /// `placement` with what goes to which device.
    pub(super) fn over(&self, placement: Placement, runtime: &Runtime) -> Result<Placement> {
        let shares = shares(self.split_mode, self.main_gpu, &self.tensor_split, runtime)?;
        Ok(Placement { shares, ..placement })
    }
}

/// Where the layers of a model went, said where there are several devices; the same as JSON.
pub(super) fn layers(model: &Decoder, runtime: &Runtime) -> Value {
    let number = |device| runtime.units().iter().position(|unit| unit.device() == device);
    let blocks = (0..model.depth()).map(|index| match model.weights.block_home(index) {
        Home::Device => number(model.weights.block_device(index)),
        Home::Host => None,
    });
    let blocks: Vec<Option<usize>> = blocks.collect();
    let output = number(model.output.root().device);
    if runtime.units().len() > 1 {
        for device in 0..runtime.units().len() {
            let ours = || blocks.iter().enumerate().filter(|(_, home)| **home == Some(device)).map(|(index, _)| index);
            let layers = match (ours().min(), ours().max()) {
                (Some(first), Some(last)) if last > first => format!("layers {first} to {last}"),
                (Some(first), _) => format!("layer {first}"),
                _ => "no layers".to_owned(),
            };
            let output = if output == Some(device) { ", output" } else { "" };
            say(format!("device {device}: {layers}{output}"));
        }
    }
    json!({ "layers": blocks, "output": output })
}
