//! Choosing a device.

use std::path::Path;

use crate::error::{Error, Result};

/// What kind of device to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The host device.
    Host,
    /// A CUDA device, by number.
    Cuda(u32),
}

/// What was found of CUDA on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CudaProbe {
    /// The kernel driver's version line, if it is loaded.
    pub(super) kernel_driver: Option<String>,
    /// Where the user-space driver library is.
    pub(super) library: Option<String>,
}

impl CudaProbe {
    pub(super) fn new() -> Self {
        let kernel_driver = std::fs::read_to_string("/proc/driver/nvidia/version")
            .ok()
            .and_then(|text| text.lines().next().map(|line| line.trim().to_owned()));
        Self { kernel_driver, library: find_library("libcuda.so.1") }
    }

    /// What is missing, and what to do; `None` when devices can be used.
    pub(super) fn missing(&self) -> Option<(String, String)> {
        let mut missing = Vec::new();
        if self.kernel_driver.is_none() {
            missing.push("no NVIDIA kernel driver (/proc/driver/nvidia/version is not there)");
        }
        if self.library.is_none() {
            missing.push("no libcuda.so.1");
        }
        missing.push("this version has no CUDA kernels yet");
        Some((missing.join("; "), "--device host".to_owned()))
    }
}

/// Finds a shared library by name, as the dynamic linker would in the usual places.
pub(super) fn find_library(name: &str) -> Option<String> {
    let listed = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/lib/x86_64-linux-gnu",
        "/usr/lib/wsl/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/cuda/lib64",
        "/usr/local/cuda/compat",
    ];
    listed
        .split(':')
        .filter(|folder| !folder.is_empty())
        .chain(usual)
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.exists())
        .map(|path| path.display().to_string())
}

/// Turns `--device` into a choice.
///
/// # Errors
/// [`Error::Argument`] for words that mean no device, [`Error::NoDevice`] for one that is not there.
pub(super) fn choose(asked: Option<&str>) -> Result<Kind> {
    let probe = CudaProbe::new();
    match asked {
        None => Ok(if probe.missing().is_none() { Kind::Cuda(0) } else { Kind::Host }),
        Some("host" | "cpu") => Ok(Kind::Host),
        Some(text) => {
            let bad = || Error::argument("--device", "host, cuda or cuda:N", text);
            let number = match text.strip_prefix("cuda").ok_or_else(bad)? {
                "" => 0,
                rest => rest.strip_prefix(':').and_then(|number| number.parse().ok()).ok_or_else(bad)?,
            };
            match probe.missing() {
                Some((found, advice)) => Err(Error::NoDevice { asked: text.to_owned(), found, advice }),
                None => Ok(Kind::Cuda(number)),
            }
        }
    }
}
