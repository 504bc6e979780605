//! A model's weights on a device, found by name and checked against the shape that the model needs.

use std::collections::BTreeSet;
use std::sync::Arc;

use evergraph_kernels::host::{HOST, HostBlock, Keep};
use evergraph_kernels::ops::{Root, TensorView};
use evergraph_pool::driver::{DeviceOrdinal, DevicePtr};
use evergraph_pool::{DeviceSlice, Purpose, RegisteredHost, Staging, Tracked, Use};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::engine::{Runtime, Unit};
use crate::error::{Error, Result};
use crate::gguf::{Bytes, BytesRange, Gguf, QuantType, TensorInfo};
use crate::placement::{Home, Placement, in_block};

/// The weights of a file, each where it is read: by the device, or by the host.
///
/// On the host device they are the mapped files themselves, registered and never copied; on others they are
/// uploaded, one allocation each, but for those that stay on the host: these are read from the mapped files in place.
///
/// # Reuse and capture
/// Weights never move. Steps declare all of the device's, as the registered range of each file or allocation by allocation.
#[derive(Debug)]
pub struct Weights {
    file: Arc<Gguf>,
    /// At least one.
    devices: Vec<DeviceOrdinal>,
    store: Store,
    placement: Placement,
    blocks: usize,
    /// What stays on the host and may be copied to the device, where that has to know of it.
    registered: Vec<(RegisteredHost, u64)>,
    /// Tensors of the file that the model does not read.
    unread: BTreeSet<String>,
    /// What was made of them, on the device and on the host.
    made: Vec<DeviceSlice<u8>>,
    made_on_host: Vec<Arc<HostBlock>>,
}

#[derive(Debug)]
enum Store {
    /// Each file of the model. Known to one device, it is in reach of all.
    Mapped(Vec<RegisteredHost>),
    /// In the file's order; none for what stays on the host, one for each device for what all read.
    Uploaded(Vec<Vec<DeviceSlice<u8>>>),
}

/// Vectors that blocks of several devices read: each device has its own.
const OF_ALL: [&str; 1] = ["rope_freqs.weight"];

/// Where bytes of the host are.
fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

/// What the system locks at a time, bytes.
const PAGE: usize = 4096;

/// Whether it is a large matrix of floats.
fn is_dense(tensor: &TensorInfo) -> bool {
    const LARGE: u64 = 1 << 16;
    tensor.quant_type() == QuantType::F32 && tensor.shape().len() > 1 && tensor.shape().iter().product::<u64>() >= LARGE
}

impl Weights {
    /// Makes the weights of a file of so many blocks readable where they are to be read.
    ///
    /// # Errors
    /// Those of the pool and the driver.
    pub fn load(file: Arc<Gguf>, runtime: &Runtime, placement: &Placement, blocks: usize) -> Result<Self> {
        Self::load_some(file, runtime, placement, blocks, &|_| true)
    }

    /// As [`load`](Self::load), but for tensors that the model does not `read`: they take no memory of the device.
    ///
    /// # Errors
    /// Those of the pool and the driver.
    pub fn load_some(
        file: Arc<Gguf>,
        runtime: &Runtime,
        placement: &Placement,
        blocks: usize,
        read: &dyn Fn(&str) -> bool,
    ) -> Result<Self> {
        let devices = runtime.units().iter().map(Unit::device).collect();
        let placement = placement.clone();
        let names = file.tensors().iter().map(TensorInfo::name);
        let mut weights = Self {
            unread: names.filter(|name| !read(name)).map(str::to_owned).collect(),
            file,
            devices,
            store: Store::Mapped(Vec::new()),
            placement,
            blocks,
            registered: Vec::new(),
            made: Vec::new(),
            made_on_host: Vec::new(),
        };
        weights.store = if runtime.reads_in_place() {
            let register = |bytes: &Arc<Bytes>| {
                let bytes: Arc<dyn evergraph_pool::HostMemory> = Arc::clone(bytes) as _;
                Ok(runtime.pool().register_host(bytes)?)
            };
            Store::Mapped(weights.file.parts().map(register).collect::<Result<_>>()?)
        } else {
            let dense = |tensor: &TensorInfo| is_dense(tensor) && weights.home(tensor.name()) == Home::Device;
            if weights.read().any(dense) {
                runtime.prepare_products()?;
            }
            weights.registered = weights.register(runtime)?;
            Store::Uploaded(weights.upload(runtime)?)
        };
        Ok(weights)
    }

