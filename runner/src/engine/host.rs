//! The host's share of a step: what of a model stays on the host is done there, on its own threads.
//!
//! A step asks for it where the stream comes to it, and waits for it where the result is needed; what stands between the two runs
//! on the device meanwhile. Activations cross through page-locked memory, which kernels write and read in place. There are two ways
//! to ask ([`HostWork`]); in both the whole step is one graph. An eager step is cut in pieces instead: the host does its part
//! where it queues the wait.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use evergraph_graphcache::Scope;
use evergraph_kernels::host::{HostBlock, HostFaults, HostNode, HostPart, Keep};
use evergraph_kernels::lane::Lane;
use evergraph_kernels::ops::{HostAsk, HostWait, Root, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::driver::{DeviceOrdinal, Fault};
use evergraph_pool::{DeviceSlice, HostBuffer, HostWords, Purpose, Tracked, Use};
use parking_lot::Mutex;

use super::expert_cache::ExpertCache;
use super::runtime::{Runtime, StepKey};
use super::step::view_of;
use crate::error::{Error, Result};

/// How the host comes to know of its work inside a graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostWork {
    /// Host functions, which the driver calls.
    Nodes,
    /// Turns: the device raises a number in page-locked memory and later waits for the answer; the thread that launched the step
    /// looks for it. Takes some 20 µs less a part on hardware, and lets the device go on meanwhile.
    Turns,
}

/// What of the host's weights the device takes upon itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    /// Tokens in a step from which on experts come to the device; none means never.
    pub(crate) streamed: Option<usize>,
    /// How many of a single token's experts it fetches.
    pub(crate) device: usize,
}

/// Words of page-locked memory: the number that the device raises, and, a cache line or two away, the number that the
/// host answers with and whether it gave up.
const TOLD: usize = 0;
const DONE: usize = 32;
const GAVE_UP: usize = 33;
const WORDS: usize = 64;

/// Between two looks at whether the stream still lives, looks at the number; about 0.1 ms.
const LOOKS: u32 = 1 << 13;

/// What the steps of one sequence and the host need to work together.
///
/// # Reuse and capture
/// The buffers are page-locked and never move; every graph declares them. A buffer that became too small stays for the graphs
/// that use it.
pub(crate) struct HostSide {
    how: HostWork,
    runtime: Arc<Runtime>,
    /// Where steps begin and end, and ask for the host.
    home: DeviceOrdinal,
    buffer: HostBuffer<i32>,
    words: HostWords,
    turn: DeviceSlice<i32>,
    ask: HostAsk,
    wait: HostWait,
    memory: Mutex<Memory>,
    crossings: Mutex<Vec<Crossings>>,
    /// Of every step that was captured, what the host does in it, in order.
    parts: Mutex<HashMap<StepKey, Arc<[Arc<HostPart>]>>>,
    faults: Arc<HostFaults>,
    /// The weights.
    keep: Vec<Keep>,
    /// On which experts come to the device, and from how many tokens on.
    lane: Option<(Arc<Lane>, usize)>,
    /// Whether they do not come any more, for want of memory.
    experts_stay: AtomicBool,
    /// Of a single token's experts, how many the device does.
    device_share: usize,
    /// 0, 1, 2 …
    places: DeviceSlice<i32>,
    /// What the device keeps of the host's experts.
    cache: Option<ExpertCache>,
}

/// Most experts of a token that the device does of those on the host.
const MOST_PLACES: usize = 16;

/// Memory of the part that is being put together. Parts are done one after the other, so all start at the same place.
#[derive(Debug, Default)]
struct Memory {
    scratch: Option<Arc<HostBlock>>,
    used: Filled,
}

/// Page-locked memory of the part, which one device reaches.
#[derive(Debug)]
struct Crossings {
    device: DeviceOrdinal,
    buffers: Vec<Arc<HostBuffer<u8>>>,
    crossed: Filled,
}

