//! Bodies for the host device.

pub mod simd;

use evergraph_pool::driver::host::HostKernel;

use crate::KernelError;

/// The module that [`Kernels::load`](crate::Kernels::load) loads on the host device.
pub(crate) static KERNELS: &[HostKernel] = &[];

/// Sets the number of worker threads that kernels use; 0 means one per core. Once per process: later calls with
/// the same effective number are fine.
///
/// # Errors
/// [`KernelError::Threads`] if the pool already runs with another number.
pub fn threads(n: usize) -> Result<usize, KernelError> {
    // The pool starts with the first use; asking for its size would start it too.
    match rayon::ThreadPoolBuilder::new().num_threads(n).build_global() {
        Ok(()) => Ok(rayon::current_num_threads()),
        Err(_) if n == 0 || rayon::current_num_threads() == n => Ok(rayon::current_num_threads()),
        Err(e) => Err(KernelError::Threads(format!(
            "{n} threads asked for, {} are running: {e}",
            rayon::current_num_threads()
        ))),
    }
}