    /// Makes the host's matrices known to the device, so that it copies them at full speed.
    fn register(&self, runtime: &Runtime) -> Result<Vec<(RegisteredHost, u64)>> {
        let on_host = self.read().filter(|tensor| self.home(tensor.name()) == Home::Host);
        let mut ranges: Vec<(usize, std::ops::Range<usize>)> = on_host
            .map(|tensor| {
                // Whole pages, since those are what is locked.
                let start = tensor.start_bytes() as usize / PAGE * PAGE;
                (tensor.part(), start..(tensor.start_bytes() + tensor.bytes()) as usize)
            })
            .collect();
        ranges.sort_unstable_by_key(|(part, range)| (*part, range.start));
        let mut joined: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
        for (part, range) in ranges {
            match joined.last_mut() {
                Some((other, before)) if *other == part && range.start <= before.end.next_multiple_of(PAGE) => {
                    before.end = before.end.max(range.end);
                }
                _ => joined.push((part, range)),
            }
        }
        let files: Vec<&Arc<Bytes>> = self.file.parts().collect();
        let register = |(part, range): (usize, std::ops::Range<usize>)| {
            let bytes = files.get(part).and_then(|bytes| BytesRange::new(bytes, range))?;
            let first = address(evergraph_pool::HostMemory::bytes(&bytes));
            Some(runtime.pool().register_host(Arc::new(bytes)).map(|range| (range, first)))
        };
        // Locking pages takes time, which several threads share.
        match joined.into_par_iter().filter_map(register).collect::<std::result::Result<Vec<_>, _>>() {
            Ok(registered) => Ok(registered),
            Err(error) => {
                tracing::info!(%error, "weights of the host can not be locked: they are not copied to the device");
                Ok(Vec::new())
            }
        }
    }

    /// A matrix of the host as the device reaches it, over the bus; none where it does not.
    #[must_use]
    pub fn on_bus(&self, view: &TensorView) -> Option<TensorView> {
        let (start, bytes) = (view.root().ptr.0, view.root().bytes);
        if view.root().device != HOST {
            return None;
        }
        let device = |host: &dyn Tracked, first: u64| {
            let offset = usize::try_from(start.checked_sub(first)?).ok()?;
            (offset.checked_add(bytes)? <= host.bytes()).then_some(())?;
            let allocation = host.token().allocation.get();
            let root = Root::with_allocation(
                view.root().name.clone(),
                host.ptr().checked_add(offset)?,
                bytes,
                self.devices[0],
                allocation,
            );
            TensorView::new(&root, view.ty(), view.shape()).ok()
        };
        let known: Vec<(&RegisteredHost, u64)> = match &self.store {
            Store::Mapped(files) => {
                let starts = self.file.parts().map(|bytes| address((**bytes).as_ref()));
                files.iter().zip(starts).collect()
            }
            Store::Uploaded(_) => self.registered.iter().map(|(range, first)| (range, *first)).collect(),
        };
        known.into_iter().find_map(|(host, first)| device(host, first))
    }

    /// Whether matrices of the host can be copied to the device.
    #[must_use]
    pub fn host_is_registered(&self) -> bool {
        matches!(self.store, Store::Mapped(_)) || !self.registered.is_empty()
    }

    /// Copies the devices' tensors to them.
    fn upload(&self, runtime: &Runtime) -> Result<Vec<Vec<DeviceSlice<u8>>>> {
        // A rehearsal wants their places only.
        let staging = |unit: &Unit| match runtime.is_rehearsal() {
            true => Ok(None),
            false => Staging::new(unit.stream()).map(Some),
        };
        let mut staging = runtime.units().iter().map(staging).collect::<std::result::Result<Vec<_>, _>>()?;
        let mut slices = Vec::with_capacity(self.file.tensors().len());
        for tensor in self.file.tensors() {
            let mut copies = Vec::new();
            let there = self.home(tensor.name()) == Home::Device && self.reads(tensor.name());
            let homes: &[DeviceOrdinal] = match OF_ALL.contains(&tensor.name()) {
                true => &self.devices,
                false => &[self.device(tensor.name())],
            };
            for device in homes.iter().filter(|_| there) {
                let data = self.file.data(tensor);
                let unit = runtime.unit(*device);
                let slice = unit.pool().alloc_for(data.len(), Purpose::Weight, unit.stream())?;
                let number = runtime.units().iter().position(|other| other.device() == *device);
                if let Some(staging) = number.and_then(|number| staging.get_mut(number)?.as_mut()) {
                    staging.upload(data, &slice)?;
                }
                copies.push(slice);
            }
            slices.push(copies);
        }
        staging.into_iter().flatten().try_for_each(Staging::finish)?;
        Ok(slices)
    }

