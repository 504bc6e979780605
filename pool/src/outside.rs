//! Memory outside the heaps: foreign ranges, page-locked and registered host memory.

use std::sync::Arc;

use crate::driver::host_memory::{HostMemory, Pinned, Registered};
use crate::driver::{DevicePtr, DriverResult, StreamHandle};
use crate::handshake::{Begun, begin};
use crate::retire::Victim;
use crate::shared::{Notices, Shared};
use crate::state::{Outside, Record, Site, Standing};
use crate::{BadReason, PoolError, RetireReason, Stream, Token};

impl Shared {
    pub(crate) fn add_foreign(&self, ptr: DevicePtr, bytes: usize, name: String) -> Result<usize, PoolError> {
        self.add_outside(ptr, bytes as u64, Outside::Foreign { name })
    }

    pub(crate) fn add_pinned(&self, bytes: usize) -> Result<usize, PoolError> {
        if bytes == 0 {
            return self.add_outside(DevicePtr::NULL, 0, Outside::Nothing);
        }
        self.may_call_driver("a host allocation")?;
        let pinned = Arc::new(Pinned::new(&self.driver, bytes)?);
        self.add_outside(pinned.ptr(), bytes as u64, Outside::Pinned(pinned))
    }

    pub(crate) fn add_registered(&self, memory: Arc<dyn HostMemory>) -> Result<usize, PoolError> {
        let bytes = memory.bytes().len();
        if bytes == 0 {
            return self.add_outside(DevicePtr::NULL, 0, Outside::Nothing);
        }
        self.may_call_driver("a registration of host memory")?;
        let registered = Registered::new(&self.driver, memory)?;
        self.add_outside(registered.device(), bytes as u64, Outside::Registered(registered))
    }

    fn add_outside(&self, ptr: DevicePtr, bytes: u64, outside: Outside) -> Result<usize, PoolError> {
        if ptr.0.checked_add(bytes).is_none() {
            return Err(PoolError::Range {
                offset_bytes: ptr.0 as usize,
                bytes: bytes as usize,
                allocation_bytes: usize::MAX,
            });
        }
        let mut state = self.lock();
        let state = &mut *state;
        if matches!(outside, Outside::Foreign { .. }) {
            state.overlap(ptr, bytes, None)?;
        }
        let allocation = state.next_allocation().ok_or(PoolError::Internal("no identity left for a range"))?;
        let index = state.records.insert(Record::new(allocation, ptr.0, bytes, Site::Outside(outside), Standing::Live));
        if bytes > 0 {
            state.outside.insert((ptr.0, index));
        }
        Ok(index)
    }

    pub(crate) fn outside_token(&self, index: usize) -> Token {
        let state = self.lock();
        let place = crate::token::Place::outside(index);
        // A range outlives its record nowhere; the fallback is a token that is good for nothing.
        state.records.get(index).map_or_else(
            || Token {
                allocation: crate::AllocationId::new(self.id, 1),
                address: 0,
                backing: 0,
                content: 0,
                place: crate::token::Place::NOWHERE,
            },
            |r| r.token(place),
        )
    }

    pub(crate) fn outside_span(&self, index: usize) -> (DevicePtr, usize) {
        let state = self.lock();
        state.records.get(index).map_or((DevicePtr::NULL, 0), |r| (DevicePtr(r.ptr), r.bytes as usize))
    }

    pub(crate) fn move_outside(&self, index: usize, ptr: DevicePtr, bytes: usize) -> Result<(), PoolError> {
        if ptr.0.checked_add(bytes as u64).is_none() {
            return Err(PoolError::Range { offset_bytes: ptr.0 as usize, bytes, allocation_bytes: usize::MAX });
        }
        self.lock().overlap(ptr, bytes as u64, Some(index))?;
        self.withdraw(index, false, |state| {
            if let Some(record) = state.records.get_mut(index) {
                let old = std::mem::replace(&mut record.ptr, ptr.0);
                record.bytes = bytes as u64;
                state.outside.remove(&(old, index));
                if bytes > 0 {
                    state.outside.insert((ptr.0, index));
                }
            }
        })
    }

    pub(crate) fn withdraw_outside(&self, index: usize) {
        // Silent: if the device can not be waited for, it is dead and uses nothing.
        let _ = self.withdraw(index, true, |state| {
            let Some(record) = state.records.get_mut(index) else { return };
            record.standing = Standing::Gone(BadReason::Withdrawn);
            let ptr = record.ptr;
            let alone = record.holders.is_empty();
            state.outside.remove(&(ptr, index));
            if alone {
                state.records.remove(index);
            }
        });
    }

