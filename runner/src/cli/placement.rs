//! Flags that say what of a model stays on the host.

use super::size::parse_size;
use super::split::SplitFlags;
use crate::engine::{HostWork, Runtime};
use crate::error::{Error, Result};
use crate::placement::{Home, Names, Placement, Rule};

/// What of a model stays on the host.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct PlacementFlags {
    /// Layers on the device, counted from the last; the output is one more (also -ngl)
    #[arg(long = "n-gpu-layers", value_name = "N|auto|all", default_value = "auto", allow_hyphen_values = true)]
    gpu_layers: String,
    /// Keep the experts of all layers on the host (also -cmoe)
    #[arg(long)]
    cpu_moe: bool,
    /// Keep the experts of the first N layers on the host; with several numbers, of the first so many of each device (also -ncmoe)
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    n_cpu_moe: Vec<u32>,
    /// Keep matrices whose names a pattern is found in on the host (CPU) or the device (CUDA0); the first that fits counts (also -ot)
    #[arg(long, value_name = "PATTERN=DEVICE,…", value_delimiter = ',')]
    override_tensor: Vec<Rule>,
    /// Tokens in a step from which on experts of the host are copied to the device for it; by default as is best, if there is room
    #[arg(long, value_name = "N|off|auto", default_value = "auto")]
    stream_experts: StreamExperts,
    /// Of a single token's experts on the host, how many the device reads over the bus and does; by default as is best
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    device_experts: Option<u32>,
    /// Memory of the device for experts on the host that single tokens choose most often, such as 2GiB; none by default
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    expert_cache: Option<usize>,
    #[command(flatten)]
    split: SplitFlags,
}

/// From how many tokens on experts are copied to the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamExperts(Option<usize>);

impl StreamExperts {
    /// The number, or none for what is best.
    pub(super) fn tokens(self) -> Option<usize> {
        self.0
    }
}

/// How the host gets to know of its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum HostWorkChoice {
    /// Host functions of the driver.
    Nodes,
    /// A number that the device raises and the host looks for.
    Turns,
}

impl From<HostWorkChoice> for HostWork {
    fn from(choice: HostWorkChoice) -> Self {
        match choice {
            HostWorkChoice::Nodes => Self::Nodes,
            HostWorkChoice::Turns => Self::Turns,
        }
    }
}

impl std::str::FromStr for StreamExperts {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self(None)),
            "off" => Ok(Self(Some(usize::MAX))),
            _ => match text.parse() {
                Ok(tokens) if tokens > 0 => Ok(Self(Some(tokens))),
                _ => Err(format!("`{text}` is not a number of tokens, off or auto")),
            },
        }
    }
}

impl PlacementFlags {
    /// What the flags say.
    pub(super) fn placement(&self) -> Result<Placement> {
        let device_layers = match self.gpu_layers.as_str() {
            "all" | "auto" => None,
            text => match text.parse::<i64>() {
                Ok(layers) => usize::try_from(layers).ok(), // llama.cpp: below 0 is all
                Err(_) => return Err(Error::argument("-ngl", "a number, auto or all", text)),
            },
        };
        let mut rules = self.override_tensor.clone();
        // One number is llama.cpp's: layers of the whole model.
        let (below, host_experts) = match &self.n_cpu_moe[..] {
            _ if self.cpu_moe => (usize::MAX, Vec::new()),
            [] => (0, Vec::new()),
            [below] => (*below as usize, Vec::new()),
            each => (0, each.iter().map(|budget| *budget as usize).collect()),
        };
        if below > 0 {
            rules.push(Rule { names: Names::ExpertsBelow(below), home: Home::Host });
        }
        Ok(Placement { device_layers, rules, host_experts, ..Placement::default() })
    }

    /// The same on the devices of a runtime.
    pub(super) fn placement_on(&self, runtime: &Runtime) -> Result<Placement> {
        let (budgets, devices) = (self.n_cpu_moe.len(), runtime.units().len());
        if budgets > 1 && budgets > devices {
            return Err(Error::argument("-ncmoe", format!("a number, or one for each of {devices} devices"), budgets));
        }
        self.split.over(self.placement()?, runtime)
    }

    /// From how many tokens on experts are copied to the device.
    pub(super) fn stream_experts(&self) -> Option<usize> {
        self.stream_experts.tokens()
    }

    /// How many of a token's experts the device does.
    pub(super) fn device_experts(&self) -> Option<usize> {
        self.device_experts.map(|count| count as usize)
    }

    /// Memory for a cache of experts, bytes.
    pub(super) fn expert_cache(&self) -> Option<usize> {
        self.expert_cache
    }

    /// Whether any of it was said.
    pub(super) fn is_given(&self) -> bool {
        self.gpu_layers != "auto" || self.cpu_moe || !self.n_cpu_moe.is_empty() || !self.override_tensor.is_empty()
    }
}
