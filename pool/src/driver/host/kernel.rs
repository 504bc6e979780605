//! Kernels of the host device: CPU functions over packed arguments.
#![allow(unsafe_code)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::driver::{DevicePtr, Fault, LaunchConfig, ParamLayout};

/// One kernel of a host module.
#[derive(Clone, Copy, Debug)]
pub struct HostKernel {
    /// Its name, for [`Modules::function`](crate::driver::Modules::function).
    pub name: &'static str,
    /// (bytes, alignment) of each parameter, in order; packed as C does.
    pub params: &'static [(u32, u32)],
    /// A launch attribute that no getter shows and exec-update does not change, as hardware has them.
    pub hidden_attribute: u32,
    /// The body. Runs once a launch and sees the whole grid; it may spread work over threads.
    pub body: fn(&KernelContext<'_>) -> Result<(), Fault>,
}

/// Checks spans of device memory; the host device's map.
pub trait SpanCheck: Sync {
    /// Whether `bytes` at `ptr` are mapped and accessible from this device; else the fault.
    fn check(&self, op: &str, ptr: DevicePtr, bytes: usize, write: bool) -> Result<(), Fault>;
}

/// What a kernel body sees of its launch.
pub struct KernelContext<'a> {
    name: &'a str,
    config: LaunchConfig,
    layout: &'a ParamLayout,
    args: &'a [u8],
    spans: &'a dyn SpanCheck,
}

impl std::fmt::Debug for KernelContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelContext").field("name", &self.name).field("config", &self.config).finish_non_exhaustive()
    }
}

impl<'a> KernelContext<'a> {
    /// A launch of `name`; `args` are as long as `layout` says.
    #[must_use]
    pub fn new(
        name: &'a str,
        config: LaunchConfig,
        layout: &'a ParamLayout,
        args: &'a [u8],
        spans: &'a dyn SpanCheck,
    ) -> Self {
        Self { name, config, layout, args, spans }
    }

    /// The kernel's name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The packed arguments, for bodies that unpack them themselves.
    #[must_use]
    pub fn args(&self) -> &'a [u8] {
        self.args
    }

    /// The launch shape.
    #[must_use]
    pub fn config(&self) -> &LaunchConfig {
        &self.config
    }

    /// Argument `index` as a plain value; a fault if it is not that long.
    pub fn arg<T: FromBytes + KnownLayout + Immutable>(&self, index: usize) -> Result<T, Fault> {
        self.layout
            .params
            .get(index)
            .filter(|p| p.bytes as usize == size_of::<T>())
            .and_then(|p| self.args.get(p.offset as usize..(p.offset + p.bytes) as usize))
            .and_then(|bytes| T::read_from_bytes(bytes).ok())
            .ok_or_else(|| self.fault(DevicePtr::NULL, size_of::<T>(), false, "argument of another size"))
    }

    /// Pointer argument `index`.
    pub fn ptr(&self, index: usize) -> Result<DevicePtr, Fault> {
        self.arg::<u64>(index).map(DevicePtr)
    }

    /// `len` elements at `ptr`, checked once against the map.
    ///
    /// # Safety
    /// Nothing writes the span while the slice is used (as on a GPU, racing kernels are the caller's fault).
    pub unsafe fn slice<T: FromBytes + Immutable>(&self, ptr: DevicePtr, len: usize) -> Result<&'a [T], Fault> {
        let bytes = self.span::<T>(ptr, len, false)?;
        if bytes == 0 {
            return Ok(&[]);
        }
        // SAFETY: the span is mapped and readable (checked), aligned (checked), of a plain type; the caller
        // vouches for the absence of writers.
        Ok(unsafe { std::slice::from_raw_parts(ptr.0 as usize as *const T, len) })
    }

    /// `len` elements at `ptr` for writing, checked once against the map.
    ///
    /// # Safety
    /// Nothing else touches the span while the slice is used.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut<T: FromBytes + IntoBytes>(&self, ptr: DevicePtr, len: usize) -> Result<&'a mut [T], Fault> {
        let bytes = self.span::<T>(ptr, len, true)?;
        if bytes == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the span is mapped and writable (checked), aligned (checked), of a plain type; the caller
        // vouches for exclusivity.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr.0 as usize as *mut T, len) })
    }

    /// A fault at an address, for bodies that find their own trouble.
    #[must_use]
    pub fn fault(&self, address: DevicePtr, bytes: usize, write: bool, owner: &str) -> Fault {
        Fault { address, bytes, write, op: self.name.to_owned(), owner: owner.to_owned() }
    }

    /// Checks `len` elements at `ptr` against the map, for bodies that then work with raw pointers because their
    /// rows have gaps that belong to others. Returns the length in bytes.
    pub fn span<T>(&self, ptr: DevicePtr, len: usize, write: bool) -> Result<usize, Fault> {
        let bytes =
            len.checked_mul(size_of::<T>()).ok_or_else(|| self.fault(ptr, usize::MAX, write, "size overflow"))?;
        if bytes == 0 {
            return Ok(0);
        }
        if !ptr.0.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.fault(ptr, bytes, write, "misaligned address"));
        }
        self.spans.check(self.name, ptr, bytes, write)?;
        Ok(bytes)
    }
}
