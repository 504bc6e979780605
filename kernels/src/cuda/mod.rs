//! Kernels for CUDA devices: sources, compiler, disk cache, loading.
//!
//! ```text
//! source.rs   the .cu files of kernels/cuda, and the headers that they share
//! nvrtc.rs    NVRTC, loaded at run time: text to a cubin for exactly one architecture
//! disk.rs     compiled images on disk, keyed by source, options and compiler
//! elf.rs      the names of the kernels in a cubin
//! blas.rs     cuBLAS, loaded at run time, for large dense products
//! launch/     which kernel, grid and block an op takes on a device
//! ```
//!
//! An image is compiled at first use and found on disk from then on, without loading the compiler. Entries are
//! written aside and renamed, so that two processes can fill the cache at once; an entry that does not match its
//! checksum is compiled anew. A cache that can not be written is a warning, not an error.
//!
//! # Cost model
//! First use compiles all sources, on all cores: seconds. After that, loading reads a few files and hands them to the
//! driver: milliseconds.

mod blas;
mod disk;
mod elf;
pub mod launch;
mod nvrtc;
mod source;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

pub use blas::{Blas, BlasError, BlasType, Product};
pub use disk::DiskCache;
pub use nvrtc::{Nvrtc, NvrtcError};
pub use source::{SOURCES, Source};

/// The text of a header of the kernels.
#[cfg(test)]
pub(crate) fn header(name: &str) -> Option<&'static str> {
    source::HEADERS.iter().find(|header| header.0 == name).map(|header| header.1)
}

/// An architecture to compile for, such as `sm_90a`.
///
/// Instructions of one chip family only exist under its `a` target: Hopper's matrix instructions under `sm_90a`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Target {
    major: u32,
    minor: u32,
}

impl Target {
    /// The target of a device.
    #[must_use]
    pub fn of((major, minor): (u32, u32)) -> Self {
        Self { major, minor }
    }

    /// Reads `sm_80`, `sm_90a` and the like.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("sm_")?.trim_end_matches('a');
        let number: u32 = digits.parse().ok().filter(|&n| (10..10_000).contains(&n))?;
        Some(Self { major: number / 10, minor: number % 10 })
    }

    /// As NVRTC spells it.
    #[must_use]
    pub fn name(self) -> String {
        let own = if (self.major, self.minor) == (9, 0) { "a" } else { "" };
        format!("sm_{}{}{own}", self.major, self.minor)
    }
}

/// What every source is compiled with, besides the target.
const OPTIONS: &[&str] = &["--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true"];

/// A compiled source.
#[derive(Clone, Debug)]
pub struct Image {
    /// Name of the source.
    pub source: &'static str,
    /// The cubin.
    pub cubin: Vec<u8>,
    /// The kernels in it.
    pub kernels: Vec<String>,
    /// Whether it was compiled now, and did not come from disk.
    pub compiled: bool,
}

/// Images of `sources` for `target`: from disk where they are there, else compiled and written there.
///
/// # Errors
/// [`NvrtcError`] where one has to be compiled and there is no compiler, or it refuses.
pub fn images(sources: &[Source], target: Target, disk: &DiskCache) -> Result<Vec<Image>, NvrtcError> {
    let compiler = disk::Compiler::find();
    let one = |source: &Source| {
        let key = disk.key(source, OPTIONS, target, &compiler);
        if let Some((cubin, kernels)) =
            disk.read(&key).and_then(|cubin| elf::kernels(&cubin).map(|kernels| (cubin, kernels)))
        {
            return Ok(Image { source: source.name, cubin, kernels, compiled: false });
        }
        let image = compile(source, target)?;
        disk.write(&key, &image.cubin);
        Ok(image)
    };
    sources.par_iter().map(one).collect()
}

/// Why kernels for `target` can not be had here, if they can not: the compiler does not load, and not all of them are on
/// disk either.
#[must_use]
pub fn lacking(target: Target, disk: &DiskCache) -> Option<NvrtcError> {
    let error = Nvrtc::load().err()?;
    let compiler = disk::Compiler::find();
    let on_disk = |source: &Source| disk.read(&disk.key(source, OPTIONS, target, &compiler)).is_some();
    if SOURCES.iter().all(on_disk) { None } else { Some(error) }
}

/// Compiles one source.
///
/// # Errors
/// [`NvrtcError`] without a compiler, for a target that it does not know, and with its log where it refuses the source.
pub fn compile(source: &Source, target: Target) -> Result<Image, NvrtcError> {
    let cubin = Nvrtc::load()?.compile(source, target, OPTIONS)?;
    let kernels = elf::kernels(&cubin).ok_or(NvrtcError::NotACubin { source_name: source.name })?;
    Ok(Image { source: source.name, cubin, kernels, compiled: true })
}
