//! Choosing a device.

use std::path::{Path, PathBuf};

use evergraph_kernels::cuda::{DiskCache, Target, lacking};
use evergraph_pool::driver::{DeviceInfo, cuda};

use crate::device::Device;
use crate::error::{Error, Result};

/// Finds a shared library by name, as the dynamic linker would in the usual places.
pub(super) fn find_library(name: &str) -> Option<PathBuf> {
    const USUAL: &[&str] = &[
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
    let listed = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = listed.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from);
    listed
        .chain(configured())
        .chain(USUAL.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| path.exists())
}

/// Folders that the linker was told of.
fn configured() -> Vec<PathBuf> {
    let files = std::fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "conf")).collect();
    files.sort();
    let texts = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    texts
        .flat_map(|text| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>())
        .filter(|line| line.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

/// The kernel driver's version line, if it is loaded.
pub(super) fn kernel_driver() -> Option<String> {
    let text = std::fs::read_to_string(Path::new("/proc/driver/nvidia/version")).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

/// What kernels for a CUDA device lack, and how to get it.
pub(super) fn kernels_missing(info: &DeviceInfo) -> Option<(String, String)> {
    let error = lacking(Target::of(info.compute_capability), &DiskCache::of_user())?;
    let text = error.to_string();
    // The compiler's own words end with what to do.
    Some(match text.split_once(": ") {
        Some((what, advice)) => (format!("no kernels for {}: {what}", info.name), advice.to_owned()),
        None => (format!("no kernels for {}: {text}", info.name), "another NVRTC".to_owned()),
    })
}

/// Turns `--device` into a device.
///
/// # Errors
/// [`Error::Argument`] for words that mean no device, [`Error::NoDevice`] for one that is not there.
pub(super) fn choose(asked: Option<&str>) -> Result<Device> {
    let (text, number) = match asked {
        Some("host" | "cpu") => return Ok(Device::host()),
        // Nobody asked: what can not be used is not worth a word.
        None => {
            let survey = cuda::survey();
            let usable =
                survey.missing.is_none() && survey.devices.first().is_some_and(|d| kernels_missing(d).is_none());
            return Ok(if usable { Device::cuda(0).unwrap_or_else(|_| Device::host()) } else { Device::host() });
        }
        Some(text) => {
            let bad = || Error::argument("--device", "host, cuda or cuda:N", text);
            let number = match text.strip_prefix("cuda").ok_or_else(bad)? {
                "" => 0,
                rest => rest.strip_prefix(':').and_then(|number| number.parse().ok()).ok_or_else(bad)?,
            };
            (text, number)
        }
    };
    let device = Device::cuda(number)?;
    match device.info().and_then(kernels_missing) {
        Some((found, advice)) => {
            Err(Error::NoDevice { asked: text.to_owned(), found, advice: format!("{advice}; or --device host") })
        }
        None => Ok(device),
    }
}
