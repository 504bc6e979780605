//! Memory of the pool that other devices may touch.
//!
//! A grant is for a purpose, not for an allocation: access is a matter of pages, and pages hold many allocations. In the vmm
//! mode it is said of every page that is mapped, and of every page that ever will be (`growth.rs`, the one place where pages
//! come from), because pages come without access: a grant that was only given once would end with the first growth, remap,
//! stitch or wake. In slab mode the other device gets access to all plain memory of this one.

use smallvec::SmallVec;

use crate::core::runs;
use crate::driver::{DeviceOrdinal, DevicePtr, DriverErrorKind, DynDriver};
use crate::shared::Shared;
use crate::sleep::heaps;
use crate::state::Backing;
use crate::{PoolError, PoolMode, mutant};

/// Devices that may touch memory of a purpose, this one not among them.
pub(crate) type Grantees = SmallVec<[DeviceOrdinal; 2]>;

/// The driver's number for peer access that is on already.
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;

impl Shared {
    pub(crate) fn grant(&self, peer: &DynDriver, purposes: &[crate::Purpose]) -> Result<(), PoolError> {
        self.may_call_driver("granting access to another device")?;
        let device = peer.info().ordinal;
        if device == self.device {
            return Ok(());
        }
        peer.bind()?;
        if !peer.can_access_peer(self.device)? {
            return Err(PoolError::Unreachable { owner: self.device, device });
        }
        // Pages neither come nor go meanwhile.
        let _cold = self.cold();
        match self.config.mode {
            PoolMode::Slab => match peer.enable_peer_access(self.device) {
                Err(error)
                    if !matches!(error.kind, DriverErrorKind::Other { code: PEER_ACCESS_ALREADY_ENABLED, .. }) =>
                {
                    return Err(error.into());
                }
                _ => {}
            },
            PoolMode::Vmm => {
                self.driver.bind()?;
                for heap in heaps(purposes) {
                    if self.lock().granted[heap].contains(&device) {
                        continue;
                    }
                    for (ptr, bytes) in self.mapped(heap) {
                        if !mutant::is("grant-skips-mapped-pages") {
                            self.driver.set_access(ptr, bytes, &[device])?;
                        }
                    }
                }
            }
        }
        // Plain memory is granted as a whole.
        let purposes = if self.config.mode == PoolMode::Slab { &[] } else { purposes };
        let mut state = self.lock();
        for heap in heaps(purposes) {
            if !state.granted[heap].contains(&device) {
                state.granted[heap].push(device);
            }
        }
        Ok(())
    }

    /// Whom new pages of a heap are for.
    pub(crate) fn access(&self, heap: usize) -> Grantees {
        let mut devices = Grantees::from_slice(&[self.device]);
        if !mutant::is("grant-forgets-new-pages") {
            devices.extend(self.lock().granted[heap].iter().copied());
        }
        devices
    }

    pub(crate) fn is_granted(&self, device: DeviceOrdinal, heap: usize) -> bool {
        device == self.device || self.lock().granted[heap].contains(&device)
    }

    /// What is mapped of a heap, in stretches.
    fn mapped(&self, heap: usize) -> Vec<(DevicePtr, usize)> {
        let state = self.lock();
        let mut stretches = Vec::new();
        for backing in state.backing[heap].iter().flatten() {
            let Backing::Range { ptr, chunks, .. } = backing else { continue };
            let there = chunks.iter().enumerate().filter(|(_, chunk)| chunk.is_some()).map(|(index, _)| index as u32);
            for run in runs(there) {
                let bytes = run.len() * self.chunk_bytes as usize;
                stretches.push((DevicePtr(ptr.0 + u64::from(run.start) * self.chunk_bytes), bytes));
            }
        }
        stretches
    }
}
