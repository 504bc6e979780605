//! Memory calls.

use cudarc::driver::sys;

use super::{CudaDevice, cuda};
use crate::driver::{
    DeviceOrdinal, DevicePtr, DriverErrorKind as Kind, DriverResult, HostPtr, MemInfo, Memory, PhysHandle,
};

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
const HOST_ALLOC_PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY`.
const REGISTER_MAPPED_READ_ONLY: u32 = 2 | 8;

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    // SAFETY: plain data of the driver's; all zero is its "invalid" location, then filled.
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    location
}

impl CudaDevice {
    fn properties(&self) -> sys::CUmemAllocationProp {
        // SAFETY: plain data of the driver's; all zero is "no special wishes", then filled.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(self.device);
        properties
    }
}

impl Memory for CudaDevice {
    fn granularity_bytes(&self) -> DriverResult<usize> {
        let mut bytes = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let properties = self.properties();
        cuda!(
            self,
            "granularity_bytes",
            cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, minimum)
        )?;
        Ok(bytes)
    }

    fn address_reserve(&self, bytes: usize, align: usize, hint: Option<DevicePtr>) -> DriverResult<DevicePtr> {
        let mut ptr = 0;
        let hint = hint.map_or(0, |hint| hint.0);
        cuda!(self, "address_reserve", cuMemAddressReserve(&raw mut ptr, bytes, align, hint, 0))?;
        Ok(DevicePtr(ptr))
    }

    fn address_free(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        cuda!(self, "address_free", cuMemAddressFree(ptr.0, bytes))
    }

    fn create(&self, bytes: usize) -> DriverResult<PhysHandle> {
        let mut handle = 0;
        let properties = self.properties();
        cuda!(self, "create", cuMemCreate(&raw mut handle, bytes, &raw const properties, 0))?;
        Ok(PhysHandle(handle))
    }

    fn map(&self, ptr: DevicePtr, bytes: usize, offset_bytes: usize, handle: PhysHandle) -> DriverResult<()> {
        cuda!(self, "map", cuMemMap(ptr.0, bytes, offset_bytes, handle.0, 0))
    }

    fn set_access(&self, ptr: DevicePtr, bytes: usize, devices: &[DeviceOrdinal]) -> DriverResult<()> {
        let access: Vec<sys::CUmemAccessDesc> = devices
            .iter()
            .map(|device| sys::CUmemAccessDesc {
                location: location(device.0 as i32),
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        cuda!(self, "set_access", cuMemSetAccess(ptr.0, bytes, access.as_ptr(), access.len()))
    }

    fn unmap(&self, ptr: DevicePtr, bytes: usize) -> DriverResult<()> {
        cuda!(self, "unmap", cuMemUnmap(ptr.0, bytes))
    }

    fn release(&self, handle: PhysHandle) -> DriverResult<()> {
        cuda!(self, "release", cuMemRelease(handle.0))
    }

    fn malloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        let mut ptr = 0;
        cuda!(self, "malloc", cuMemAlloc_v2(&raw mut ptr, bytes))?;
        Ok(DevicePtr(ptr))
    }

    fn free(&self, ptr: DevicePtr) -> DriverResult<()> {
        // The driver takes null for "nothing to free"; nobody was given null.
        if ptr == DevicePtr::NULL {
            return Err(self.err("free", Kind::InvalidValue("null")));
        }
        cuda!(self, "free", cuMemFree_v2(ptr.0))
    }

    fn mem_info(&self) -> DriverResult<MemInfo> {
        let mut info = MemInfo::default();
        cuda!(self, "mem_info", cuMemGetInfo_v2(&raw mut info.free_bytes, &raw mut info.total_bytes))?;
        Ok(info)
    }

    fn host_alloc(&self, bytes: usize) -> DriverResult<HostPtr> {
        let mut ptr = std::ptr::null_mut();
        // The driver gives null for nothing.
        if bytes == 0 {
            return Err(self.err("host_alloc", Kind::InvalidValue("zero bytes")));
        }
        cuda!(self, "host_alloc", cuMemHostAlloc(&raw mut ptr, bytes, HOST_ALLOC_PORTABLE))?;
        Ok(HostPtr(ptr.expose_provenance() as u64))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> DriverResult<()> {
        cuda!(self, "host_free", cuMemFreeHost(ptr.as_ptr().cast()))
    }

    unsafe fn host_register(&self, ptr: *const u8, bytes: usize) -> DriverResult<DevicePtr> {
        const CALL: &str = "host_register";
        let ptr = ptr.cast_mut().cast();
        cuda!(self, CALL, cuMemHostRegister_v2(ptr, bytes, REGISTER_MAPPED_READ_ONLY))?;
        let mut device = 0;
        let found = cuda!(self, CALL, cuMemHostGetDevicePointer_v2(&raw mut device, ptr, 0));
        if let Err(error) = found {
            let _ = cuda!(self, CALL, cuMemHostUnregister(ptr));
            return Err(error);
        }
        Ok(DevicePtr(device))
    }

    fn host_unregister(&self, ptr: *const u8) -> DriverResult<()> {
        cuda!(self, "host_unregister", cuMemHostUnregister(ptr.cast_mut().cast()))
    }

    fn can_access_peer(&self, peer: DeviceOrdinal) -> DriverResult<bool> {
        let mut can = 0;
        cuda!(self, "can_access_peer", cuDeviceCanAccessPeer(&raw mut can, self.device, peer.0 as i32))?;
        Ok(can != 0)
    }

    fn enable_peer_access(&self, peer: DeviceOrdinal) -> DriverResult<()> {
        const CALL: &str = "enable_peer_access";
        if peer == self.info.ordinal {
            return Err(self.err(CALL, Kind::PeerAccess));
        }
        let context = self.context_of(CALL, peer)?;
        cuda!(self, CALL, cuCtxEnablePeerAccess(context, 0))
    }
}