    /// Makes a tensor of those that are not read as they are: `bytes` of it, where `home` says.
    ///
    /// # Errors
    /// Those of the pool and the driver; [`Error::HostMemory`].
    pub(super) fn make(
        &mut self,
        runtime: &Runtime,
        home: Home,
        name: &str,
        (ty, shape): (QuantType, &[usize]),
        bytes: &[u8],
    ) -> Result<TensorView> {
        if home == Home::Host {
            let block = HostBlock::copy_of(bytes).ok_or(Error::HostMemory { bytes: bytes.len() })?;
            let view = evergraph_kernels::host::tensor(&block, name, ty, shape)?;
            self.made_on_host.push(Arc::new(block));
            return Ok(view);
        }
        let unit = runtime.unit(self.device(name));
        let slice = unit.pool().alloc_for(bytes.len(), Purpose::Weight, unit.stream())?;
        if !runtime.is_rehearsal() {
            unit.stream().upload(bytes, &slice)?;
        }
        let view = crate::engine::view_of(&slice, name, unit.device(), ty, shape)?;
        self.made.push(slice);
        Ok(view)
    }

    /// Whether the model reads this tensor of the file.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        !self.unread.contains(name)
    }

    /// The tensors of the file that the model reads.
    pub fn read(&self) -> impl Iterator<Item = &TensorInfo> {
        self.file.tensors().iter().filter(|tensor| self.reads(tensor.name()))
    }

    /// What was made of the file's tensors: bytes on the device, and on the host.
    #[must_use]
    pub fn made_bytes(&self) -> (usize, usize) {
        let on_host = self.made_on_host.iter().map(|block| block.bytes());
        (self.made.iter().map(DeviceSlice::bytes).sum(), on_host.sum())
    }

    /// Where block `index` is.
    #[must_use]
    pub fn block_home(&self, index: usize) -> Home {
        self.placement.block(index, self.blocks)
    }

    /// The device that block `index` is on, where it is on one. The output matrix counts as one more block.
    #[must_use]
    pub fn block_device(&self, index: usize) -> DeviceOrdinal {
        self.devices[self.placement.device(index, self.blocks, self.devices.len())]
    }

    /// The device that reads a tensor, where one does.
    #[must_use]
    pub fn device(&self, name: &str) -> DeviceOrdinal {
        self.block_device(match in_block(name) {
            Some((index, _)) => index,
            // What makes one stream of several is behind the last block.
            None if name.starts_with("output_hc") => self.blocks.saturating_sub(1),
            None if self.has("output.weight") && name.contains("tok") => 0,
            None if self.has("output.weight") && name.starts_with("per_layer") => 0,
            None => self.blocks,
        })
    }

    /// Where a tensor is read.
    #[must_use]
    pub fn home(&self, name: &str) -> Home {
        let embedding = ["token_embd.weight", "per_layer_token_embd.weight"].contains(&name);
        let home = match in_block(name) {
            Some((index, _)) => self.block_home(index),
            // The embedding may be the output matrix too.
            None if name == "output.weight" || embedding && !self.has("output.weight") => self.block_home(self.blocks),
            None if embedding => self.block_home(0),
            None => Home::Device,
        };
        // Vectors stay with what they belong to.
        let matrix = self.file.tensor(name).is_some_and(|tensor| tensor.shape().len() > 1);
        if matrix { self.placement.matrix_among(name, home, self.blocks, self.devices.len()) } else { home }
    }

    /// Whether the host has a share in this model.
    #[must_use]
    pub fn any_on_host(&self) -> bool {
        !self.placement.is_plain() && self.read().any(|tensor| self.home(tensor.name()) == Home::Host)
    }

    /// What keeps the files in memory, for whoever reads tensors on the host.
    #[must_use]
    pub fn keep(&self) -> Vec<Keep> {
        let made = self.made_on_host.iter().map(|block| Arc::clone(block) as Keep);
        self.file.parts().map(|bytes| Arc::clone(bytes) as Keep).chain(made).collect()
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Arc<Gguf> {
        &self.file
    }

    /// What a step that reads the weights depends on.
    pub fn uses(&self) -> Vec<(&dyn Tracked, Use)> {
        let mut uses: Vec<(&dyn Tracked, Use)> = match &self.store {
            Store::Mapped(files) => files.iter().map(|file| (file as &dyn Tracked, Use::Weight)).collect(),
            Store::Uploaded(list) => list.iter().flatten().map(|slice| (slice as &dyn Tracked, Use::Weight)).collect(),
        };
        uses.extend(self.registered.iter().map(|(range, _)| (range as &dyn Tracked, Use::Weight)));
        uses.extend(self.made.iter().map(|slice| (slice as &dyn Tracked, Use::Weight)));
        uses
    }

    /// Whether there is such a tensor.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// The rows of a matrix that may be missing.
    pub(super) fn rows(&self, name: &str) -> Option<usize> {
        self.file.tensor(name)?.shape().first().and_then(|&rows| usize::try_from(rows).ok())
    }

    /// A tensor of exactly this shape (row-major), of any type that kernels read.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is missing or has another shape, [`Error::Unsupported`] for a type without kernels.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<TensorView> {
        self.find(name, shape)?.ok_or_else(|| Error::tensor(name, format!("shape {shape:?}"), "no such tensor"))
    }

    /// As [`get`](Self::get), but the tensor may be missing.
    ///
    /// # Errors
    /// As [`get`](Self::get) for a tensor that is there.
    pub fn find(&self, name: &str, shape: &[usize]) -> Result<Option<TensorView>> {
        self.find_on(self.home(name), name, shape)
    }

    /// A vector of floats that blocks of all devices read, on the device or the side of block `index`.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn vector_of_block(&self, index: usize, name: &str, len: usize) -> Result<TensorView> {
        let view = self.vector_on(self.block_home(index), name, len)?;
        let Some(tensor) = self.file.tensor(name).filter(|_| self.block_home(index) == Home::Device) else {
            return Ok(view);
        };
        let (ptr, allocation, device) = self.place(tensor, self.block_device(index))?;
        let root = Root::with_allocation(name, ptr, tensor.bytes() as usize, device, allocation);
        Ok(TensorView::new(&root, view.ty(), view.shape())?)
    }

    /// A table of this shape, of whole numbers (I32) from 0 to below `limit`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is missing, or something else.
    pub fn numbers(&self, name: &str, shape: &[usize], limit: usize) -> Result<TensorView> {
        let view = self.place_on(self.home(name), name, shape)?.ok_or_else(|| missing(name))?;
        if view.ty() != QuantType::I32 {
            return Err(Error::tensor(name, "type I32", view.ty()));
        }
        let bytes = self.file.tensor(name).map_or(&[][..], |tensor| self.file.data(tensor));
        let mut numbers = bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
        match numbers.find(|&number| !usize::try_from(number).is_ok_and(|number| number < limit)) {
            None => Ok(view),
            Some(number) => Err(Error::tensor(name, format!("numbers below {limit}"), number)),
        }
    }

    fn find_on(&self, home: Home, name: &str, shape: &[usize]) -> Result<Option<TensorView>> {
        let Some(view) = self.place_on(home, name, shape)? else { return Ok(None) };
        readable(name, view.ty())?;
        Ok(Some(view))
    }

    /// A tensor of this shape and any type, read on this side.
    fn place_on(&self, home: Home, name: &str, shape: &[usize]) -> Result<Option<TensorView>> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        check_shape(tensor, shape)?;
        let (ptr, allocation, device) = match home {
            Home::Device => self.place(tensor, self.device(name))?,
            Home::Host => (DevicePtr(address(self.file.data(tensor))), 0, HOST),
        };
        let root = Root::with_allocation(name, ptr, tensor.bytes() as usize, device, allocation);
        Ok(Some(TensorView::new(&root, tensor.quant_type(), shape)?))
    }

    /// The type and the bytes of a tensor that others are made of.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub(super) fn source(&self, name: &str, shape: &[usize]) -> Result<(QuantType, &[u8])> {
        let tensor = self.file.tensor(name).ok_or_else(|| missing(name))?;
        check_shape(tensor, shape)?;
        Ok((readable(name, tensor.quant_type())?, self.file.data(tensor)))
    }

    /// A vector of floats, such as a norm's weight.
    ///
    /// # Errors
    /// As [`get`](Self::get), and [`Error::Tensor`] if it is not F32.
    pub fn vector(&self, name: &str, len: usize) -> Result<TensorView> {
        self.vector_on(self.home(name), name, len)
    }

    /// As [`vector`](Self::vector), for an op that runs on a certain side: what is on the device can be read on the host
    /// too.
    ///
    /// # Errors
    /// As [`vector`](Self::vector).
    pub fn vector_on(&self, home: Home, name: &str, len: usize) -> Result<TensorView> {
        let view = self.find_on(home, name, &[len])?.ok_or_else(|| missing(name))?;
        if view.ty() == QuantType::F32 { Ok(view) } else { Err(Error::tensor(name, "type F32", view.ty())) }
    }

    /// As [`vector`](Self::vector), but the tensor may be missing.
    ///
    /// # Errors
    /// As [`vector`](Self::vector) for a tensor that is there.
    pub fn find_vector(&self, name: &str, len: usize) -> Result<Option<TensorView>> {
        self.find_vector_on(self.home(name), name, len)
    }

    /// As [`vector_on`](Self::vector_on), but the tensor may be missing.
    ///
    /// # Errors
    /// As [`vector`](Self::vector) for a tensor that is there.
    pub fn find_vector_on(&self, home: Home, name: &str, len: usize) -> Result<Option<TensorView>> {
        if self.has(name) { self.vector_on(home, name, len).map(Some) } else { Ok(None) }
    }

    /// A tensor of one finite float, as a number; the tensor may be missing.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it is something else.
    pub fn find_number(&self, name: &str) -> Result<Option<f32>> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        self.vector(name, 1)?;
        match self.file.data(tensor).first_chunk().map(|bytes| f32::from_le_bytes(*bytes)) {
            Some(value) if value.is_finite() => Ok(Some(value)),
            found => Err(Error::tensor(name, "a finite number", format!("{found:?}"))),
        }
    }

    /// The projections to queries, keys and values, of so many rows each: from tensors of their own, or from one that
    /// holds the rows of all, of the first two, or of the first alone. `name` makes whole names.
    ///
    /// # Errors
    /// As [`get`](Self::get) for tensors that are there.
    pub(super) fn projections(
        &self,
        name: &dyn Fn(&str) -> String,
        rows: [usize; 3],
        width: usize,
    ) -> Result<[Option<TensorView>; 3]> {
        let fused = name("attn_qkv");
        let mut views = [const { None }; 3];
        match self.file.tensor(&fused) {
            Some(tensor) => {
                let found = tensor.shape().first().copied();
                let sum = |parts: usize| rows[..parts].iter().sum::<usize>();
                let parts = (1..3).find(|&parts| found == Some(sum(parts) as u64)).unwrap_or(3);
                let all = self.get(&fused, &[sum(parts), width])?;
                for (part, view) in views.iter_mut().enumerate().take(parts) {
                    *view = Some(all.narrow(0, sum(part), rows[part])?);
                }
            }
            None => {
                for ((view, part), rows) in views.iter_mut().zip(["attn_q", "attn_k", "attn_v"]).zip(rows) {
                    *view = self.find(&name(part), &[rows, width])?;
                }
            }
        }
        Ok(views)
    }

    /// Address of a tensor of a device's, the id of the allocation it lies in, and the device.
    fn place(&self, tensor: &TensorInfo, device: DeviceOrdinal) -> Result<(DevicePtr, u64, DeviceOrdinal)> {
        let lost = || Error::tensor(tensor.name(), "a place on the device", "none");
        let number = self.devices.iter().position(|other| *other == device).ok_or_else(lost)?;
        match &self.store {
            Store::Mapped(files) => {
                let file = files.get(tensor.part()).ok_or_else(lost)?;
                let ptr = file.ptr().checked_add(tensor.start_bytes() as usize).ok_or_else(lost)?;
                Ok((ptr, file.token().allocation.get(), device))
            }
            Store::Uploaded(list) => {
                let index = self.file.tensors().iter().position(|other| other.name() == tensor.name());
                let copies = index.and_then(|index| list.get(index)).ok_or_else(lost)?;
                let slice = if copies.len() == 1 { copies.first() } else { copies.get(number) }.ok_or_else(lost)?;
                Ok((slice.ptr(), slice.allocation().get(), device))
            }
        }
    }
}

/// Whether a tensor has a shape.
fn check_shape(tensor: &TensorInfo, shape: &[usize]) -> Result<()> {
    let found: Vec<u64> = tensor.shape();
    if found.len() == shape.len() && found.iter().zip(shape).all(|(&found, &wanted)| found == wanted as u64) {
        return Ok(());
    }
    Err(Error::tensor(tensor.name(), format!("shape {shape:?}"), format!("{found:?}")))
}

/// A type that kernels read.
fn readable(name: &str, ty: QuantType) -> Result<QuantType> {
    if ty.supported() {
        return Ok(ty);
    }
    Err(Error::Unsupported {
        what: "this tensor type",
        found: format!("{ty} in {name}"),
        advice: "another quantisation of the model (Q4_K_M, Q8_0, F16 …)".to_owned(),
    })
}

/// What is wrong with a file that lacks a tensor.
pub(super) fn missing(name: &str) -> Error {
    Error::tensor(name, "a tensor", "no such tensor")
}

#[cfg(test)]
mod tests;