/// How far the newest memory is used, and how much the part has taken in all.
#[derive(Debug, Default)]
struct Filled {
    offset: usize,
    part: usize,
}

impl Filled {
    /// The offset of `bytes` more, if they fit into `there`.
    fn take(&mut self, bytes: usize, there: usize) -> Option<usize> {
        let offset = self.offset;
        let end = offset.checked_add(bytes)?;
        (end <= there).then(|| {
            self.part += bytes;
            self.offset = end.next_multiple_of(LINE);
            offset
        })
    }

    /// What newer memory should have, so that all of this part would fit.
    fn wanted(&self, bytes: usize) -> usize {
        self.part.saturating_add(bytes).saturating_mul(2).max(4096)
    }
}

/// Tensors start at whole cache lines of both sides.
const LINE: usize = 256;

/// A tensor in page-locked memory, as each side sees it.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// For ops of the device.
    pub device: TensorView,
    /// For ops of the host.
    pub host: TensorView,
}

impl HostSide {
    /// Beside a runtime whose steps begin and end on device `home`, for a model whose weights `keep` keeps.
    pub(crate) fn new(runtime: &Arc<Runtime>, home: DeviceOrdinal, keep: Vec<Keep>, shares: Shares) -> Result<Self> {
        let unit = runtime.unit(home);
        let (pool, stream, device) = (unit.pool(), unit.stream(), unit.device());
        let buffer = pool.host_buffer::<i32>(WORDS)?;
        let turn = pool.alloc_for::<i32>(1, Purpose::State, stream)?;
        stream.upload(&[0], &turn)?;
        let words = view_of(&buffer, "turns of the host", device, QuantType::I32, &[WORDS])?;
        let count = view_of(&turn, "turn", device, QuantType::I32, &[1])?;
        Ok(Self {
            how: runtime.host_work(),
            ask: HostAsk { turn: count.clone(), told: words.narrow(0, TOLD, 1)? },
            wait: HostWait { turn: count, done: words.narrow(0, DONE, 2)? },
            words: buffer.words(),
            buffer,
            turn,
            memory: Mutex::default(),
            crossings: Mutex::default(),
            home: device,
            parts: Mutex::default(),
            faults: Arc::default(),
            keep,
            lane: match shares.streamed {
                Some(tokens) => Some((Lane::new(pool.driver())?, tokens)),
                None => None,
            },
            experts_stay: AtomicBool::new(false),
            device_share: shares.device.min(MOST_PLACES),
            places: {
                let places = pool.alloc_for::<i32>(MOST_PLACES, Purpose::State, stream)?;
                stream.upload(&std::array::from_fn::<i32, MOST_PLACES, _>(|place| place as i32), &places)?;
                places
            },
            cache: None,
            runtime: Arc::clone(runtime),
        })
    }

    /// With experts that the device keeps.
    pub(crate) fn with_cache(mut self, cache: Option<ExpertCache>) -> Self {
        self.cache = cache;
        self
    }

    pub(super) fn cache(&self) -> Option<&ExpertCache> {
        self.cache.as_ref()
    }

    pub(super) fn keep(&self) -> &[Keep] {
        &self.keep
    }

    pub(super) fn lane(&self, tokens: usize) -> Option<Arc<Lane>> {
        let come = !self.experts_stay.load(Ordering::Relaxed);
        self.lane.as_ref().filter(|(_, from)| come && tokens >= *from).map(|(lane, _)| Arc::clone(lane))
    }

    /// Whether experts stay on the host, in steps of many tokens too.
    pub(super) fn keep_experts(&self, stay: bool) {
        self.experts_stay.store(stay, Ordering::Relaxed);
    }

    pub(super) fn device_share(&self) -> usize {
        self.device_share
    }

    pub(super) fn places(&self, count: usize) -> Result<Option<TensorView>> {
        if !(1..=MOST_PLACES).contains(&count) {
            return Ok(None);
        }
        let all = view_of(&self.places, "places", self.home, QuantType::I32, &[MOST_PLACES])?;
        Ok(Some(all.narrow(0, 0, count)?))
    }

