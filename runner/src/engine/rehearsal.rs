//! Steps that are put together and not run: what a model, its sequence and its steps take is known before the device is
//! touched.
//!
//! A rehearsal is a runtime of its own, on a host device that stands in for the one that is meant: its addresses are as good as
//! any, and nobody ever writes to its memory, so that it has none. Pool, graph cache, models and sequences are the very same
//! code; only uploads of weights and launches of ops are left out. What its pool holds at most is what the other one will.

use std::collections::HashMap;
use std::sync::OnceLock;

use evergraph_kernels::cuda::Blas;
use evergraph_pool::driver::DeviceInfo;
use evergraph_pool::driver::host::{HostConfig, HostDevice, Poison};
use evergraph_pool::{DeviceSlice, Stream, Tracked, Use};
use parking_lot::Mutex;

use super::runtime::{Runtime, RuntimeConfig, Unit};
use crate::error::Result;

/// Least memory of a device that stands in: more than any asks for. It takes address space only.
const LEAST_BYTES: usize = 1 << 40;

/// What a runtime knows of the one that it stands in for.
#[derive(Debug)]
pub(super) struct Rehearsal {
    device: DeviceInfo,
    in_place: bool,
    free_bytes: usize,
    /// What a library for products would work in.
    products: OnceLock<DeviceSlice<u8>>,
    /// Scratch of the largest step of a kind, bytes.
    scratch: Mutex<HashMap<&'static str, usize>>,
}

impl Rehearsal {
    /// Notes the scratch of a step, and queues next to nothing in its place: a graph must do something. `uses` is what the step
    /// declares.
    pub(super) fn stand_in(
        &self,
        what: &'static str,
        scratch_bytes: usize,
        uses: &[(&dyn Tracked, Use)],
        stream: &Stream,
    ) -> Result<()> {
        let mut scratch = self.scratch.lock();
        let most = scratch.entry(what).or_default();
        *most = scratch_bytes.max(*most);
        match uses.iter().find(|(state, use_)| *use_ == Use::State && state.bytes() > 0) {
            Some((state, _)) => Ok(stream.driver().memset_d8(state.ptr(), 0, 1, stream.handle())?),
            None => Ok(()),
        }
    }
}

impl Runtime {
    /// A runtime that stands in for this one, whatever there is room for: its pool has no limit.
    ///
    /// # Errors
    /// Those of a host device.
    pub fn rehearsal(&self) -> Result<Self> {
        let driver = self.pool().driver();
        driver.bind()?;
        let device = driver.info().clone();
        let memory = LEAST_BYTES.max(device.total_bytes);
        let mut host = HostConfig::default().memory(memory).poison(Poison::Off).vmm(device.vmm);
        if device.vmm {
            host = host.granularity(driver.granularity_bytes()?);
        }
        let mut config = RuntimeConfig { host_work: Some(self.host_work()), ..self.config().clone() };
        config.pool.limit_bytes = None;
        // As the pool that is meant does: what it keeps of a range goes by the range.
        config.pool.reserve_bytes.get_or_insert(device.total_bytes.saturating_mul(2));
        let mut stand_in = Self::new(HostDevice::new(host)?, config)?;
        stand_in.rehearsal = Some(Rehearsal {
            in_place: self.reads_in_place(),
            free_bytes: self.free_bytes()?,
            device,
            products: OnceLock::new(),
            scratch: Mutex::default(),
        });
        Ok(stand_in)
    }

    /// Whether this only stands in for another.
    #[must_use]
    pub fn is_rehearsal(&self) -> bool {
        self.rehearsal.is_some()
    }

    /// The device that steps are meant for.
    #[must_use]
    pub fn target(&self) -> &DeviceInfo {
        self.rehearsal.as_ref().map_or_else(|| self.pool().driver().info(), |rehearsal| &rehearsal.device)
    }

    /// Whether weights are read where their files are, rather than copied to the device.
    #[must_use]
    pub fn reads_in_place(&self) -> bool {
        match &self.rehearsal {
            Some(rehearsal) => rehearsal.in_place,
            None => self.pool().driver().as_host().is_some() && !self.config().copy_weights,
        }
    }

    /// Memory that the pool may yet take, by its limit and by what is free on the device, bytes.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn free_bytes(&self) -> Result<usize> {
        let (pool, taken) = (self.pool(), self.pool().stats().reserved_bytes.current as usize);
        if let Some(rehearsal) = &self.rehearsal {
            return Ok(rehearsal.free_bytes.saturating_sub(taken));
        }
        pool.driver().bind()?;
        let free = pool.driver().mem_info()?.free_bytes;
        Ok(free.min(pool.limit().map_or(usize::MAX, |limit| limit.saturating_sub(taken))))
    }

    /// The free memory of each device, as shares of a model.
    ///
    /// # Errors
    /// Those of the drivers.
    pub fn free_shares(&self) -> Result<Vec<f64>> {
        let free = |unit: &Unit| {
            let pool = unit.pool();
            let taken = pool.stats().reserved_bytes.current as usize;
            pool.driver().bind()?;
            let free = pool.driver().mem_info()?.free_bytes;
            Ok(free.min(pool.limit().map_or(usize::MAX, |limit| limit.saturating_sub(taken))) as f64)
        };
        self.units().iter().map(free).collect()
    }

    /// In a rehearsal: scratch of the largest step of a kind so far, bytes.
    #[must_use]
    pub fn scratch_of(&self, what: &str) -> Option<usize> {
        self.rehearsal.as_ref()?.scratch.lock().get(what).copied()
    }

    /// In a rehearsal: takes what a library for products would, where there is one.
    pub(super) fn rehearse_products(&self) -> Result<()> {
        let Some(rehearsal) = &self.rehearsal else { return Ok(()) };
        if rehearsal.device.backend == "cuda" && rehearsal.products.get().is_none() && Blas::is_there() {
            let bytes = Blas::workspace_bytes(rehearsal.device.compute_capability);
            let _ = rehearsal.products.set(self.pool().alloc(bytes, self.stream())?);
        }
        Ok(())
    }
}
