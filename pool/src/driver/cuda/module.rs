//! Modules and launches.

use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys;

use smallvec::SmallVec;

use super::flight::Note;
use super::stream::raw_stream;
use super::{CudaDevice, cuda};
use crate::driver::{
    DriverErrorKind as Kind, DriverResult, FunctionHandle, LaunchConfig, ModuleHandle, ModuleImage, Modules, Param,
    ParamLayout, StreamHandle,
};

/// `CU_LAUNCH_PARAM_BUFFER_POINTER`, `CU_LAUNCH_PARAM_BUFFER_SIZE`, `CU_LAUNCH_PARAM_END`.
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;
const END: usize = 0;
/// No kernel has more parameters than fit into 32 KiB.
const MAX_PARAMS: usize = 32 << 10;
const ELF: &[u8] = b"\x7fELF";
const FATBIN: &[u8] = &0xBA55_ED50_u32.to_le_bytes();

fn raw_module(module: ModuleHandle) -> sys::CUmodule {
    std::ptr::with_exposed_provenance_mut(module.0 as usize)
}

fn raw_function(function: FunctionHandle) -> sys::CUfunction {
    std::ptr::with_exposed_provenance_mut(function.0 as usize)
}

impl CudaDevice {
    /// Asks the driver for a layout, under both readings of the handle.
    fn ask_layout(&self, function: FunctionHandle) -> Option<ParamLayout> {
        type Query<'a> = &'a dyn Fn(usize, *mut usize, *mut usize) -> sys::CUresult;
        // SAFETY: out pointers are live for the call; the symbols are in `REQUIRED`.
        let as_function = |i, o, b| unsafe { sys::cuFuncGetParamInfo(raw_function(function), i, o, b) };
        // SAFETY: as above; a handle of the other kind is refused.
        let as_kernel = |i, o, b| unsafe { sys::cuKernelGetParamInfo(raw_function(function).cast(), i, o, b) };
        let queries: [Query<'_>; 2] = [&as_function, &as_kernel];
        queries.into_iter().find_map(|query| {
            let mut params = Vec::new();
            for index in 0..MAX_PARAMS {
                let (mut offset, mut bytes) = (0, 0);
                match query(index, &raw mut offset, &raw mut bytes) as u32 {
                    0 => params.push(Param { offset: offset as u32, bytes: bytes as u32 }),
                    // "Invalid value" past the last parameter is how the list ends.
                    1 => return Some(ParamLayout { params }),
                    _ => return None,
                }
            }
            None
        })
    }

    /// Lets launches of a function ask for all the shared memory that a block can have; without this that ends at 48 KiB.
    fn allow_shared_memory(&self, function: sys::CUfunction) -> DriverResult<()> {
        const CALL: &str = "function";
        use sys::CUfunction_attribute as Attribute;
        let mut fixed = 0;
        cuda!(
            self,
            CALL,
            cuFuncGetAttribute(&raw mut fixed, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        )?;
        let most = i32::try_from(self.info.shared_bytes).unwrap_or(i32::MAX).saturating_sub(fixed);
        if most <= 48 << 10 {
            return Ok(());
        }
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        cuda!(self, CALL, cuFuncSetAttribute(function, attribute, most))
    }
}

impl Modules for CudaDevice {
    fn module_load(&self, image: ModuleImage<'_>) -> DriverResult<ModuleHandle> {
        const CALL: &str = "module_load";
        let ModuleImage::Binary(image) = image else {
            return Err(self.err(CALL, Kind::NotSupported("functions of this process on a GPU")));
        };
        let sized = image.starts_with(ELF) || image.starts_with(FATBIN);
        if !sized && image.last() != Some(&0) {
            return Err(self.err(CALL, Kind::InvalidValue("PTX text ends with a NUL")));
        }
        let mut module: sys::CUmodule = std::ptr::null_mut();
        cuda!(self, CALL, cuModuleLoadData(&raw mut module, image.as_ptr().cast()))?;
        Ok(ModuleHandle(module.expose_provenance() as u64))
    }

    fn module_unload(&self, module: ModuleHandle) -> DriverResult<()> {
        // Function handles of the module may come back as others.
        self.layouts.lock().clear();
        cuda!(self, "module_unload", cuModuleUnload(raw_module(module)))
    }

    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle> {
        const CALL: &str = "function";
        let text = name;
        let name = CString::new(name).map_err(|_| self.err(CALL, Kind::NotFound))?;
        let mut function: sys::CUfunction = std::ptr::null_mut();
        cuda!(self, CALL, cuModuleGetFunction(&raw mut function, raw_module(module), name.as_ptr()))?;
        self.allow_shared_memory(function)?;
        let function = FunctionHandle(function.expose_provenance() as u64);
        self.names.lock().insert(function.0, text.to_owned());
        Ok(function)
    }

    fn param_layout(&self, function: FunctionHandle) -> DriverResult<Option<Arc<ParamLayout>>> {
        if let Some(known) = self.layouts.lock().get(&function) {
            return Ok(known.clone());
        }
        let layout = self.ask_layout(function).map(Arc::new);
        self.layouts.lock().insert(function, layout.clone());
        Ok(layout)
    }

    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        config: &LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> DriverResult<()> {
        const CALL: &str = "launch_kernel";
        let layout = self.param_layout(function)?;
        if layout.as_ref().is_some_and(|layout| layout.packed_bytes() != args.len()) {
            return Err(self.err(CALL, Kind::InvalidValue("arguments do not fit the function's parameters")));
        }
        let mut attributes: [MaybeUninit<sys::CUlaunchAttribute>; 2] = [MaybeUninit::zeroed(); 2];
        let mut count = 0;
        let mut add = |id: sys::CUlaunchAttributeID| {
            // SAFETY: all zero is "ignore" with an empty value; both wanted attributes are a plain 1.
            let attribute = unsafe { attributes[count].assume_init_mut() };
            attribute.id = id;
            attribute.value.cooperative = 1;
            count += 1;
        };
        if config.cooperative {
            add(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
        }
        if config.programmatic {
            add(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        }
        let launch = sys::CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.shared_bytes,
            hStream: raw_stream(stream),
            attrs: attributes.as_mut_ptr().cast(),
            numAttrs: count as u32,
        };
        let (handle, function) = (function, raw_function(function));
        let none = std::ptr::null_mut();
        let Some(layout) = layout else {
            // Without a layout the driver takes the packed buffer as it is (not for cooperative launches).
            let mut size = args.len();
            let mut extra: [*mut c_void; 5] = [
                std::ptr::without_provenance_mut(BUFFER_POINTER),
                args.as_ptr().cast_mut().cast(),
                std::ptr::without_provenance_mut(BUFFER_SIZE),
                (&raw mut size).cast(),
                std::ptr::without_provenance_mut(END),
            ];
            let extra = extra.as_mut_ptr();
            let call = || cuda!(self, CALL, cuLaunchKernelEx(&raw const launch, function, none, extra));
            return self.queue(Note::Kernel, handle.0, stream, call);
        };
        let at = |param: &Param| args[param.offset as usize..].as_ptr().cast_mut().cast::<c_void>();
        let mut params: SmallVec<[*mut c_void; 24]> = layout.params.iter().map(at).collect();
        let params = params.as_mut_ptr();
        let call = || cuda!(self, CALL, cuLaunchKernelEx(&raw const launch, function, params, none.cast()));
        self.queue(Note::Kernel, handle.0, stream, call)
    }
}
