#![allow(unused_variables, dead_code)]
//! stub
use crate::driver::host_memory::{HostMemory, Pinned};
use crate::driver::{DeviceOrdinal, DevicePtr, DriverResult, DynDriver, StreamHandle};
use crate::handshake::{Epoch, Proven};
use crate::slice::Raw;
use crate::*;
use smallvec::SmallVec;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: PoolId,
    pub(crate) driver: DynDriver,
    pub(crate) config: PoolConfig,
    pub(crate) device: DeviceOrdinal,
    pub(crate) epoch: Arc<Epoch>,
}

impl Shared {
    pub(crate) fn new(driver: DynDriver, config: PoolConfig) -> Result<Arc<Self>, PoolError> {
        unimplemented!()
    }
    pub(crate) fn close(&self) {
        unimplemented!()
    }
    pub(crate) fn alloc(
        self: &Arc<Self>,
        bytes: usize,
        align: usize,
        purpose: Purpose,
        stream: &Stream,
    ) -> Result<Raw, PoolError> {
        unimplemented!()
    }
    pub(crate) fn free(&self, raw: &Raw) {
        unimplemented!()
    }
    pub(crate) fn token_of(&self, raw: &Raw) -> Token {
        unimplemented!()
    }
    pub(crate) fn record_stream(&self, raw: &Raw, stream: &Stream) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn arena_bytes(&self, index: usize) -> usize {
        unimplemented!()
    }
    pub(crate) fn drop_arena(&self, index: usize) {
        unimplemented!()
    }
    pub(crate) fn add_arena(&self, stream: &Stream) -> Result<usize, PoolError> {
        unimplemented!()
    }
    pub(crate) fn declare(&self, dependent: usize, dependency: Dependency) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn handed_out(&self, dependent: usize) -> Vec<HandedOut> {
        unimplemented!()
    }
    pub(crate) fn window_owns(&self, dependent: usize, ptr: DevicePtr) -> bool {
        unimplemented!()
    }
    pub(crate) fn begin_window(
        self: &Arc<Self>,
        dependent: Arc<dyn Dependent>,
        stream: Option<Stream>,
        policy: ScratchPolicy,
    ) -> Result<Window, PoolError> {
        unimplemented!()
    }
    pub(crate) fn finish_window(&self, dependent: usize, stream: Option<&Stream>) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn cancel_window(&self, dependent: usize, stream: Option<&Stream>) {
        unimplemented!()
    }
    pub(crate) fn walk(&self, dependent: usize) -> Result<Proven, Stale> {
        unimplemented!()
    }
    pub(crate) fn reback(&self, dependent: usize) -> Result<Vec<Reback>, PoolError> {
        unimplemented!()
    }
    pub(crate) fn dependencies(&self, dependent: usize) -> Vec<Dependency> {
        unimplemented!()
    }
    pub(crate) fn held_bytes(&self, dependent: usize) -> usize {
        unimplemented!()
    }
    pub(crate) fn unregister(&self, dependent: usize) {
        unimplemented!()
    }
    pub(crate) fn outside_token(&self, tracked: usize) -> Token {
        unimplemented!()
    }
    pub(crate) fn outside_span(&self, tracked: usize) -> (DevicePtr, usize) {
        unimplemented!()
    }
    pub(crate) fn move_outside(&self, tracked: usize, ptr: DevicePtr, bytes: usize) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn withdraw_outside(&self, tracked: usize) {
        unimplemented!()
    }
    pub(crate) fn wait_outside(&self, tracked: usize) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn with_pinned<R>(&self, tracked: usize, f: impl FnOnce(&Pinned) -> R) -> Option<R> {
        unimplemented!()
    }
    pub(crate) fn copy_host(
        &self,
        tracked: usize,
        stream: &Stream,
        f: impl FnOnce(&Pinned, StreamHandle) -> DriverResult<()>,
    ) -> Result<(), PoolError> {
        unimplemented!()
    }
    pub(crate) fn drop_host(&self, tracked: usize) {
        unimplemented!()
    }
    pub(crate) fn add_foreign(&self, ptr: DevicePtr, bytes: usize, name: String) -> Result<usize, PoolError> {
        unimplemented!()
    }
    pub(crate) fn add_pinned(&self, bytes: usize) -> Result<usize, PoolError> {
        unimplemented!()
    }
    pub(crate) fn add_registered(&self, memory: Arc<dyn HostMemory>) -> Result<usize, PoolError> {
        unimplemented!()
    }
    pub(crate) fn trim_to(&self, bytes: usize) -> Result<usize, PoolError> {
        unimplemented!()
    }
    pub(crate) fn set_limit(&self, bytes: Option<usize>) {
        unimplemented!()
    }
    pub(crate) fn limit(&self) -> Option<usize> {
        unimplemented!()
    }
    pub(crate) fn stats(&self) -> PoolStats {
        unimplemented!()
    }
    pub(crate) fn reset_peaks(&self) {
        unimplemented!()
    }
    pub(crate) fn counters(&self) -> Counters {
        unimplemented!()
    }
    pub(crate) fn report(&self) -> MemoryReport {
        unimplemented!()
    }
    pub(crate) fn resolve_all(&self, ptr: DevicePtr) -> SmallVec<[Resolved; 2]> {
        unimplemented!()
    }
    pub(crate) fn check(&self) -> Result<(), String> {
        unimplemented!()
    }
}
