//! The key and value cache of a sequence, in pool memory.

use std::sync::Arc;

use evergraph_kernels::host::{HostBlock, HostPart};
use evergraph_kernels::ops::{Attention, Copy, Plan, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::{DeviceSlice, GrowableSlice, Purpose, Touch, Tracked, Use};

use super::attention::KeyValue;
use super::block::Block;
use super::decoder::Decoder;
use super::streams::StreamStack;
use crate::engine::{KvType, Runtime, Unit};
use crate::error::{Error, Result};
use crate::placement::Home;

/// One layer's cache.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// `[C, kv_heads, key_dim]`.
    pub k: TensorView,
    /// `[C, kv_heads, value_dim]`; of a compressed cache, the first columns of `k`.
    pub v: TensorView,
    /// Whether position `p` is in row `p mod C`: a sliding layer keeps its window only.
    pub ring: bool,
    /// The memory of both, where they are on the host.
    pub on_host: Vec<Arc<HostBlock>>,
    /// Compressed keys, in layers that have such: those that attention sees, then those of the index that chooses among them.
    pub compressed: Vec<CompressedCache>,
}

/// Keys of many tokens each, and what the next ones are made of.
#[derive(Clone, Debug)]
pub struct CompressedCache {
    /// `[C, 2 c]` F32, a ring: projections of the last tokens.
    pub rows: TensorView,
    /// `[N, d]`.
    pub entries: TensorView,
}

/// The caches of all layers; those of layers that share one are the same views.
///
/// # Reuse and capture
/// Addresses are fixed for the life of the sequence; where to write and how far to read stands in device
/// memory, so that one captured step serves every position. Memory follows the length of the text: a layer that keeps
/// all of it [grows](Self::reach) as the text does, under the same addresses, and no graph notices.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    /// Of layers that keep a window, or little.
    fixed: Vec<DeviceSlice<u8>>,
    /// Which of those are rings: going on writes over what they keep.
    rings: Vec<usize>,
    growing: Vec<Growing>,
    /// How far steps may reach now, for each that grows.
    touches: Vec<Touch>,
    /// Tokens that there is room for now, in what grows.
    reached: usize,
    /// Whether attention's scores are written out.
    scores_written: bool,
    /// Queries whose scores are written out at a time.
    queries: usize,
    on_gpu: bool,
    /// Tokens from which on a text is long for one token's attention in one kernel.
    long: usize,
    /// Tokens that steps may reach now, and ever.
    end: usize,
    context: usize,
}

/// What the rings of a cache held at some place.
#[derive(Debug)]
pub(crate) struct Rings {
    on_device: Vec<Vec<u8>>,
    on_host: Vec<(TensorView, Arc<HostBlock>)>,
}

/// Copies one tensor of the host to another of its shape, while no step runs.
fn copy_on_host(src: &TensorView, dst: &TensorView) -> Result<()> {
    let mut plan = Plan::new();
    plan.push(Copy { src: src.clone(), dst: dst.clone() })?;
    HostPart::new(&plan, Vec::new())?.run().map_err(|fault| Error::HostFault { fault: fault.to_string() })
}

/// A tensor that grows by rows.
#[derive(Debug)]
struct Growing {
    slice: GrowableSlice<u8>,
    row_bytes: usize,
    /// Tokens of a row.
    tokens: usize,
}

impl Growing {
    /// Bytes of the rows that so many tokens fill.
    fn bytes(&self, tokens: usize) -> usize {
        (tokens / self.tokens).saturating_mul(self.row_bytes)
    }
}

/// Where attention's scores are written out, their length goes by steps of so many tokens.
const LENGTHS: usize = 256;

/// Tokens from which on a text is long for one token's attention in one kernel, where that does not spread keys: it has a block
/// for some heads of each key head.
const LONG: usize = 1024;

/// The same where all heads share a key head.
const LONG_OF_ONE: usize = 128;

impl LayerCache {
    /// Rows that scores are written out for in a step that reaches so many tokens.
    pub(super) fn scored(&self, tokens: usize) -> usize {
        if self.ring { self.k.dim(0) } else { self.k.dim(0).min(tokens) }
    }

    /// Whether the keys of few tokens are spread over a device.
    pub(super) fn spreads(&self) -> bool {
        self.k.ty() == self.v.ty() && Attention::spreads(self.k.ty(), self.k.dim(2), self.v.dim(2))
    }

    /// The keys of an index; none where a token sees all compressed keys.
    pub(super) fn index(&self) -> Option<&CompressedCache> {
        self.compressed.get(1)
    }
}

