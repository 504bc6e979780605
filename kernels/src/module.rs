//! The loaded kernels of one device.

use std::collections::HashMap;
use std::fmt;

use evergraph_pool::driver::{DriverError, DriverErrorKind, DynDriver, FunctionHandle, ModuleHandle, ModuleImage};
use evergraph_pool::driver::{LaunchConfig, StreamHandle};

use crate::KernelError;
use crate::cpu;

/// The kernels of one device, loaded once, unloaded on drop.
///
/// # Reuse and capture
/// Loading happens here and never later, so that nothing is loaded inside a capture. A graph that holds
/// one of these functions must not outlive this value: key graphs by [`Kernels::module`].
pub struct Kernels {
    driver: DynDriver,
    module: ModuleHandle,
    functions: HashMap<&'static str, FunctionHandle>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels")
            .field("device", &self.driver.info().ordinal)
            .field("module", &self.module)
            .field("functions", &self.functions.len())
            .finish()
    }
}

impl Kernels {
    /// Loads every kernel on the driver's device.
    ///
    /// # Errors
    /// The driver's, or "not supported" on a device without bodies.
    pub fn load(driver: DynDriver) -> Result<Self, KernelError> {
        driver.bind()?;
        let image = match driver.info().backend {
            "host" => ModuleImage::Host(cpu::KERNELS),
            _ => {
                let kind = DriverErrorKind::NotSupported("no kernels for this device");
                return Err(DriverError::new("module_load", driver.info().ordinal, kind).into());
            }
        };
        let module = driver.module_load(image)?;
        let mut loaded = Self { driver, module, functions: HashMap::with_capacity(cpu::KERNELS.len()) };
        for kernel in cpu::KERNELS {
            let function = loaded.driver.function(module, kernel.name)?;
            loaded.functions.insert(kernel.name, function);
        }
        Ok(loaded)
    }

    /// The driver that they were loaded on.
    #[must_use]
    pub fn driver(&self) -> &DynDriver {
        &self.driver
    }

    /// The module, which graphs that use these kernels depend on.
    #[must_use]
    pub fn module(&self) -> ModuleHandle {
        self.module
    }

    /// Launches one kernel with packed arguments.
    pub(crate) fn launch(
        &self,
        kernel: &'static str,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> Result<(), KernelError> {
        let function = *self.functions.get(kernel).ok_or(KernelError::MissingKernel(kernel))?;
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
            let _ = self.driver.module_unload(self.module);
        }
    }
}
