//! Loaded code that outlives the graphs which use it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evergraph_pool::driver::{CaptureMode, DynDriver, FunctionHandle, ModuleHandle, ModuleImage};
use parking_lot::Mutex;

use crate::graph::insist;
use crate::seal::{note_not_loaded, sealed};
use crate::{CacheError, CaptureModeGuard};

/// A module. It is unloaded with its last owner; a graph that [keeps](crate::Scope::keep) it is one.
///
/// # Reuse and capture
/// Captured kernel nodes hold function handles, and nothing in the driver keeps the module behind them: keep it in
/// the scope. Inside a capture nothing is loaded: a function that was not looked up before is
/// [`CacheError::NotLoaded`], raised before any driver call.
pub struct Module {
    driver: DynDriver,
    handle: ModuleHandle,
    generation: u64,
    functions: Mutex<HashMap<String, FunctionHandle>>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module").field("handle", &self.handle).field("generation", &self.generation).finish()
    }
}

impl Module {
    /// Loads code.
    ///
    /// # Errors
    /// `NotLoaded` inside a capture; those of the driver.
    pub fn load(driver: &DynDriver, image: ModuleImage<'_>) -> Result<Arc<Self>, CacheError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if sealed() && !evergraph_pool::mutant::is("cache.load-in-window") {
            return Err(not_loaded("a module"));
        }
        driver.bind()?;
        let handle = driver.module_load(image)?;
        let generation = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Self { driver: Arc::clone(driver), handle, generation, functions: Mutex::default() }))
    }

    /// A function by name. The first look-up of a name asks the driver.
    ///
    /// # Errors
    /// `NotLoaded` for a first look-up inside a capture; those of the driver.
    pub fn function(&self, name: &str) -> Result<FunctionHandle, CacheError> {
        if let Some(function) = self.functions.lock().get(name) {
            return Ok(*function);
        }
        if sealed() && !evergraph_pool::mutant::is("cache.load-in-window") {
            return Err(not_loaded(name));
        }
        self.driver.bind()?;
        let function = self.driver.function(self.handle, name)?;
        self.functions.lock().insert(name.to_owned(), function);
        Ok(function)
    }

    /// Process-unique and never reused, unlike the handle. Part of a graph's key through
    /// [`Request::modules`](crate::Request::modules).
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The driver's handle.
    #[must_use]
    pub fn handle(&self) -> ModuleHandle {
        self.handle
    }
}

fn not_loaded(name: &str) -> CacheError {
    note_not_loaded(name);
    CacheError::NotLoaded { name: name.to_owned() }
}

impl Drop for Module {
    fn drop(&mut self) {
        // Silent: drops have nobody to tell. Relaxed, because another thread may be capturing.
        if insist(|| self.driver.bind()) {
            let _mode = CaptureModeGuard::new(&self.driver, CaptureMode::Relaxed);
            insist(|| self.driver.module_unload(self.handle));
        }
    }
}