impl KvCache {
    /// Room for a sequence on a model, as [`new`](Self::new).
    ///
    /// # Errors
    /// Out of memory, and what else the pool says.
    pub fn of_model(
        runtime: &Runtime,
        model: &Decoder,
        context: usize,
        batch: usize,
        types: (KvType, KvType),
    ) -> Result<Self> {
        match &model.streams {
            Some(stack) => Self::of_streams(runtime, stack, context, batch, types.0),
            None => Self::new(runtime, &model.blocks, context, batch, types),
        }
    }

    /// Room for layers with compressed keys. Their windows and what keys are yet to be made of are rings, since a launch of
    /// `batch` tokens writes them all before it reads.
    fn of_streams(runtime: &Runtime, stack: &StreamStack, context: usize, batch: usize, ty: KvType) -> Result<Self> {
        let ty = ty.quant_type();
        let mut cache = Self {
            layers: Vec::new(),
            fixed: Vec::new(),
            rings: Vec::new(),
            growing: Vec::new(),
            touches: Vec::new(),
            reached: 0,
            scores_written: false,
            queries: batch,
            on_gpu: false,
            long: LONG,
            end: 0,
            context,
        };
        for (index, block) in stack.blocks.iter().enumerate() {
            let part = &block.attention;
            let unit = runtime.unit(block.device);
            let kept = (part.window as usize).saturating_add(batch).min(context);
            let name = |what: &str| format!("{what} of layer {index}");
            let shape = [kept, 1, part.dim];
            let k = cache.fixed_tensor(unit, &name("keys"), ty, &shape, kept < context)?;
            let mut compressed = Vec::new();
            let entries = |ratio: usize| (context / ratio).max(1);
            // A token sees all keys where there are no more of them than it may see.
            let index = part.indexer.as_ref().filter(|index| entries(index.compressor.ratio) > index.top);
            for compressor in part.compressor.iter().chain(index.map(|index| &index.compressor)) {
                let (ratio, channels) = (compressor.ratio, compressor.kv.dim(0));
                let window = if compressor.overlap { 2 * ratio } else { ratio };
                let shape = [window.saturating_add(batch), 2 * channels];
                let ring = shape[0] < context;
                let rows = cache.fixed_tensor(unit, &name("projections"), QuantType::F32, &shape, ring)?;
                let shape = [entries(ratio), compressor.norm.dim(0)];
                let entries = cache.growing_tensor(unit, &name("compressed keys"), ty, &shape, ratio)?;
                compressed.push(CompressedCache { rows, entries });
            }
            cache.layers.push(LayerCache { v: k.clone(), k, ring: kept < context, on_host: Vec::new(), compressed });
        }
        cache.touches = cache.growing.iter().map(|growing| growing.slice.touch(0)).collect();
        Ok(cache)
    }

    /// A tensor of this size from the start on; a ring's later tokens write over what earlier ones left.
    fn fixed_tensor(
        &mut self,
        unit: &Unit,
        name: &str,
        ty: QuantType,
        shape: &[usize],
        ring: bool,
    ) -> Result<TensorView> {
        let bytes = crate::engine::tensor_bytes(ty, shape)?;
        let slice = unit.pool().alloc_for::<u8>(bytes, Purpose::State, unit.stream())?;
        let view = crate::engine::view_of(&slice, name, unit.device(), ty, shape)?;
        if ring {
            self.rings.push(self.fixed.len());
        }
        self.fixed.push(slice);
        Ok(view)
    }

    /// A tensor that grows by a row every `tokens` tokens, if it is large.
    fn growing_tensor(
        &mut self,
        unit: &Unit,
        name: &str,
        ty: QuantType,
        shape: &[usize],
        tokens: usize,
    ) -> Result<TensorView> {
        let pool = unit.pool();
        let bytes = crate::engine::tensor_bytes(ty, shape)?;
        if bytes < pool.chunk_bytes().map_or(usize::MAX, |chunk| 2 * chunk) {
            return self.fixed_tensor(unit, name, ty, shape, false);
        }
        let slice = pool.alloc_growable::<u8>(0, bytes, Purpose::State, unit.stream())?;
        let view = crate::engine::view_of(&slice, name, unit.device(), ty, shape)?;
        self.growing.push(Growing { slice, row_bytes: bytes / shape[0], tokens });
        Ok(view)
    }