    /// Retires an outside range: no graph can be launched on it any more, and the host has seen all launches
    /// complete. With `force` a failed wait does not stop it.
    fn withdraw(
        &self,
        index: usize,
        force: bool,
        change: impl FnOnce(&mut crate::state::State),
    ) -> Result<(), PoolError> {
        let victim = Victim::record(index);
        let mut notices = Notices::default();
        let (cleared, uses) = {
            let mut state = self.lock();
            let cleared = match begin(&mut *state, &victim) {
                Begun::Taken => return Err(PoolError::Internal("a range is withdrawn twice")),
                Begun::Cleared(cleared) => cleared,
                Begun::Held(held) => {
                    drop(state);
                    let cleared = held.wait();
                    state = self.lock();
                    cleared
                }
            };
            let uses = state.order_after(&victim, &cleared);
            (cleared, uses)
        };
        let waited = self.host_wait(&uses);
        {
            let mut state = self.lock();
            let state = &mut *state;
            if waited.is_err() && !force {
                cleared.abandon(state, &victim);
                return waited;
            }
            cleared.commit(state, &victim, |state| {
                state.change(index, RetireReason::Withdrawn, &mut notices);
                change(state);
            });
        }
        notices.deliver();
        Ok(())
    }

    // ---- host memory

    /// The owner of host memory is gone. Graphs keep it; without any it is freed.
    pub(crate) fn drop_host(&self, index: usize) {
        {
            let mut state = self.lock();
            let state = &mut *state;
            let Some(record) = state.records.get_mut(index) else { return };
            record.standing = Standing::Held;
            let (ptr, alone) = (record.ptr, record.holders.is_empty());
            if alone {
                state.outside.remove(&(ptr, index));
                state.drop_record(index);
            }
        }
        self.end_host_memory();
    }

    /// Waits on the host for everything that may touch an outside range.
    pub(crate) fn wait_outside(&self, index: usize) -> Result<(), PoolError> {
        let uses = self.lock().uses_of(index);
        self.host_wait(&uses)
    }

    pub(crate) fn with_pinned<R>(&self, index: usize, f: impl FnOnce(&Pinned) -> R) -> Option<R> {
        self.pinned(index).map(|pinned| f(&pinned))
    }

    pub(crate) fn pinned(&self, index: usize) -> Option<Arc<Pinned>> {
        match self.lock().records.get(index).map(|r| &r.site) {
            Some(Site::Outside(Outside::Pinned(pinned))) => Some(Arc::clone(pinned)),
            _ => None,
        }
    }

    /// Queues work that uses a host buffer on a stream of any device.
    pub(crate) fn copy_host(
        &self,
        index: usize,
        stream: &Stream,
        copy: impl FnOnce(&Pinned, StreamHandle) -> DriverResult<()>,
    ) -> Result<(), PoolError> {
        {
            let mut state = self.lock();
            let state = &mut *state;
            let key = self.stream_key(state, stream);
            if let Some(record) = state.records.get_mut(index) {
                record.uses.insert(key);
            }
        }
        match self.with_pinned(index, |pinned| copy(pinned, stream.handle())) {
            Some(done) => Ok(done?),
            None => Ok(()),
        }
    }
}

impl crate::state::State {
    /// Whether somebody else already is where a foreign range would be.
    fn overlap(&self, ptr: DevicePtr, bytes: u64, but: Option<usize>) -> Result<(), PoolError> {
        let end = ptr.0 + bytes;
        let taken = |name: String| PoolError::Overlap { ptr, bytes: bytes as usize, name };
        if bytes == 0 {
            return Ok(());
        }
        for heap in &self.heaps {
            if heap.segments().any(|s| s.base < end && ptr.0 < s.base + s.bytes) {
                return Err(taken("memory of the pool".to_owned()));
            }
        }
        for &(_, index) in &self.outside {
            let Some(record) = self.records.get(index).filter(|_| Some(index) != but) else { continue };
            if record.ptr < end && ptr.0 < record.ptr + record.bytes {
                let name = match &record.site {
                    Site::Outside(Outside::Foreign { name }) => name.clone(),
                    _ => "host memory".to_owned(),
                };
                return Err(taken(name));
            }
        }
        Ok(())
    }
}
