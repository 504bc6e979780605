//! Which device to open.

use std::fmt;
use std::str::FromStr;

use super::cuda::{self, CudaDevice};
use super::host::{HostConfig, HostDevice};
use super::{DriverResult, DynDriver};

/// A wish for a device. In words: `auto`, `host`, `cuda`, `cuda:N`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DeviceChoice {
    /// The first CUDA device where there is one, else the host device.
    #[default]
    Auto,
    /// The host device.
    Host,
    /// A CUDA device, by number.
    Cuda(u32),
}

/// Words that name no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no device; say auto, host, cuda or cuda:N")]
pub struct NoSuchChoice(pub String);

/// Opens the chosen device and makes it current on this thread. `host` sets up the host device and is not looked at
/// for others.
///
/// # Errors
/// Those of [`CudaDevice::open`] and [`HostDevice::new`]. [`DeviceChoice::Auto`] does not fall back from a CUDA device
/// that is there and does not open: that would hide what is wrong with it.
pub fn open(choice: DeviceChoice, host: HostConfig) -> DriverResult<DynDriver> {
    let driver: DynDriver = match choice.settled() {
        DeviceChoice::Cuda(ordinal) => CudaDevice::open(ordinal)?,
        _ => HostDevice::new(host)?,
    };
    driver.bind()?;
    Ok(driver)
}

impl DeviceChoice {
    /// The environment variable that [`asked`](Self::asked) reads.
    pub const VARIABLE: &'static str = "EVERGRAPH_DEVICE";

    /// What the user of a small program asked for: `--device X` or `--device=X` among its arguments, else
    /// [`VARIABLE`](Self::VARIABLE), else `auto`.
    ///
    /// # Errors
    /// `NoSuchChoice`.
    pub fn asked() -> Result<Self, NoSuchChoice> {
        let mut arguments = std::env::args().skip(1);
        let words = loop {
            match arguments.next() {
                None => break std::env::var(Self::VARIABLE).ok(),
                Some(argument) if argument == "--device" => break Some(arguments.next().unwrap_or_default()),
                Some(argument) => {
                    if let Some(words) = argument.strip_prefix("--device=") {
                        break Some(words.to_owned());
                    }
                }
            }
        };
        words.map_or(Ok(Self::Auto), |words| words.parse())
    }

    /// The same with `Auto` decided for this machine.
    #[must_use]
    pub fn settled(self) -> Self {
        match self {
            Self::Auto if cuda::device_count() > 0 => Self::Cuda(0),
            Self::Auto => Self::Host,
            settled => settled,
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = NoSuchChoice;

    fn from_str(words: &str) -> Result<Self, NoSuchChoice> {
        match words {
            "" | "auto" => Ok(Self::Auto),
            "host" | "cpu" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = words.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                number.map(Self::Cuda).ok_or_else(|| NoSuchChoice(words.to_owned()))
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_devices() {
        for (words, choice) in [
            ("auto", DeviceChoice::Auto),
            ("host", DeviceChoice::Host),
            ("cpu", DeviceChoice::Host),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!(words.parse(), Ok(choice), "{words}");
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        for words in ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            assert!(words.parse::<DeviceChoice>().is_err(), "{words}");
        }
    }

    #[test]
    fn the_host_device_is_always_there() -> DriverResult<()> {
        let driver = open(DeviceChoice::Host, HostConfig::default())?;
        assert_eq!(driver.info().backend, "host");
        if cuda::device_count() == 0 {
            assert_eq!(open(DeviceChoice::Auto, HostConfig::default())?.info().backend, "host");
            assert!(open(DeviceChoice::Cuda(0), HostConfig::default()).is_err());
        }
        Ok(())
    }
}
