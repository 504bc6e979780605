//! Pool memory in cudarc's own calls.
//!
//! A slice can be an argument of cudarc's launches as it is, and through a borrowed view of any call that takes
//! [`cudarc::driver::DevicePtr`]:
//!
//! ```no_run
//! # fn f(pool: &evergraph_pool::Pool, stream: &evergraph_pool::Stream, ptx: cudarc::nvrtc::Ptx)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! use cudarc::driver::{LaunchConfig, PushKernelArg};
//! use evergraph_pool::driver::cuda::interop::Interop;
//!
//! let interop = Interop::new(stream)?;
//! let (x, y) = (pool.alloc::<f32>(256, stream)?, pool.alloc::<f32>(256, stream)?);
//! let kernel = interop.context().load_module(ptx)?.load_function("scale")?;
//! let mut launch = interop.stream().launch_builder(&kernel);
//! launch.arg(&x).arg(&y).arg(&256u32);
//! // SAFETY: the kernel takes these arguments.
//! unsafe { launch.launch(LaunchConfig::for_num_elems(256)) }?;
//! let back: Vec<f32> = interop.stream().clone_dtoh(&interop.view(&y)?)?;
//! # Ok(()) }
//! ```
//!
//! Never make a `CudaSlice` of pool memory: its drop gives the memory to the driver. cudarc's event tracking is switched
//! off for the context that is made here; order is the stream's. Work on another stream than the slice's own is
//! announced by [`DeviceSlice::record_stream`], which a view does by itself.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr as CudarcPtr, DevicePtrMut as CudarcPtrMut, DeviceSlice as CudarcSlice,
    LaunchArgs, PushKernelArg, SyncOnDrop, sys,
};

use super::error;
use super::stream::raw_stream;
use crate::driver::{DriverError, DriverErrorKind as Kind, DriverResult};
use crate::{DeviceSlice, Element, PoolError, Stream};

/// A stream of ours as cudarc's, with its context.
#[derive(Clone, Debug)]
pub struct Interop {
    /// Keeps the stream that cudarc's only borrows. Dropped after it.
    raw: Arc<CudaStream>,
    stream: Stream,
}

impl Interop {
    /// Wraps a stream of a CUDA device. The device's context is the same that the pool uses.
    ///
    /// What is handed out by [`stream`](Self::stream) must not outlive `stream` and all its clones; this one is a clone.
    ///
    /// # Errors
    /// `NotSupported` for a stream of another device; those of the driver.
    pub fn new(stream: &Stream) -> DriverResult<Self> {
        const CALL: &str = "interop";
        let info = stream.driver().info();
        if info.backend != "cuda" {
            return Err(DriverError::new(
                CALL,
                info.ordinal,
                Kind::NotSupported("cudarc on a device other than CUDA's"),
            ));
        }
        let context = CudaContext::new(info.ordinal.0 as usize);
        let context = context.map_err(|error| match error::check(CALL, info.ordinal, error.0) {
            Err(error) => error,
            Ok(()) => DriverError::new(CALL, info.ordinal, Kind::InvalidContext),
        })?;
        // SAFETY: nothing was allocated through this context object yet. Events of slices would be recorded into
        // captures, where they are edges to work outside of it.
        unsafe { context.disable_event_tracking() };
        // SAFETY: a live stream of this device's primary context, kept alive by the clone beside it.
        let raw = unsafe { context.wrap_borrowed_stream(raw_stream(stream.handle())) };
        Ok(Self { raw, stream: stream.clone() })
    }

    /// cudarc's context of the device.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        self.raw.context()
    }

    /// The stream as cudarc's.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.raw
    }

    /// A slice as an input of cudarc's calls on [`stream`](Self::stream).
    ///
    /// # Errors
    /// `OtherDevice`.
    pub fn view<'a, T: Element>(&'a self, slice: &'a DeviceSlice<T>) -> Result<View<'a, T>, PoolError> {
        slice.record_stream(&self.stream)?;
        Ok(View { interop: self, ptr: slice.ptr().0, len: slice.len(), element: PhantomData })
    }

    /// A slice as an output of cudarc's calls on [`stream`](Self::stream).
    ///
    /// # Errors
    /// `OtherDevice`.
    pub fn view_mut<'a, T: Element>(&'a self, slice: &'a mut DeviceSlice<T>) -> Result<ViewMut<'a, T>, PoolError> {
        self.view(slice).map(ViewMut)
    }

    /// What orders a call of cudarc's on `stream`. On the view's own stream nothing is needed. Any other first waits
    /// for the view's, and the host waits for it afterwards: the pool does not know that stream.
    fn order<'s>(&self, stream: &'s CudaStream) -> SyncOnDrop<'s> {
        if *stream == *self.raw {
            return SyncOnDrop::Sync(None);
        }
        stream.context().record_err(stream.join(&self.raw));
        SyncOnDrop::sync_stream(stream)
    }
}

/// A borrowed slice, for cudarc.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T: Element> {
    interop: &'a Interop,
    ptr: sys::CUdeviceptr,
    len: usize,
    element: PhantomData<&'a T>,
}

/// A mutably borrowed slice, for cudarc.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element>(View<'a, T>);

impl<T: Element> CudarcSlice<T> for View<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        &self.interop.raw
    }
}

impl<T: Element> CudarcPtr<T> for View<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.ptr, self.interop.order(stream))
    }
}

impl<T: Element> CudarcSlice<T> for ViewMut<'_, T> {
    fn len(&self) -> usize {
        self.0.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        &self.0.interop.raw
    }
}

impl<T: Element> CudarcPtr<T> for ViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.0.device_ptr(stream)
    }
}

impl<T: Element> CudarcPtrMut<T> for ViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.0.device_ptr(stream)
    }
}

// SAFETY: a kernel's pointer parameter is the device address, which the slice holds in 8 bytes; the reference keeps it
// in place until the launch.
unsafe impl<'a, 'b: 'a, T: Element> PushKernelArg<&'b DeviceSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, slice: &'b DeviceSlice<T>) -> &mut Self {
        self.arg(slice.address())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T: Element> PushKernelArg<&'b mut DeviceSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, slice: &'b mut DeviceSlice<T>) -> &mut Self {
        self.arg(slice.address())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: Element> PushKernelArg<&'b View<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, view: &'b View<'c, T>) -> &mut Self {
        self.arg(&view.ptr)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: Element> PushKernelArg<&'b mut ViewMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, view: &'b mut ViewMut<'c, T>) -> &mut Self {
        self.arg(&view.0.ptr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::HostConfig;
    use crate::driver::{DeviceChoice, open};

    #[test]
    fn the_host_device_is_no_device_of_cudarcs() -> Result<(), PoolError> {
        let driver = open(DeviceChoice::Host, HostConfig::default())?;
        let stream = Stream::new(&driver)?;
        assert!(matches!(Interop::new(&stream), Err(DriverError { kind: Kind::NotSupported(_), .. })));
        Ok(())
    }
}
