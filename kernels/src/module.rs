//! The loaded kernels of one device.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use evergraph_pool::driver::{
    DeviceInfo, DriverError, DriverErrorKind, DynDriver, FunctionHandle, ModuleHandle, ModuleImage,
};
use evergraph_pool::driver::{LaunchConfig, StreamHandle};

use crate::cuda::{self, Blas, DiskCache, SOURCES, Source, Target};
use crate::{KernelError, cpu};

/// The kernels of one device, loaded once, unloaded on drop.
///
/// On the host device they are functions of this process. On a CUDA device they are compiled for exactly its
/// architecture at first use, and come from the [disk cache](DiskCache) from then on.
///
/// # Reuse and capture
/// Loading happens here and never later, so that nothing is loaded inside a capture. A graph that holds
/// one of these functions must not outlive this value: let its scope keep it.
pub struct Kernels {
    driver: DynDriver,
    modules: Vec<ModuleHandle>,
    functions: HashMap<String, FunctionHandle>,
    compiled: usize,
    blas: OnceLock<Arc<Blas>>,
    /// What ops choose their launches for, where that is not the driver's device.
    posing_as: Option<DeviceInfo>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels")
            .field("device", &self.driver.info().ordinal)
            .field("modules", &self.modules.len())
            .field("functions", &self.functions.len())
            .finish()
    }
}

impl Kernels {
    /// Loads every kernel on the driver's device, with the user's disk cache.
    ///
    /// # Errors
    /// The driver's and the compiler's, or "not supported" on a device without bodies.
    pub fn load(driver: DynDriver) -> Result<Self, KernelError> {
        Self::load_with(driver, &DiskCache::of_user())
    }

    /// As [`load`](Self::load), with another disk cache.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with(driver: DynDriver, disk: &DiskCache) -> Result<Self, KernelError> {
        match driver.info().backend {
            "host" => Self::of_host(driver, cpu::KERNELS),
            "cuda" => Self::of_sources(driver, SOURCES, disk),
            _ => Err(unsupported(&driver)),
        }
    }

    /// Functions of this process, on the host device.
    pub(crate) fn of_host(
        driver: DynDriver,
        kernels: &'static [evergraph_pool::driver::host::HostKernel],
    ) -> Result<Self, KernelError> {
        let mut loaded = Self::empty(driver)?;
        let module = loaded.driver.module_load(ModuleImage::Host(kernels))?;
        loaded.modules.push(module);
        for kernel in kernels {
            let function = loaded.driver.function(module, kernel.name)?;
            loaded.functions.insert(kernel.name.to_owned(), function);
        }
        Ok(loaded)
    }

    /// Functions of this process, on a host device that poses as another.
    #[cfg(any(test, feature = "emulation"))]
    pub(crate) fn of_emulation(
        driver: DynDriver,
        kernels: &'static [evergraph_pool::driver::host::HostKernel],
        device: DeviceInfo,
    ) -> Result<Self, KernelError> {
        let mut loaded = Self::of_host(driver, kernels)?;
        loaded.posing_as = Some(device);
        Ok(loaded)
    }

    /// Compiled sources, on a CUDA device.
    pub(crate) fn of_sources(driver: DynDriver, sources: &[Source], disk: &DiskCache) -> Result<Self, KernelError> {
        let mut loaded = Self::empty(driver)?;
        let target = Target::of(loaded.driver.info().compute_capability);
        for image in cuda::images(sources, target, disk)? {
            let module = loaded.driver.module_load(ModuleImage::Binary(&image.cubin))?;
            loaded.modules.push(module);
            loaded.compiled += usize::from(image.compiled);
            for kernel in image.kernels {
                let function = loaded.driver.function(module, &kernel)?;
                loaded.functions.insert(kernel, function);
            }
        }
        Ok(loaded)
    }

    fn empty(driver: DynDriver) -> Result<Self, KernelError> {
        driver.bind()?;
        Ok(Self {
            driver,
            modules: Vec::new(),
            functions: HashMap::new(),
            compiled: 0,
            blas: OnceLock::new(),
            posing_as: None,
        })
    }

    /// The driver that they were loaded on.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        &self.driver
    }

    /// The device that ops choose their launches for: the driver's, or the one whose kernels are emulated on it.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        self.posing_as.as_ref().unwrap_or_else(|| self.driver.info())
    }

    /// The modules, which graphs that use these kernels depend on.
    #[must_use]
    pub fn modules(&self) -> &[ModuleHandle] {
        &self.modules
    }

    /// How many sources were compiled for this value; the others came from disk.
    #[must_use]
    pub fn compiled(&self) -> usize {
        self.compiled
    }

    /// Lets large dense products on the handle's stream go through cuBLAS from now on. Whoever captures them declares the
    /// handle's workspace. The first handle stays.
    pub fn use_blas(&self, blas: Arc<Blas>) {
        let _ = self.blas.set(blas);
    }

    /// The handle of large dense products.
    #[must_use]
    pub fn blas(&self) -> Option<&Arc<Blas>> {
        self.blas.get()
    }

    /// Every kernel, by name.
    pub fn functions(&self) -> impl Iterator<Item = (&str, FunctionHandle)> {
        self.functions.iter().map(|(name, function)| (name.as_str(), *function))
    }

    /// A kernel by name.
    ///
    /// # Errors
    /// [`KernelError::MissingKernel`].
    pub fn function(&self, kernel: &'static str) -> Result<FunctionHandle, KernelError> {
        self.functions.get(kernel).copied().ok_or(KernelError::MissingKernel(kernel))
    }

    /// Launches one kernel with packed arguments.
    pub(crate) fn launch(
        &self,
        kernel: &'static str,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> Result<(), KernelError> {
        let function = self.function(kernel)?;
        self.driver.bind()?;
        // SAFETY: `args` were packed by the op that names this kernel, in the order of its parameters; its views
        // lie inside their roots. Whether a root is still live is what tokens and leases are for.
        #[allow(unsafe_code)]
        unsafe {
            self.driver.launch_kernel(function, config, args, stream)?;
        }
        Ok(())
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // A device that already died can not unload; there is nobody to tell.
        if self.driver.bind().is_ok() {
            for module in self.modules.drain(..) {
                let _ = self.driver.module_unload(module);
            }
        }
    }
}

fn unsupported(driver: &DynDriver) -> KernelError {
    let kind = DriverErrorKind::NotSupported("no kernels for this device");
    DriverError::new("module_load", driver.info().ordinal, kind).into()
}
