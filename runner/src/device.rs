//! The devices that a command works on: host devices, or the machine's own. Where more are asked for than the machine
//! has, they are virtual: several over each of its own.

use std::sync::{Arc, OnceLock};

use evergraph_pool::driver::cuda::{self, CudaDevice, Missing};
use evergraph_pool::driver::host::{HostConfig, HostDevice, HostMachine};
use evergraph_pool::driver::{
    DeviceChoice, DeviceInfo, DeviceOrdinal, Driver, DriverError, DriverErrorKind, DriverResult, DynDriver,
    VirtualMachine,
};
use serde_json::{Value, json};

use crate::error::{Error, Result};

/// A choice of device, or of several. Clones are the same devices.
#[derive(Clone, Debug)]
pub struct Device {
    /// `None`: host devices.
    hardware: Option<Arc<Hardware>>,
    count: u32,
}

/// A real device, opened once: each user takes the driver as it is.
#[derive(Debug)]
struct Hardware {
    first: DynDriver,
    /// As many as were asked for, made when they are needed.
    all: OnceLock<Vec<DynDriver>>,
    pair: OnceLock<[DynDriver; 2]>,
}

impl Device {
    /// Host devices, made as they are needed.
    #[must_use]
    pub fn host() -> Self {
        Self { hardware: None, count: 1 }
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
        Self::over(driver, 1)
    }

    fn over(first: DynDriver, count: u32) -> Self {
        let hardware = Hardware { first, all: OnceLock::new(), pair: OnceLock::new() };
        Self { hardware: Some(Arc::new(hardware)), count }
    }

    /// As many devices (1 at least), this one first: host devices of one machine, or those that the machine has. Where it
    /// has fewer they are all virtual, spread over those that are there.
    #[must_use]
    pub fn with_devices(self, count: u32) -> Self {
        let count = count.max(1);
        match self.hardware {
            Some(hardware) => Self::over(Arc::clone(&hardware.first), count),
            None => Self { hardware: None, count },
        }
    }

    /// How many devices they are.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether it is a host device.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.hardware.is_none()
    }

    /// `host` or `cuda`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.hardware.as_ref().map_or("host", |hardware| hardware.first.info().backend)
    }

    /// What it is and can do; `None` for host devices, which are not made yet.
    #[must_use]
    pub fn info(&self) -> Option<&DeviceInfo> {
        self.hardware.as_ref().map(|hardware| hardware.first.info())
    }

    /// How `--device` asks for it.
    #[must_use]
    pub fn words(&self) -> String {
        match &self.hardware {
            Some(hardware) => format!("{}:{}", self.backend(), hardware.first.info().ordinal.0),
            None => "host".to_owned(),
        }
    }

    /// Its driver, or that of the first of several: the device itself, or a host device of that configuration.
    ///
    /// # Errors
    /// Those of the host device, for a configuration that makes no sense.
    pub fn driver(&self, host: HostConfig) -> DriverResult<DynDriver> {
        match &self.hardware {
            Some(hardware) if self.count == 1 => Ok(Arc::clone(&hardware.first)),
            None if self.count == 1 => Ok(HostDevice::new(host)?),
            _ => Ok(self.drivers(host)?.swap_remove(0)),
        }
    }

    /// The drivers of all, as many as [`count`](Self::count) says: numbered from 0 on host devices and virtual ones, by
    /// their own numbers on others. Host devices are new ones each time.
    ///
    /// # Errors
    /// Those of opening a device; `InvalidValue` for more than 64.
    pub fn drivers(&self, host: HostConfig) -> DriverResult<Vec<DynDriver>> {
        let Some(hardware) = &self.hardware else {
            let devices = HostMachine::new(self.count as usize, host)?;
            return Ok(devices.into_iter().map(|device| device as _).collect());
        };
        if let Some(all) = hardware.all.get() {
            return Ok(all.clone());
        }
        let all = several(&hardware.first, self.count)?;
        Ok(hardware.all.get_or_init(|| all).clone())
    }

    /// Two devices that may reach each other's memory: the first two of several; else another of the machine's, and
    /// where there is none two virtual ones.
    ///
    /// # Errors
    /// Those of the host device, or of opening the other one.
    pub fn pair(&self, host: HostConfig) -> DriverResult<[DynDriver; 2]> {
        if let Some(pair) = self.hardware.as_ref().and_then(|hardware| hardware.pair.get()) {
            return Ok(pair.clone());
        }
        let mut two = match &self.hardware {
            _ if self.count > 1 => self.drivers(host)?,
            None => self.clone().with_devices(2).drivers(host)?,
            Some(hardware) => match neighbour(&hardware.first) {
                Some(second) => vec![Arc::clone(&hardware.first), second],
                None => several(&hardware.first, 2)?,
            },
        };
        two.truncate(2);
        let [first, second]: [DynDriver; 2] = two.try_into().map_err(|_| {
            let why = DriverErrorKind::InvalidValue("a pair needs two devices");
            DriverError::new("open", DeviceOrdinal(0), why)
        })?;
        let pair = [first, second];
        Ok(match &self.hardware {
            Some(hardware) => hardware.pair.get_or_init(|| pair).clone(),
            None => pair,
        })
    }

    /// Unit of mapping of its memory, bytes: `host` on a host device, which takes any.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn page_bytes(&self, host: usize) -> DriverResult<usize> {
        match &self.hardware {
            // Of the device itself: those over it have the same.
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
        let mut json = match &self.hardware {
            Some(hardware) => {
                let info = hardware.first.info();
                json!({ "ordinal": info.ordinal.0, "name": info.name })
            }
            None => json!({ "ordinal": 0, "name": "host device (CPU)" }),
        };
        if self.count > 1 {
            json["devices"] = json!(self.count);
        }
        json
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.hardware {
            Some(hardware) => {
                let info = hardware.first.info();
                write!(f, "{}:{} ({})", info.backend, info.ordinal.0, info.name)?;
            }
            None => f.write_str("host")?,
        }
        match (self.count, &self.hardware) {
            (1, _) => Ok(()),
            (count, Some(_)) if count > cuda::device_count() => write!(f, ", {count} virtual devices"),
            (count, _) => write!(f, ", {count} devices"),
        }
    }
}

/// As many devices, the given one first: those of the machine, and where they are too few virtual ones over all of them.
fn several(first: &DynDriver, count: u32) -> DriverResult<Vec<DynDriver>> {
    if count <= 1 {
        return Ok(vec![Arc::clone(first)]);
    }
    let mut physical = vec![Arc::clone(first)];
    if first.info().backend == "cuda" {
        let own = first.info().ordinal.0;
        for number in (0..cuda::device_count()).filter(|number| *number != own).take(count as usize - 1) {
            physical.push(CudaDevice::open(number)?);
        }
    }
    if physical.len() == count as usize {
        return Ok(physical);
    }
    let devices = VirtualMachine::new(&physical, count as usize)?;
    Ok(devices.into_iter().map(|device| device as _).collect())
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