    /// Room for `context` tokens, fed at most `batch` at a time. A layer with a sliding window keeps
    /// `window + batch - 1` rows, since the first token of a batch still sees the window behind it.
    ///
    /// # Errors
    /// Out of memory, and what else the pool says.
    pub fn new(
        runtime: &Runtime,
        blocks: &[Block],
        context: usize,
        batch: usize,
        types: (KvType, KvType),
    ) -> Result<Self> {
        let (mut layers, mut fixed, mut growing) = (Vec::<LayerCache>::new(), Vec::new(), Vec::new());
        let mut rings = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let part = &block.attention;
            let unit = runtime.unit(block.device);
            let (pool, device) = (unit.pool(), unit.device());
            // What shares its last chunk with nobody should have a few.
            let worth = pool.chunk_bytes().map_or(usize::MAX, |chunk| 2 * chunk);
            if let KeyValue::Of(source) = part.kv {
                let shared = layers.get(source).cloned();
                let missing = || Error::CheckFailed(format!("block {index} reads the cache of block {source}"));
                layers.push(shared.ok_or_else(missing)?);
                continue;
            }
            let kept = part.window.map_or(context, |window| (window as usize).saturating_add(batch).min(context));
            let mut on_host = Vec::new();
            let mut tensor = |what: &str, ty: KvType, width: usize| {
                let shape = [kept, part.kv_heads, width];
                let bytes = crate::engine::tensor_bytes(ty.quant_type(), &shape)?;
                let name = format!("{what} cache of layer {index}");
                let ty = ty.quant_type();
                if block.home == Home::Host {
                    // Memory that no token has reached takes no room.
                    let memory = Arc::new(HostBlock::new(bytes).ok_or(Error::HostMemory { bytes })?);
                    let view = evergraph_kernels::host::tensor(&memory, &name, ty, &shape)?;
                    on_host.push(memory);
                    return Ok(view);
                }
                if kept == context && bytes >= worth {
                    let slice = pool.alloc_growable::<u8>(0, bytes, Purpose::State, unit.stream())?;
                    let view = crate::engine::view_of(&slice, &name, device, ty, &shape)?;
                    growing.push(Growing { slice, row_bytes: bytes / kept, tokens: 1 });
                    return Ok(view);
                }
                let slice = pool.alloc_for::<u8>(bytes, Purpose::State, unit.stream())?;
                let view = crate::engine::view_of(&slice, &name, device, ty, &shape)?;
                if kept < context {
                    rings.push(fixed.len());
                }
                fixed.push(slice);
                Ok::<_, crate::Error>(view)
            };
            let k = tensor("key", types.0, part.key_dim)?;
            let v = match part.latent() {
                // Values are the first part of the row.
                Some(_) => k.narrow(2, 0, part.value_dim)?,
                None => tensor("value", types.1, part.value_dim)?,
            };
            layers.push(LayerCache { k, v, ring: kept < context, on_host, compressed: Vec::new() });
        }
        let touches = growing.iter().map(|growing| growing.slice.touch(0)).collect();
        let (reached, scores_written, queries, end) = (0, false, batch, 0);
        let on_gpu = runtime.target().backend != "host";
        let of_one = blocks.iter().any(|block| block.attention.latent().is_some());
        let long = match () {
            () if layers.iter().all(LayerCache::spreads) => usize::MAX,
            () if of_one => LONG_OF_ONE,
            () => LONG,
        };
        Ok(Self {
            long,
            layers,
            fixed,
            rings,
            growing,
            touches,
            reached,
            scores_written,
            queries,
            on_gpu,
            end,
            context,
        })
    }

    /// Has attention's scores written out, in scratch as long as the text, in place of one kernel that does without.
    #[must_use]
    pub fn with_scores_written(mut self, written: bool) -> Self {
        self.scores_written = written;
        self
    }

    /// Where a step of so many tokens has scores written out: tokens that those of the next step are for. Shapes follow it, so it is a part of the step's
    /// key. It is at least as far as the step may [reach](Self::reach), rounded up so that a graph serves many tokens.
    #[must_use]
    pub fn scored(&self, tokens: usize) -> Option<usize> {
        let end = self.end.max(1);
        if self.scores_written {
            return Some(end.next_multiple_of(LENGTHS).min(self.context));
        }
        // Few graphs for a long text: what lies behind its end costs little.
        self.spreads(tokens).then(|| end.next_power_of_two().min(self.context))
    }

    /// Of so many queries of a step, those whose scores are written out at a time. Room for scores is as much smaller as they are fewer.
    #[must_use]
    pub fn queries_at_once(&self, tokens: usize) -> usize {
        self.queries.clamp(1, tokens.max(1))
    }

    /// Has scores of at most so many queries written out at a time. It is a part of the key of later steps.
    pub fn score_at_once(&mut self, queries: usize) {
        self.queries = queries;
    }

    /// Whether a step of so many tokens has scores of long caches written out although one kernel would do without: for a
    /// single token of a long text that kernel has too few rows to spread over a device, the other three spread over the keys.
    fn spreads(&self, tokens: usize) -> bool {
        tokens == 1 && self.on_gpu && self.end > self.long
    }

    /// Whether attention over a layer's cache is to write its scores out, in a step that has [room](Self::scored) for them.
    pub(super) fn writes_scores(&self, layer: &LayerCache) -> bool {
        self.scores_written || !layer.ring && layer.on_host.is_empty()
    }

    /// The layers' caches.
    #[must_use]
    pub fn layers(&self) -> &[LayerCache] {
        &self.layers
    }

    /// What a step that uses the cache depends on.
    pub fn uses(&self) -> impl Iterator<Item = (&dyn Tracked, Use)> {
        let growing = self.growing.iter().map(|growing| &growing.slice as &dyn Tracked);
        self.fixed.iter().map(|slice| slice as &dyn Tracked).chain(growing).map(|tracked| (tracked, Use::State))
    }

    /// Makes room for the first `tokens` positions and lets steps reach that far.
    ///
    /// # Errors
    /// Out of memory, and what else the pool says. The cache is as long as it was then.
    pub fn reach(&mut self, tokens: usize) -> Result<()> {
        if tokens > self.reached {
            for index in 0..self.growing.len() {
                let growing = &mut self.growing[index];
                if let Err(error) = growing.slice.grow_to(growing.bytes(tokens)) {
                    let before = self.reached;
                    for growing in &mut self.growing[..index] {
                        growing.slice.shrink_to(growing.bytes(before))?;
                    }
                    return Err(error.into());
                }
            }
            self.reached = tokens;
        }
        self.end = tokens;
        for (touch, growing) in self.touches.iter_mut().zip(&self.growing) {
            *touch = growing.slice.touch(growing.bytes(tokens));
        }
        Ok(())
    }

    /// Forgets all tokens. What grew is given to whoever needs it first.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn clear(&mut self) -> Result<()> {
        for growing in &mut self.growing {
            growing.slice.shrink_to(0)?;
        }
        self.reached = 0;
        self.reach(0)
    }

    /// What the rings hold, on the host: all else of a text's start is still there when the text has gone on.
    ///
    /// # Errors
    /// Those of the device; [`Error::HostMemory`].
    pub(crate) fn keep_rings(&self, runtime: &Runtime) -> Result<Rings> {
        let rings = self.rings.iter().filter_map(|&index| self.fixed.get(index));
        // Steps run on the streams of others, too.
        runtime.synchronize()?;
        let download = |slice: &DeviceSlice<u8>| Ok(runtime.unit_of(slice).stream().download(slice)?);
        let on_device = rings.map(download).collect::<Result<_>>()?;
        runtime.synchronize()?;
        let on_host = self.host_rings().map(|(ring, memory)| {
            let bytes = memory.bytes();
            let memory = Arc::new(HostBlock::new(bytes).ok_or(Error::HostMemory { bytes })?);
            let copy = evergraph_kernels::host::tensor(&memory, "copy of a ring", ring.ty(), ring.shape())?;
            copy_on_host(ring, &copy)?;
            Ok::<_, Error>((copy, memory))
        });
        Ok(Rings { on_device, on_host: on_host.collect::<Result<_>>()? })
    }

    /// Puts that back. The rings of another cache are refused by their lengths.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn restore_rings(&self, runtime: &Runtime, kept: &Rings) -> Result<()> {
        let rings = self.rings.iter().filter_map(|&index| self.fixed.get(index));
        runtime.synchronize()?;
        rings
            .zip(&kept.on_device)
            .try_for_each(|(slice, bytes)| Ok::<_, Error>(runtime.unit_of(slice).stream().upload(bytes, slice)?))?;
        runtime.synchronize()?;
        self.host_rings().zip(&kept.on_host).try_for_each(|((ring, _), (copy, _))| copy_on_host(copy, ring))
    }

    /// Rings on the host, and their memory.
    fn host_rings(&self) -> impl Iterator<Item = (&TensorView, &Arc<HostBlock>)> {
        let rings = self.layers.iter().filter(|layer| layer.ring);
        rings.flat_map(|layer| [&layer.k, &layer.v].into_iter().zip(&layer.on_host))
    }

    /// How far a step may reach.
    #[must_use]
    pub fn touches(&self) -> &[Touch] {
        &self.touches
    }

    /// Bytes of all of it on the device, now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let growing = self.growing.iter().map(|growing| growing.slice.len());
        self.fixed.iter().map(DeviceSlice::bytes).chain(growing).sum()
    }

    /// Bytes of what is on the host when the text is as long as it can be. Memory that no token has reached takes none.
    #[must_use]
    pub fn host_bytes(&self) -> usize {
        let mut blocks: Vec<&Arc<HostBlock>> = Vec::new();
        for block in self.layers.iter().flat_map(|layer| &layer.on_host) {
            if !blocks.iter().any(|known| Arc::ptr_eq(known, block)) {
                blocks.push(block);
            }
        }
        blocks.iter().map(|block| block.bytes()).sum()
    }

    /// Bytes of all of it on the device when the text is as long as it can be.
    #[must_use]
    pub fn most_bytes(&self) -> usize {
        let growing = self.growing.iter().map(|growing| growing.slice.most());
        self.fixed.iter().map(DeviceSlice::bytes).chain(growing).sum()
    }
}
