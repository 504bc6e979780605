//! Modules of host functions, and launching them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::machine::State;
use super::work::{Function, Kernel, Work};
use super::{HostDevice, HostKernel};
use crate::driver::{
    DriverErrorKind as Kind, DriverResult, FunctionHandle, LaunchConfig, ModuleHandle, ModuleImage, Modules,
    ParamLayout, StreamHandle,
};

/// A loaded module.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) device: u32,
    kernels: &'static [HostKernel],
    functions: BTreeMap<&'static str, u64>,
}

/// Largest block, threads, and dynamic shared memory, bytes, that a launch may ask for: a current device's.
const MAX_BLOCK_THREADS: u64 = 1024;
pub(super) const MAX_SHARED_BYTES: u32 = 227 << 10;
/// Largest grid in y and z.
const MAX_GRID_YZ: u32 = 65535;

impl HostDevice {
    fn function_of<'s>(
        &self,
        call: &'static str,
        state: &'s State,
        function: FunctionHandle,
    ) -> DriverResult<&'s Arc<Function>> {
        let found = state.functions.get(function.0).filter(|f| f.device == self.ordinal());
        found.ok_or_else(|| self.err(call, Kind::InvalidHandle("function")))
    }

    /// Makes a function's layout readable or not, as with drivers that can not tell. Graphs captured earlier follow.
    pub fn set_layout_readable(&self, function: FunctionHandle, readable: bool) -> DriverResult<()> {
        let state = self.machine.state.lock();
        let function = self.function_of("set_layout_readable", &state, function)?;
        function.layout_readable.store(readable, Ordering::Relaxed);
        Ok(())
    }

    /// Makes a function's arguments in graph nodes readable or not. Graphs captured earlier follow.
    pub fn set_args_readable(&self, function: FunctionHandle, readable: bool) -> DriverResult<()> {
        let state = self.machine.state.lock();
        let function = self.function_of("set_args_readable", &state, function)?;
        function.args_readable.store(readable, Ordering::Relaxed);
        Ok(())
    }

    fn check_shape(&self, call: &'static str, config: &LaunchConfig) -> DriverResult<()> {
        let threads = config.block.iter().fold(1u64, |all, &n| all.saturating_mul(n.into()));
        let wrong = if config.grid.contains(&0) || threads == 0 {
            "empty grid or block"
        } else if threads > MAX_BLOCK_THREADS {
            "more than 1024 threads a block"
        } else if config.grid[0] > i32::MAX as u32 || config.grid[1] > MAX_GRID_YZ || config.grid[2] > MAX_GRID_YZ {
            "grid too large"
        } else if config.shared_bytes > MAX_SHARED_BYTES {
            "too much shared memory"
        } else {
            return Ok(());
        };
        Err(self.err(call, Kind::InvalidValue(wrong)))
    }
}

impl Modules for HostDevice {
    fn module_load(&self, image: ModuleImage<'_>) -> DriverResult<ModuleHandle> {
        const CALL: &str = "module_load";
        self.enter(CALL)?;
        let ModuleImage::Host(kernels) = image else {
            return Err(self.err(CALL, Kind::InvalidValue("the host device loads functions of this process only")));
        };
        let mut state = self.machine.state.lock();
        if self.machine.config.module_load_breaks_capture {
            self.not_capturing(CALL, &mut state)?;
        }
        let module = Module { device: self.ordinal(), kernels, functions: BTreeMap::new() };
        Ok(ModuleHandle(state.modules.insert(module)))
    }

    fn module_unload(&self, module: ModuleHandle) -> DriverResult<()> {
        const CALL: &str = "module_unload";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        self.not_capturing(CALL, &mut state)?;
        if state.modules.get(module.0).is_none_or(|m| m.device != self.ordinal()) {
            return Err(self.err(CALL, Kind::InvalidHandle("module")));
        }
        let Some(module) = state.modules.remove(module.0) else { return Ok(()) };
        for handle in module.functions.values() {
            if let Some(function) = state.functions.remove(*handle) {
                function.loaded.store(false, Ordering::Release);
            }
        }
        Ok(())
    }

    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        const CALL: &str = "function";
        self.enter(CALL)?;
        let mut state = self.machine.state.lock();
        let State { modules, functions, .. } = &mut *state;
        let module = modules.get_mut(module.0).filter(|m| m.device == self.ordinal());
        let module = module.ok_or_else(|| self.err(CALL, Kind::InvalidHandle("module")))?;
        if let Some(&handle) = module.functions.get(name) {
            return Ok(FunctionHandle(handle));
        }
        let kernel = module.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = kernel.ok_or_else(|| self.err(CALL, Kind::NotFound))?;
        let handle = functions.insert(Arc::new(Function {
            kernel,
            layout: Arc::new(ParamLayout::c_layout(kernel.params)),
            device: self.ordinal(),
            loaded: AtomicBool::new(true),
            layout_readable: AtomicBool::new(true),
            args_readable: AtomicBool::new(true),
        }));
        module.functions.insert(kernel.name, handle);
        Ok(FunctionHandle(handle))
    }

    fn param_layout(&self, function: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>> {
        const CALL: &str = "param_layout";
        self.enter(CALL)?;
        let state = self.machine.state.lock();
        let function = self.function_of(CALL, &state, function)?;
        Ok(function.layout_readable.load(Ordering::Relaxed).then(|| function.layout.clone()))
    }

    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> DriverResult<()> {
        const CALL: &str = "launch_kernel";
        self.enter(CALL)?;
        self.check_shape(CALL, config)?;
        let mut state = self.machine.state.lock();
        let key = self.stream(CALL, &state, stream)?;
        let found = self.function_of(CALL, &state, function)?.clone();
        if args.len() != found.layout.packed_bytes() {
            return Err(self.err(CALL, Kind::InvalidValue("arguments do not fit the function's parameters")));
        }
        let work = Work::Kernel(Kernel {
            handle: function,
            hidden: found.kernel.hidden_attribute,
            function: found,
            config: *config,
            args: SmallVec::from_slice(args),
        });
        self.submit_locked(CALL, &mut state, key, work)
    }
}
