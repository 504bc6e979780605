//! The device that a command works on: a host device, or one of the machine's own.

use std::sync::{Arc, OnceLock};

use evergraph_pool::driver::cuda::{self, CudaDevice, Missing};
use evergraph_pool::driver::host::{HostConfig, HostDevice, HostMachine};
use evergraph_pool::driver::{DeviceChoice, DeviceInfo, Driver, DriverResult, DynDriver};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A choice of device. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device(Option<Arc<Hardware>>);

/// A real device, opened once: each user takes the driver as it is.
#[derive(Debug)]
struct Hardware {
    first: DynDriver,
    second: OnceLock<Option<DynDriver>>,
}

impl Device {
    /// Host devices, made as they are needed.
    #[must_use]
    pub fn host() -> Self {
        Self(None)
    }

    /// The CUDA device of that number.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with what is missing and how to get it.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        let survey = cuda::survey();
        let lacks = |found: String, advice: &str| Error::NoDevice {
            asked: format!("cuda:{ordinal}"),
            found,
            advice: format!("{advice}; or --device host"),
        };
        if let Some(missing) = &survey.missing {
            return Err(lacks(missing.to_string(), advice(missing)));
        }
        if !survey.devices.iter().any(|info| info.ordinal.0 == ordinal) {
            let found = match survey.devices.len() {
                1 => "there is one device, cuda:0".to_owned(),
                n => format!("there are {n} devices, cuda:0 to cuda:{}", n.saturating_sub(1)),
            };
            return Err(lacks(found, "one of these (CUDA_VISIBLE_DEVICES hides devices)"));
        }
        let first = CudaDevice::open(ordinal).map_err(|error| {
            lacks(error.to_string(), "nvidia-smi, which says whether the device is held by somebody else or broken")
        })?;
        Ok(Self::of(first))
    }

    /// The device that the environment's `EVERGRAPH_DEVICE` names (`cuda`, `cuda:N`, `host`); a host device without it.
    /// For tests and small programs.
    ///
    /// # Errors
    /// [`Error::Argument`] for other words, [`Error::NoDevice`] for a device that is not there.
    pub fn asked() -> Result<Self> {
        let asked = std::env::var(DeviceChoice::VARIABLE).unwrap_or_else(|_| "host".to_owned());
        match asked.parse().map_err(|_| Error::argument(DeviceChoice::VARIABLE, "host, cuda or cuda:N", &asked))? {
            DeviceChoice::Cuda(number) => Self::cuda(number),
            _ => Ok(Self::host()),
        }
    }

    /// A device by its driver, which is used as hardware is: one for all, with nothing to set on it.
    #[must_use]
    pub fn of(driver: DynDriver) -> Self {
        Self(Some(Arc::new(Hardware { first: driver, second: OnceLock::new() })))
    }

    /// Whether it is a host device.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.0.is_none()
    }

    /// `host` or `cuda`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.0.as_ref().map_or("host", |hardware| hardware.first.info().backend)
    }

    /// What it is and can do; `None` for host devices, which are not made yet.
    #[must_use]
    pub fn info(&self) -> Option<&DeviceInfo> {
        self.0.as_ref().map(|hardware| hardware.first.info())
    }

    /// How `--device` asks for it.
    #[must_use]
    pub fn words(&self) -> String {
        match &self.0 {
            Some(hardware) => format!("{}:{}", self.backend(), hardware.first.info().ordinal.0),
            None => "host".to_owned(),
        }
    }

    /// Its driver: the device itself, or a host device of that configuration.
    ///
    /// # Errors
    /// Those of the host device, for a configuration that makes no sense.
    pub fn driver(&self, host: HostConfig) -> DriverResult<DynDriver> {
        match &self.0 {
            Some(hardware) => Ok(Arc::clone(&hardware.first)),
            None => Ok(HostDevice::new(host)?),
        }
    }

    /// Two devices that may reach each other's memory; `None` where there is only one.
    ///
    /// # Errors
    /// Those of the host device.
    pub fn pair(&self, host: HostConfig) -> DriverResult<Option<[DynDriver; 2]>> {
        match &self.0 {
            Some(hardware) => {
                let second = hardware.second.get_or_init(|| neighbour(&hardware.first));
                Ok(second.clone().map(|second| [Arc::clone(&hardware.first), second]))
            }
            None => match HostMachine::new(2, host)?.as_slice() {
                [first, second] => Ok(Some([first.clone() as _, second.clone() as _])),
                _ => Ok(None),
            },
        }
    }

    /// Unit of mapping of its memory, bytes: `host` on a host device, which takes any.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn page_bytes(&self, host: usize) -> DriverResult<usize> {
        match &self.0 {
            Some(hardware) => {
                hardware.first.bind()?;
                hardware.first.granularity_bytes()
            }
            None => Ok(host),
        }
    }

    /// What stands in JSON documents besides the back end.
    #[must_use]
    pub fn json(&self) -> Value {
        match &self.0 {
            Some(hardware) => {
                let info = hardware.first.info();
                json!({ "ordinal": info.ordinal.0, "name": info.name })
            }
            None => json!({ "ordinal": 0, "name": "host device (CPU)" }),
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some(hardware) => {
                let info = hardware.first.info();
                write!(f, "{}:{} ({})", info.backend, info.ordinal.0, info.name)
            }
            None => f.write_str("host"),
        }
    }
}

/// Another device of the machine, which the first can reach.
fn neighbour(first: &DynDriver) -> Option<DynDriver> {
    let own = first.info().ordinal;
    let numbers = (0..cuda::device_count()).filter(|n| *n != own.0);
    let mut devices = numbers.filter_map(|n| CudaDevice::open(n).ok());
    devices.find(|other| first.can_access_peer(other.info().ordinal).is_ok_and(|can| can)).map(|other| other as _)
}

/// What to do about it.
pub(crate) fn advice(missing: &Missing) -> &'static str {
    match missing {
        Missing::Library => {
            "install NVIDIA's driver, 550.54 (CUDA 12.4) or later; in a container, start it with the GPUs (--gpus all)"
        }
        Missing::Function(_) => "update NVIDIA's driver to 550.54 (CUDA 12.4) or later",
        Missing::Start(_) => {
            "nvidia-smi, which says what is wrong: often the kernel module and libcuda are of different versions, or \
             the container lacks /dev/nvidia*"
        }
        _ => "nvidia-smi, which lists the devices (CUDA_VISIBLE_DEVICES hides them)",
    }
}
