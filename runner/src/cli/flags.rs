//! Flags that several commands share.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::device::choose;
use super::fit::{FitFlags, Start};
use super::output::say;
use super::placement::{HostWorkChoice, PlacementFlags};
use super::size::{format_size, parse_size};
use crate::bench::FlashAttn;
use crate::engine::{ActType, KvType, PoolConfig, PoolMode, Runtime, RuntimeConfig, Session, SessionConfig};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::models::Decoder;
use crate::sampling::Sampling;

/// Which model file, and how it is read.
#[derive(Debug, Clone, Args)]
pub(super) struct ModelFlags {
    /// Model file (GGUF); of a split model, the first part
    #[arg(short = 'm', long = "model", value_name = "FILE")]
    pub(super) model: PathBuf,
    /// Read the file into memory instead of mapping it
    #[arg(long)]
    pub(super) no_mmap: bool,
}

impl ModelFlags {
    /// Opens and checks the file.
    pub(super) fn open(&self) -> Result<Gguf> {
        if self.no_mmap { Gguf::read(&self.model) } else { Gguf::open(&self.model) }
    }
}

/// A list of token ids.
#[derive(Clone, Debug)]
pub(super) struct TokenList(pub(super) Vec<i64>);

impl std::str::FromStr for TokenList {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let word = |word: &str| word.trim().parse::<i64>().map_err(|_| format!("`{word}` is no token id; write 1,2,3"));
        text.split([',', ' '])
            .filter(|part| !part.trim().is_empty())
            .map(word)
            .collect::<std::result::Result<_, _>>()
            .map(Self)
    }
}

impl TokenList {
    /// The ids, all below `vocabulary`.
    pub(super) fn check(&self, vocabulary: usize) -> Result<Vec<u32>> {
        self.0
            .iter()
            .map(|&id| match u32::try_from(id) {
                Ok(number) if (number as usize) < vocabulary => Ok(number),
                _ => Err(Error::TokenId { id, vocabulary }),
            })
            .collect()
    }
}

/// Which device, and how its memory is managed.
#[derive(Debug, Clone, Args)]
pub(super) struct DeviceFlags {
    /// host, cuda or cuda:N; by default cuda if there is one, else host
    #[arg(long, value_name = "DEVICE")]
    pub(super) device: Option<String>,
    /// Number of devices (host: that many; cuda: virtual ones where there are fewer)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) devices: u32,
    /// How the pool gets memory: by mapping pages, or in slabs
    #[arg(long, value_enum, default_value_t = PoolChoice::Vmm)]
    pub(super) pool: PoolChoice,
    /// Most memory that the pool may take on each device, for example 7.8GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(super) mem_limit: Option<usize>,
    /// Whether steps are captured and replayed
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(super) graphs: Switch,
    /// Whether a CUDA device does ops of one token together, in few launches
    #[arg(long, value_enum, default_value_t = Switch::On)]
    fuse: Switch,
    /// How the host gets to know of its share inside a graph; by default as is best for the device
    #[arg(long, value_enum)]
    host_work: Option<HostWorkChoice>,
    /// Worker threads of the host; by default one a core
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) threads: Option<u32>,
}

impl DeviceFlags {
    /// Takes the device and says which.
    fn open(&self, act: ActType, rounded_keys: bool) -> Result<Arc<Runtime>> {
        let device = choose(self.device.as_deref())?.with_devices(self.devices);
        let threads = evergraph_kernels::threads(self.threads.unwrap_or(0) as usize)?;
        let mut pool = PoolConfig::new(match self.pool {
            PoolChoice::Vmm => PoolMode::Vmm,
            PoolChoice::Slab => PoolMode::Slab,
        });
        pool.limit_bytes = self.mem_limit;
        let config = RuntimeConfig {
            pool,
            graphs: self.graphs == Switch::On,
            act,
            rounded_keys,
            host_work: self.host_work.map(Into::into),
            fuse: self.fuse == Switch::On,
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::on(&device, config)?;
        let limit = self.mem_limit.map_or_else(String::new, |bytes| format!(", limit {}", format_size(bytes as u64)));
        let graphs = if self.graphs == Switch::On { "on" } else { "off" };
        let on = if device.is_host() { format!("{device}, {threads} threads") } else { device.to_string() };
        say(format!("device: {on}; pool: {}{limit}; graphs: {graphs}", runtime.pool().mode()));
        Ok(Arc::new(runtime))
    }
}

/// How the pool gets memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PoolChoice {
    /// Reserved address ranges, pages mapped as needed.
    Vmm,
    /// Slabs from the driver's malloc.
    Slab,
}

/// How a model is run.
#[derive(Debug, Clone, Args)]
pub(super) struct EngineFlags {
    /// Most tokens in the sequence; by default as many as the model was made for
    #[arg(short = 'c', long = "ctx-size", value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i32::MAX as i64))]
    context: Option<u32>,
    /// Most tokens handed to the model at a time
    #[arg(short = 'b', long = "batch-size", value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    batch: u32,
    /// Most tokens in one step (also -ub) [default: 512]
    #[arg(long = "ubatch-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    ubatch: Option<u32>,
    /// Type of the key cache (also -ctk)
    #[arg(long = "cache-type-k", value_enum, default_value_t = KvChoice::F16)]
    cache_type_k: KvChoice,
    /// Type of the value cache (also -ctv)
    #[arg(long = "cache-type-v", value_enum, default_value_t = KvChoice::F16)]
    cache_type_v: KvChoice,
    /// Activations in products with weights in blocks; weights of floats always take floats
    #[arg(long, value_enum, default_value_t = ActChoice::Q8)]
    act: ActChoice,
    /// Round the keys of deepseek4 models through 8-bit floats, as the cache that they were trained with has them
    #[arg(long)]
    fp8_kv: bool,
    #[command(flatten)]
    placement: PlacementFlags,
    #[command(flatten)]
    fit: FitFlags,
    /// Flash attention: off writes scores out, in scratch that grows with the text; auto is on (also -fa)
    #[arg(long = "flash-attn", value_name = "on|off|auto", default_value = "auto", num_args = 0..=1, default_missing_value = "on", value_parser = FlashAttn::parse)]
    flash_attn: FlashAttn,
}

