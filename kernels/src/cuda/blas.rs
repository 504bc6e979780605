//! cuBLAS, loaded at run time: large dense products.
//!
//! A handle is bound to one stream, and works in memory of the pool that it was given. That memory has a token: a graph
//! that captures a product declares [`Blas::workspace`] as scratch and keeps the handle (`scope.keep`), and is as safe
//! as with any other kernel. Without a workspace of its own the library would allocate inside the capture.
//!
//! As with NVRTC the library is opened by name: any cuBLAS from 12 on will do.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use evergraph_pool::driver::DevicePtr;
use evergraph_pool::{DeviceSlice, Pool, PoolError, Stream};
use libloading::Library;

/// Environment variable with the path of the library to use instead of the one that the loader finds.
const OVERRIDE: &str = "EVERGRAPH_CUBLAS";
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];

/// Why there is no product.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlasError {
    /// The library is not there.
    #[error(
        "cuBLAS was not found ({tried}): install CUDA's cublas package or PyPI's nvidia-cublas and put its lib folder on \
         LD_LIBRARY_PATH, or name the library in EVERGRAPH_CUBLAS"
    )]
    Missing {
        /// What was looked for.
        tried: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {symbol}: a cuBLAS of 12 or later is needed")]
    TooOld {
        /// The library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The stream's device is no CUDA device.
    #[error("cuBLAS works on CUDA devices, not on {device}")]
    Device {
        /// What it is.
        device: String,
    },
    /// A dimension or stride that does not fit.
    #[error("product: {what} is {found}, must be {expected}")]
    Shape {
        /// Which number.
        what: &'static str,
        /// Its value.
        found: usize,
        /// What was wanted.
        expected: String,
    },
    /// The handle was made for another stream.
    #[error("the handle belongs to stream {expected}, the product is for stream {found}")]
    OtherStream {
        /// The handle's stream.
        expected: u64,
        /// The product's.
        found: u64,
    },
    /// The library refused.
    #[error("{call} failed with {status} ({meaning})")]
    Call {
        /// The function.
        call: &'static str,
        /// Its status.
        status: i32,
        /// What that means.
        meaning: &'static str,
    },
    /// No workspace.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Element types of a product's sides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlasType {
    /// 32-bit float.
    F32,
    /// 16-bit float.
    F16,
    /// bfloat16.
    Bf16,
}

impl BlasType {
    fn number(self) -> c_int {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
        }
    }

    /// Bytes an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// `y[rows, outputs] = x[rows, inputs] * transpose(w[outputs, inputs])`, all row-major, as a layer's weights lie.
/// Products are summed in `f32`, without reduced-precision shortcuts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Product {
    /// Weights.
    pub w: DevicePtr,
    /// Elements from a row of weights to the next.
    pub w_stride: usize,
    /// Input.
    pub x: DevicePtr,
    /// Elements from a row of the input to the next.
    pub x_stride: usize,
    /// Result.
    pub y: DevicePtr,
    /// Elements from a row of the result to the next.
    pub y_stride: usize,
    /// Rows of input and result.
    pub rows: usize,
    /// Rows of the weights.
    pub outputs: usize,
    /// Length of a row of weights and of input.
    pub inputs: usize,
    /// Type of weights and input: the library wants the same for both.
    pub factors: BlasType,
    /// Type of the result: that of the factors, or `F32`.
    pub result: BlasType,
}

impl Product {
    /// A product of dense matrices.
    #[must_use]
    pub fn dense(w: DevicePtr, x: DevicePtr, y: DevicePtr, [rows, outputs, inputs]: [usize; 3], ty: BlasType) -> Self {
        let (w_stride, x_stride, y_stride) = (inputs, inputs, outputs);
        Self { w, w_stride, x, x_stride, y, y_stride, rows, outputs, inputs, factors: ty, result: ty }
    }
}

type Handle = *mut c_void;
const TRANSPOSED: c_int = 1;
const PLAIN: c_int = 0;
const COMPUTE_32F: c_int = 68;
const DEFAULT_ALGORITHM: c_int = -1;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),* $(,)?);)*) => {
        /// The functions that are used, with the library that they are in.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            _library: Library,
        }

        impl Functions {
            fn of(library: Library, name: &str) -> Result<Self, BlasError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is the one of the function's declaration in cublas_api.h, unchanged since 12.0.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol) };
                        let symbol = str::from_utf8($symbol).unwrap_or_default();
                        *found.map_err(|_| BlasError::TooOld { library: name.to_owned(), symbol })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    create = b"cublasCreate_v2": fn(*mut Handle);
    destroy = b"cublasDestroy_v2": fn(Handle);
    version = b"cublasGetVersion_v2": fn(Handle, *mut c_int);
    set_stream = b"cublasSetStream_v2": fn(Handle, *mut c_void);
    set_workspace = b"cublasSetWorkspace_v2": fn(Handle, *mut c_void, usize);
    sgemm = b"cublasSgemm_v2": fn(
        Handle, c_int, c_int, c_int, c_int, c_int, *const f32, *const c_void, c_int, *const c_void, c_int, *const f32,
        *mut c_void, c_int,
    );
    gemm_ex = b"cublasGemmEx": fn(
        Handle, c_int, c_int, c_int, c_int, c_int, *const c_void, *const c_void, c_int, c_int, *const c_void, c_int,
        c_int, *const c_void, *mut c_void, c_int, c_int, c_int, c_int,
    );
}