    pub(super) fn how(&self) -> HostWork {
        self.how
    }

    pub(super) fn ask(&self) -> HostAsk {
        self.ask.clone()
    }

    pub(super) fn wait(&self) -> HostWait {
        self.wait.clone()
    }

    pub(super) fn node(&self, part: &Arc<HostPart>) -> HostNode {
        HostNode { part: Arc::clone(part), faults: Arc::clone(&self.faults) }
    }

    /// What a part takes from here on may lie where the last one's lay.
    pub(super) fn begin_part(&self) {
        self.memory.lock().used = Filled::default();
        self.crossings.lock().iter_mut().for_each(|there| there.crossed = Filled::default());
    }

    /// Page-locked memory for a tensor that crosses between a device and the host.
    pub(super) fn crossing(
        &self,
        device: DeviceOrdinal,
        name: &str,
        ty: QuantType,
        shape: &[usize],
    ) -> Result<Crossing> {
        let bytes = super::tensor_bytes(ty, shape)?;
        let mut crossings = self.crossings.lock();
        let missing = || Error::CheckFailed(format!("no memory for {name}"));
        if !crossings.iter().any(|there| there.device == device) {
            crossings.push(Crossings { device, buffers: Vec::new(), crossed: Filled::default() });
        }
        let there = crossings.iter_mut().find(|there| there.device == device).ok_or_else(missing)?;
        let Crossings { buffers, crossed, .. } = there;
        let room = buffers.last().map_or(0, |buffer| buffer.bytes());
        let offset = match crossed.take(bytes, room) {
            Some(offset) => offset,
            None => {
                buffers.push(Arc::new(self.runtime.unit(device).pool().host_buffer(crossed.wanted(bytes))?));
                crossed.offset = 0;
                crossed.take(bytes, usize::MAX).unwrap_or(0)
            }
        };
        let buffer = buffers.last().ok_or_else(missing)?;
        let at = buffer.ptr().checked_add(offset).ok_or_else(missing)?;
        let allocation = buffer.token().allocation.get();
        let device = Root::with_allocation(name, at, bytes, device, allocation);
        let host = Root::with_allocation(name, at, bytes, evergraph_kernels::host::HOST, allocation);
        Ok(Crossing { device: TensorView::new(&device, ty, shape)?, host: TensorView::new(&host, ty, shape)? })
    }

    /// Scratch of the host, and what keeps it.
    pub(super) fn scratch(&self, name: &str, ty: QuantType, shape: &[usize]) -> Result<(TensorView, Arc<HostBlock>)> {
        let bytes = super::tensor_bytes(ty, shape)?;
        let mut memory = self.memory.lock();
        let Memory { scratch, used, .. } = &mut *memory;
        let there = scratch.as_ref().map_or(0, |block| block.bytes());
        let missing = || Error::HostMemory { bytes };
        let offset = match used.take(bytes, there) {
            Some(offset) => offset,
            None => {
                *scratch = Some(Arc::new(HostBlock::new(used.wanted(bytes)).ok_or_else(missing)?));
                used.offset = 0;
                used.take(bytes, usize::MAX).unwrap_or(0)
            }
        };
        let block = scratch.as_ref().ok_or_else(missing)?;
        let root = block.root(name, offset, bytes).ok_or_else(missing)?;
        Ok((TensorView::new(&root, ty, shape)?, Arc::clone(block)))
    }