impl EngineFlags {
    /// Refuses what is not there yet, rather than doing something else.
    pub(super) fn check(&self) -> Result<()> {
        let missing = |what, found: &str, advice: &str| {
            Err(Error::Unsupported { what, found: found.to_owned(), advice: advice.to_owned() })
        };
        if self.cache_type_k != self.cache_type_v {
            let found = format!("-ctk {} with -ctv {}", self.cache_type_k.name(), self.cache_type_v.name());
            return missing("caching keys and values in different types", &found, "the same type for both");
        }
        self.placement.placement().map(|_| ())
    }

    /// Takes the device that these flags are for and says which.
    pub(super) fn open(&self, device: &DeviceFlags) -> Result<Arc<Runtime>> {
        let runtime = device.open(self.act.into(), self.fp8_kv)?;
        say(self.describe());
        Ok(runtime)
    }

    /// Builds the model of a file, each part where these flags want it, and a sequence on it as `config` says. Says where what is;
    /// gives back the sequence and the same as JSON.
    pub(super) fn start(
        &self,
        file: Arc<Gguf>,
        runtime: &Arc<Runtime>,
        config: &dyn Fn(&Decoder) -> Result<SessionConfig>,
    ) -> Result<(Session, Value)> {
        // A context of 0 tokens asks for all that the model was made for.
        Start { file, runtime, config, whole_context: self.context.is_some() }.go(&self.fit, &self.placement)
    }

    /// The sequence that these flags ask for; `context` and `ubatch` where they leave it open.
    pub(super) fn session(&self, context: Option<usize>, ubatch: usize) -> SessionConfig {
        SessionConfig {
            context: self.context.filter(|&context| context > 0).map(|context| context as usize).or(context),
            ubatch: self.ubatch.map_or(ubatch, |ubatch| ubatch as usize).min(self.batch as usize),
            kv: (self.cache_type_k.into(), self.cache_type_v.into()),
            flash_attention: self.flash_attn != FlashAttn::Off,
            stream_experts: self.placement.stream_experts(),
            device_experts: self.placement.device_experts(),
            expert_cache: self.placement.expert_cache(),
            ..SessionConfig::default()
        }
    }

    /// What stands in every JSON document.
    pub(super) fn json(&self, runtime: &Runtime) -> Value {
        let info = runtime.pool().driver().info();
        json!({
            "device": info.backend,
            "devices": runtime.units().len(),
            "ordinal": info.ordinal.0,
            "device_name": info.name,
            "act": self.act.name(),
            "cache_type_k": self.cache_type_k.name(),
            "cache_type_v": self.cache_type_v.name(),
            "flash_attention": self.flash_attn != FlashAttn::Off,
            "graphs": runtime.config().graphs,
        })
    }

    /// The same for people.
    fn describe(&self) -> String {
        let (act, keys, values) = (self.act.name(), self.cache_type_k.name(), self.cache_type_v.name());
        let scores = if self.flash_attn == FlashAttn::Off { "; attention: scores written out" } else { "" };
        format!("activations: {act}; cache: {keys} keys, {values} values{scores}")
    }
}

/// Type of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum KvChoice {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// The upper half of 32-bit floats.
    Bf16,
}

impl KvChoice {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<KvChoice> for KvType {
    fn from(choice: KvChoice) -> Self {
        match choice {
            KvChoice::F32 => Self::F32,
            KvChoice::F16 => Self::F16,
            KvChoice::Bf16 => Self::Bf16,
        }
    }
}

/// Activations in dot products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ActChoice {
    /// Floats.
    F32,
    /// 8-bit integers with a scale for each 32.
    Q8,
}

impl ActChoice {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Q8 => "q8",
        }
    }
}

impl From<ActChoice> for ActType {
    fn from(choice: ActChoice) -> Self {
        match choice {
            ActChoice::F32 => Self::F32,
            ActChoice::Q8 => Self::Q8,
        }
    }
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub(super) struct SamplingFlags {
    /// Temperature; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.8, allow_hyphen_values = true)]
    temp: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 40, allow_hyphen_values = true)]
    top_k: i32,
    /// Keep the fewest tokens whose probabilities reach P; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_hyphen_values = true)]
    top_p: f32,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.05, allow_hyphen_values = true)]
    min_p: f32,
    /// Divide the logits of recent tokens by this; 1 does nothing
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_hyphen_values = true)]
    repeat_penalty: f32,
    /// How many recent tokens the penalty looks at; -1 all
    #[arg(long, value_name = "N", default_value_t = 64, allow_hyphen_values = true)]
    repeat_last_n: i32,
    /// Seed of the random numbers; by default another one each time
    #[arg(short = 's', long, value_name = "S", allow_hyphen_values = true)]
    seed: Option<i64>,
}

impl SamplingFlags {
    /// The parameters, checked.
    pub(super) fn sampling(&self) -> Result<Sampling> {
        let sampling = Sampling {
            temp: self.temp,
            top_k: u32::try_from(self.top_k).unwrap_or(0), // llama.cpp: 0 or less keeps all
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            seed: match self.seed {
                Some(seed) if seed >= 0 => seed as u64,
                _ => RandomState::new().hash_one(std::process::id()) >> 32,
            },
        };
        sampling.check()?;
        Ok(sampling)
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}