/// The library, loaded once a process.
fn library() -> Result<&'static Functions, BlasError> {
    static LOADED: OnceLock<Result<Functions, BlasError>> = OnceLock::new();
    let open = || {
        let names = match std::env::var(OVERRIDE) {
            Ok(path) if !path.is_empty() => vec![path],
            _ => NAMES.map(str::to_owned).to_vec(),
        };
        // SAFETY: runs the library's initialisers, which are the vendor's.
        let found = names.iter().find_map(|name| Some((name, unsafe { Library::new(name) }.ok()?)));
        let Some((name, library)) = found else { return Err(BlasError::Missing { tried: names.join(", ") }) };
        Functions::of(library, name)
    };
    LOADED.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// A handle of cuBLAS for one stream.
///
/// # Reuse and capture
/// Make it before a capture. Its workspace is part of every graph that captures a product: declare
/// [`workspace`](Self::workspace) as [`Use::Scratch`](evergraph_pool::Use::Scratch), and keep the handle, since the
/// library's kernels go with it. Calls of several threads take turns.
pub struct Blas {
    functions: &'static Functions,
    handle: Mutex<Raw>,
    stream: Stream,
    version: u32,
    /// Dropped after the handle.
    workspace: DeviceSlice<u8>,
}

/// The handle's address.
struct Raw(Handle);

