//! The memory calls: entry rules, then the map.
#![allow(unsafe_code)]

use super::HostDevice;
use crate::driver::{
    DeviceOrdinal, DevicePtr, DriverErrorKind as Kind, DriverResult, HostPtr, MemInfo, Memory, PhysHandle,
};

impl HostDevice {
    fn named<T>(&self, call: &'static str, result: Result<T, Kind>) -> DriverResult<T> {
        result.map_err(|kind| self.err(call, kind))
    }

    fn peer(&self, call: &'static str, peer: DeviceOrdinal) -> DriverResult<u32> {
        if (peer.0 as usize) < self.machine.devices() {
            Ok(peer.0)
        } else {
            Err(self.err(call, Kind::InvalidValue("no such device")))
        }
    }
}

impl Memory for HostDevice {
    fn granularity_bytes(&self) -> DriverResult<usize> {
        const CALL: &str = "granularity_bytes";
        self.enter(CALL)?;
        self.named(CALL, self.machine.space.read().granularity())
    }

    fn address_reserve(&self, bytes: usize, align: usize, hint: Option<DevicePtr>) -> DriverResult<DevicePtr> {
        const CALL: &str = "address_reserve";
        self.enter_strictly_unsafe(CALL)?;
        let reserved = self.machine.space.write().reserve(self.ordinal(), bytes, align, hint.map(|h| h.0));
        self.named(CALL, reserved.map(DevicePtr))
    }

    fn address_free(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        const CALL: &str = "address_free";
        self.enter_strictly_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().unreserve(ptr.0, bytes))
    }

    fn create(&self, bytes: usize) -> DriverResult<PhysHandle> {
        const CALL: &str = "create";
        self.enter_strictly_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().create(self.ordinal(), bytes).map(PhysHandle))
    }

    fn map(&self, ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> DriverResult<()> {
        const CALL: &str = "map";
        self.enter_strictly_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().map(ptr.0, bytes, offset_bytes, handle.0))
    }

    fn set_access(&self, ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> DriverResult<()> {
        const CALL: &str = "set_access";
        self.enter_strictly_unsafe(CALL)?;
        if devices.is_empty() {
            return Err(self.err(CALL, Kind::InvalidValue("no devices")));
        }
        let mut mask = 0u64;
        for &device in devices {
            mask |= 1 << self.peer(CALL, device)?;
        }
        self.named(CALL, self.machine.space.write().set_access(ptr.0, bytes, mask))
    }

    fn unmap(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        const CALL: &str = "unmap";
        self.enter_strictly_unsafe(CALL)?;
        let in_use = || self.machine.pulled_from_under(ptr.0, bytes, CALL);
        self.named(CALL, self.machine.space.write().unmap(ptr.0, bytes, in_use))
    }

    fn release(&self, handle: PhysHandle) -> DriverResult<()> {
        const CALL: &str = "release";
        self.enter_strictly_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().release(handle.0))
    }

    fn malloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        const CALL: &str = "malloc";
        self.enter_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().malloc(self.ordinal(), bytes).map(DevicePtr))
    }

    fn free(&self, ptr: DevicePtr) -> DriverResult<()> {
        const CALL: &str = "free";
        self.enter_unsafe(CALL)?;
        let mut space = self.machine.space.write();
        let bytes = self.named(CALL, space.free(self.ordinal(), ptr.0))?;
        self.machine.pulled_from_under(ptr.0, bytes, CALL);
        Ok(())
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        self.enter("mem_info")?;
        let total_bytes = self.machine.config.memory_bytes;
        let used_bytes = self.machine.space.read().used_bytes(self.ordinal());
        Ok(MemInfo { free_bytes: total_bytes - used_bytes, total_bytes })
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<HostPtr> {
        const CALL: &str = "host_alloc";
        self.enter_unsafe(CALL)?;
        self.named(CALL, self.machine.space.write().host_alloc(self.ordinal(), bytes))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> DriverResult<()> {
        const CALL: &str = "host_free";
        self.enter_unsafe(CALL)?;
        let in_use = |bytes| self.machine.pulled_from_under(ptr.0, bytes, CALL);
        self.named(CALL, self.machine.space.write().host_free(ptr.0, in_use))
    }

    unsafe fn host_register(&self, ptr: *const u8, bytes: usize) -> DriverResult<DevicePtr> {
        const CALL: &str = "host_register";
        self.enter_unsafe(CALL)?;
        let address = ptr.addr() as u64;
        self.named(CALL, self.machine.space.write().register(self.ordinal(), address, bytes))?;
        Ok(DevicePtr(address))
    }

    fn host_unregister(&self, ptr: *const u8) -> DriverResult<()> {
        const CALL: &str = "host_unregister";
        self.enter_unsafe(CALL)?;
        let address = ptr.addr() as u64;
        let bytes = self.named(CALL, self.machine.space.write().unregister(address))?;
        self.machine.pulled_from_under(address, bytes, CALL);
        Ok(())
    }

    fn can_access_peer(&self, peer: DeviceOrdinal) -> DriverResult<bool> {
        const CALL: &str = "can_access_peer";
        self.enter(CALL)?;
        Ok(self.peer(CALL, peer)? != self.ordinal() && self.machine.config.peers)
    }

    fn enable_peer_access(&self, peer: DeviceOrdinal) -> DriverResult<()> {
        const CALL: &str = "enable_peer_access";
        self.enter_unsafe(CALL)?;
        let peer = self.peer(CALL, peer)?;
        if peer == self.ordinal() || !self.machine.config.peers {
            return Err(self.err(CALL, Kind::PeerAccess));
        }
        if !self.machine.space.write().enable_peer(self.ordinal(), peer) {
            let name = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED".to_owned();
            return Err(self.err(CALL, Kind::Other { code: 704, name }));
        }
        Ok(())
    }
}