    /// Says what a run depends on. Called when its ops are put together, so that all buffers are there.
    pub(super) fn declare(&self, scope: &Scope<'_>) -> Result<()> {
        scope.declare(&self.buffer, Use::State)?;
        scope.declare(&self.turn, Use::State)?;
        scope.declare(&self.places, Use::State)?;
        if let Some(cache) = &self.cache {
            cache.declare(scope)?;
        }
        let crossings = self.crossings.lock();
        let of = |there: &Crossings| {
            let device = there.device;
            there.buffers.iter().map(move |buffer| (device, Arc::clone(buffer))).collect::<Vec<_>>()
        };
        let buffers: Vec<_> = crossings.iter().flat_map(of).collect();
        drop(crossings);
        for (_, buffer) in &buffers {
            scope.declare(&**buffer, Use::State)?;
        }
        if !scope.capturing() {
            self.buffer.record_stream(scope.stream())?;
            for (device, buffer) in &buffers {
                // A step's streams have joined when it ends.
                buffer.record_stream(self.runtime.unit(*device).stream())?;
            }
        }
        Ok(())
    }

    /// Notes what the host does in a step that was just captured.
    pub(super) fn captured(&self, key: StepKey, parts: Vec<Arc<HostPart>>) {
        self.parts.lock().insert(key, parts.into());
    }

    /// Does the host's share of a graph that was just launched.
    pub(super) fn serve(&self, key: StepKey) -> Result<()> {
        if self.how == HostWork::Nodes {
            return Ok(());
        }
        let parts = self.parts.lock().get(&key).cloned();
        let parts = parts.ok_or_else(|| Error::CheckFailed("a graph asks the host for what it does not know".into()));
        parts?.iter().try_for_each(|part| self.answer(part))
    }

    /// Waits until the device asks, does the part and answers.
    pub(super) fn answer(&self, part: &HostPart) -> Result<()> {
        let word = |index: usize| self.words.get(index).ok_or_else(|| Error::CheckFailed("no words".to_owned()));
        let (told, done) = (word(TOLD)?, word(DONE)?);
        let last = done.load(Ordering::Relaxed);
        let mut looks = 0;
        while told.load(Ordering::Acquire) == last {
            looks += 1;
            if looks % LOOKS == 0 {
                let unit = self.runtime.unit(self.home);
                let driver = unit.pool().driver();
                driver.bind()?;
                if driver.stream_query(unit.stream().handle())? && told.load(Ordering::Acquire) == last {
                    return Err(Error::CheckFailed("the device did not ask the host for its share".to_owned()));
                }
                // Where there are fewer cores than threads, the device of this process may need this one.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        match catch_unwind(AssertUnwindSafe(|| part.run())) {
            Ok(Ok(())) => {
                done.store(last.wrapping_add(1), Ordering::Release);
                Ok(())
            }
            Ok(Err(fault)) => Err(self.faulted(fault)),
            Err(_) => Err(Error::CheckFailed("a panic in the host's share of a step".to_owned())),
        }
    }

    fn faulted(&self, fault: Fault) -> Error {
        Error::HostFault { fault: fault.to_string() }
    }

    /// The first fault of host functions, after the stream was waited for.
    pub(super) fn check(&self) -> Result<()> {
        self.faults.take().map_or(Ok(()), |fault| Err(self.faulted(fault)))
    }

    /// After an error: lets the device go on without answers, waits for it, and makes both sides ready for the next step.
    pub(super) fn give_up(&self) {
        let set = |index: usize, value: u32| {
            if let Some(word) = self.words.get(index) {
                word.store(value, Ordering::SeqCst);
            }
        };
        set(GAVE_UP, 1);
        // On a device that died nothing waits any more, and nothing will be launched.
        let stream = self.runtime.unit(self.home).stream();
        let waited = stream.synchronize().and_then(|()| stream.upload(&[0], &self.turn));
        if waited.is_ok() {
            set(TOLD, 0);
            set(DONE, 0);
            set(GAVE_UP, 0);
            let _ = self.faults.take();
        }
    }
}

impl fmt::Debug for HostSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSide").field("how", &self.how).field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Drop for HostSide {
    fn drop(&mut self) {
        // Host functions may still be in the stream, with addresses of buffers that are about to go.
        let _ = self.runtime.synchronize();
    }
}

#[cfg(test)]
mod tests;