// SAFETY: a handle may be used by any thread, by one at a time, which the lock around it sees to.
unsafe impl Send for Raw {}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blas").field("version", &self.version).field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Blas {
    /// Whether the library can be loaded.
    #[must_use]
    pub fn is_present() -> bool {
        library().is_ok()
    }

    /// Whether the library is there.
    #[must_use]
    pub fn is_there() -> bool {
        library().is_ok()
    }

    /// What NVIDIA recommends: 32 MiB from Hopper on, 4 MiB before.
    #[must_use]
    pub fn workspace_bytes(compute_capability: (u32, u32)) -> usize {
        if compute_capability.0 >= 9 { 32 << 20 } else { 4 << 20 }
    }

    /// A handle for `stream` with a workspace from `pool`. Creates library state on the device: not inside a capture.
    ///
    /// # Errors
    /// [`BlasError`]: no library, no CUDA device, no memory, or the library's own.
    pub fn new(pool: &Pool, stream: &Stream) -> Result<Arc<Self>, BlasError> {
        let info = stream.driver().info();
        if info.backend != "cuda" {
            return Err(BlasError::Device { device: info.name.clone() });
        }
        let functions = library()?;
        stream.driver().bind().map_err(PoolError::from)?;
        let workspace = pool.alloc::<u8>(Self::workspace_bytes(info.compute_capability), stream)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is live, and the stream's context is current.
        status("cublasCreate", unsafe { (functions.create)(&raw mut handle) })?;
        // Owned from here on: whatever fails below destroys it.
        let mut blas =
            Self { functions, handle: Mutex::new(Raw(handle)), stream: stream.clone(), version: 0, workspace };
        let mut version = 0;
        // SAFETY: a live handle and place.
        status("cublasGetVersion", unsafe { (functions.version)(handle, &raw mut version) })?;
        blas.version = version.unsigned_abs();
        // The stream first: setting it resets the workspace.
        let raw = std::ptr::with_exposed_provenance_mut(stream.handle().0 as usize);
        // SAFETY: a live handle and a live stream of the current context, which `blas` keeps.
        status("cublasSetStream", unsafe { (functions.set_stream)(handle, raw) })?;
        let (at, bytes) = (address(blas.workspace.ptr()), blas.workspace.bytes());
        // SAFETY: memory of this device that lives as long as the handle; the pool aligns it to at least 256 bytes.
        status("cublasSetWorkspace", unsafe { (functions.set_workspace)(handle, at, bytes) })?;
        Ok(Arc::new(blas))
    }

    /// The library's version, as it says it (130200 for 13.2).
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The stream of its products.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What every product writes to: declare it as scratch.
    pub fn workspace(&self) -> &DeviceSlice<u8> {
        &self.workspace
    }

    /// Queues a product on `stream`, which is the handle's own.
    ///
    /// # Safety
    /// The three matrices are memory of the stream's device, as large as said, and nothing else writes to them
    /// meanwhile; `y` overlaps neither of the others.
    ///
    /// # Errors
    /// `OtherStream`, `Shape`, `Call`.
    pub unsafe fn product(&self, product: &Product, stream: &Stream) -> Result<(), BlasError> {
        if *stream != self.stream {
            return Err(BlasError::OtherStream { expected: self.stream.id(), found: stream.id() });
        }
        let p = product;
        let at_least = |what, found: usize, least: usize| {
            let expected = format!("at least {least}");
            if found >= least { Ok(()) } else { Err(BlasError::Shape { what, found, expected }) }
        };
        at_least("the stride of the weights", p.w_stride, p.inputs)?;
        at_least("the stride of the input", p.x_stride, p.inputs)?;
        at_least("the stride of the result", p.y_stride, p.outputs)?;
        if p.rows == 0 || p.outputs == 0 {
            return Ok(());
        }
        let number = |what, found: usize| {
            let expected = || BlasError::Shape { what, found, expected: format!("at most {}", c_int::MAX) };
            c_int::try_from(found).map_err(|_| expected())
        };
        let (m, n, k) = (number("outputs", p.outputs)?, number("rows", p.rows)?, number("inputs", p.inputs)?);
        let (lda, ldb) =
            (number("the stride of the weights", p.w_stride)?, number("the stride of the input", p.x_stride)?);
        let ldc = number("the stride of the result", p.y_stride)?;
        let (one, zero) = (1.0f32, 0.0f32);
        let (w, x, y) = (address(p.w), address(p.x), address(p.y));
        stream.driver().bind().map_err(PoolError::from)?;
        let handle = self.lock();
        // Column by column a row-major matrix is its transpose: y^T = w * x^T, with w stored transposed.
        if (p.factors, p.result) == (BlasType::F32, BlasType::F32) {
            // SAFETY: a live handle; scalars are read during the call; the caller vouches for the matrices.
            let done = unsafe {
                (self.functions.sgemm)(
                    handle.0,
                    TRANSPOSED,
                    PLAIN,
                    m,
                    n,
                    k,
                    &raw const one,
                    w,
                    lda,
                    x,
                    ldb,
                    &raw const zero,
                    y,
                    ldc,
                )
            };
            return status("cublasSgemm", done);
        }
        let (alpha, beta) = ((&raw const one).cast(), (&raw const zero).cast());
        let (factors, result) = (p.factors.number(), p.result.number());
        // SAFETY: as above.
        let done = unsafe {
            (self.functions.gemm_ex)(
                handle.0,
                TRANSPOSED,
                PLAIN,
                m,
                n,
                k,
                alpha,
                w,
                factors,
                lda,
                x,
                factors,
                ldb,
                beta,
                y,
                result,
                ldc,
                COMPUTE_32F,
                DEFAULT_ALGORITHM,
            )
        };
        status("cublasGemmEx", done)
    }

    fn lock(&self) -> MutexGuard<'_, Raw> {
        // A panic between two calls leaves the handle as it was.
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // Work in flight first: the workspace goes back to the pool in stream order, library state does not.
        let _ = self.stream.settle();
        let handle = self.lock().0;
        // SAFETY: made by `create`, destroyed once. There is nobody to tell of a failure.
        unsafe { (self.functions.destroy)(handle) };
    }
}

fn address(ptr: DevicePtr) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(ptr.0 as usize)
}

fn status(call: &'static str, status: c_int) -> Result<(), BlasError> {
    let meaning = match status {
        0 => return Ok(()),
        1 => "the library is not initialised",
        3 => "out of memory",
        7 => "a value that it does not take",
        8 => "not on this device",
        11 => "memory can not be reached",
        13 => "the launch failed",
        14 => "an internal error",
        15 => "not supported",
        _ => "unknown",
    };
    Err(BlasError::Call { call, status, meaning })
}

#[cfg(test)]
mod tests {
    use evergraph_pool::PoolConfig;
    use evergraph_pool::driver::host::HostConfig;
    use evergraph_pool::driver::{DeviceChoice, open};

    use super::*;

    #[test]
    fn the_host_device_has_no_cublas() -> Result<(), Box<dyn std::error::Error>> {
        let driver = open(DeviceChoice::Host, HostConfig::default())?;
        let pool = Pool::new(driver.clone(), PoolConfig::vmm())?;
        let stream = Stream::new(&driver)?;
        assert!(matches!(Blas::new(&pool, &stream), Err(BlasError::Device { .. })));
        Ok(())
    }

    #[test]
    fn a_missing_library_is_named() {
        match library() {
            Ok(_) => println!("skipped: cuBLAS is there"),
            Err(error) => assert!(error.to_string().contains("libcublas"), "{error}"),
        }
    }
}
