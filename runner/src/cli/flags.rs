//! Flags that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::size::parse_size;
use crate::error::{Error, Result};
use crate::gguf::{Bytes, Gguf};

/// Which model file, and how it is read.
#[derive(Debug, Clone, Args)]
pub(super) struct ModelFlags {
    /// Model file (GGUF)
    #[arg(short = 'm', long = "model", value_name = "FILE")]
    pub(super) model: PathBuf,
    /// Read the file into memory instead of mapping it
    #[arg(long)]
    pub(super) no_mmap: bool,
}

impl ModelFlags {
    /// Opens and checks the file.
    pub(super) fn open(&self) -> Result<Gguf> {
        if self.no_mmap { Gguf::parse(Bytes::read(&self.model)?) } else { Gguf::open(&self.model) }
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
    /// Worker threads of the host device; by default one a core
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) threads: Option<u32>,
}

/// How the pool gets memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PoolChoice {
    /// Reserved address ranges, pages mapped as needed.
    Vmm,
    /// Slabs from the driver's malloc.
    Slab,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}
