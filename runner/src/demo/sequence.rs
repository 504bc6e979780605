//! One text: its cache, its controls on the device, and how far it has come.

use evergraph_kernels::ops::{Copy, Plan, SampleState, TensorView};
use evergraph_kernels::quant::QuantType;
use evergraph_pool::{DeviceSlice, Purpose, Stream};
use zerocopy::IntoBytes;

use super::model::{HEAD_WIDTH, HEADS, KV_HEADS, LAYERS, Random, VOCABULARY, WIDTH, root};
use super::step::{Bench, Cache, Controls, FUSED_UP_TO, Room, taken};
use super::witness::OTHERS;
use crate::error::Result;

/// Tokens of a prompt that go through the layers at once.
pub(super) const CHUNK: usize = 32;
/// Length of the ring of sampled tokens; no text is longer.
const RING: usize = 512;
/// Smallest capacity of a cache, tokens.
const SMALLEST: usize = 32;

/// What a text starts from.
#[derive(Debug, Clone)]
pub(super) struct Script {
    /// The round in which it arrives.
    pub(super) arrives: usize,
    /// Its prompt.
    pub(super) prompt: Vec<i32>,
    /// How many tokens it wants.
    pub(super) wants: usize,
}

impl Script {
    pub(super) fn new(random: &mut Random, arrives: usize, prompt: usize, wants: usize) -> Self {
        // VOCABULARY fits an i32.
        let prompt = (0..prompt).map(|_| random.below(VOCABULARY) as i32).collect();
        Self { arrives, prompt, wants }
    }
}

/// Keys and values of all layers: `[layers, 2, capacity, Hkv, d]` in F16, one slice.
#[derive(Debug)]
pub(super) struct Kv {
    pub(super) slice: DeviceSlice<u16>,
    pub(super) capacity: usize,
    pub(super) layers: Vec<Cache>,
}

impl Kv {
    fn new(room: Room<'_>, capacity: usize) -> Result<Self> {
        let part = capacity * KV_HEADS * HEAD_WIDTH;
        let slice = room.alloc::<u16>(2 * LAYERS * part, Purpose::State)?;
        taken(room.device, &slice, OTHERS);
        let root = root("kv", &slice, room.pool);
        let view = |n: usize| {
            TensorView::at(&root, n * part * size_of::<u16>(), QuantType::F16, &[capacity, KV_HEADS, HEAD_WIDTH])
        };
        let layers = (0..LAYERS)
            .map(|layer| Ok(Cache { k: view(2 * layer)?, v: view(2 * layer + 1)? }))
            .collect::<Result<_>>()?;
        Ok(Self { slice, capacity, layers })
    }
}

/// The buffers of a prompt on its way through the layers.
#[derive(Debug)]
struct Prefill {
    done: usize,
    ids: DeviceSlice<i32>,
    positions: DeviceSlice<i32>,
    /// Scores of a whole chunk against the whole cache, held from the first chunk to the last.
    scores: Option<(DeviceSlice<f32>, TensorView)>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: u64,
    pub(super) script: Script,
    pub(super) kv: Kv,
    /// Tokens in the cache.
    pub(super) len: usize,
    /// Tokens sampled so far.
    pub(super) sampled: usize,
    pub(super) token: DeviceSlice<i32>,
    pub(super) position: DeviceSlice<i32>,
    pub(super) sampler: DeviceSlice<u8>,
    pub(super) recent: DeviceSlice<i32>,
    pub(super) hidden: DeviceSlice<f32>,
    pub(super) controls: Controls,
    prefill: Option<Prefill>,
}

impl Sequence {
    /// Takes the memory that the text needs from the start.
    pub(super) fn new(room: Room<'_>, id: u64, script: Script, seed: u64) -> Result<Self> {
        let capacity = (script.prompt.len() + 1).next_power_of_two().max(SMALLEST);
        let kv = Kv::new(room, capacity)?;
        let state = SampleState {
            seed: seed ^ (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            temp: 0.8,
            top_k: 40,
            repeat_penalty: 1.1,
            ..SampleState::greedy()
        };
        let position = i32::try_from(script.prompt.len()).unwrap_or(i32::MAX) - 1;
        let sampler = room.upload(state.as_bytes(), Purpose::State)?;
        let position = room.upload(&[position], Purpose::State)?;
        let token = room.alloc::<i32>(1, Purpose::State)?;
        let recent = room.alloc::<i32>(RING, Purpose::State)?;
        let hidden = room.alloc::<f32>(WIDTH, Purpose::State)?;
        let controls = Controls {
            hidden: TensorView::new(&root("hidden", &hidden, room.pool), QuantType::F32, &[1, WIDTH])?,
            sampler: TensorView::new(&root("sampler", &sampler, room.pool), QuantType::I8, &[SampleState::BYTES])?,
            recent: TensorView::new(&root("recent", &recent, room.pool), QuantType::I32, &[RING])?,
            token: TensorView::new(&root("token", &token, room.pool), QuantType::I32, &[1])?,
            position: TensorView::new(&root("position", &position, room.pool), QuantType::I32, &[1])?,
        };
        taken(room.device, &sampler, OTHERS);
        taken(room.device, &position, OTHERS);
        taken(room.device, &token, OTHERS);
        taken(room.device, &recent, OTHERS);
        taken(room.device, &hidden, OTHERS);
        let ids = room.alloc::<i32>(CHUNK, Purpose::Scratch)?;
        let positions = room.alloc::<i32>(CHUNK, Purpose::Scratch)?;
        taken(room.device, &ids, OTHERS);
        taken(room.device, &positions, OTHERS);
        let scores = if capacity > FUSED_UP_TO {
            let slice = room.alloc::<f32>(CHUNK * HEADS * capacity, Purpose::Scratch)?;
            taken(room.device, &slice, OTHERS);
            let root = root("prompt scores", &slice, room.pool);
            let view = TensorView::new(&root, QuantType::F32, &[CHUNK, HEADS, capacity])?;
            Some((slice, view))
        } else {
            None
        };
        let prefill = Some(Prefill { done: 0, ids, positions, scores });
        Ok(Self { id, script, kv, len: 0, sampled: 0, token, position, sampler, recent, hidden, controls, prefill })
    }

    /// Whether its prompt is still on its way.
    pub(super) fn in_prompt(&self) -> bool {
        self.prefill.is_some()
    }

    /// Bytes that its prompt holds besides the cache.
    pub(super) fn prompt_bytes(&self) -> usize {
        self.prefill.as_ref().map_or(0, |p| {
            p.ids.bytes() + p.positions.bytes() + p.scores.as_ref().map_or(0, |(slice, _)| slice.bytes())
        })
    }

    /// Whether it has all the tokens it wants.
    pub(super) fn is_done(&self) -> bool {
        !self.in_prompt() && self.sampled >= self.script.wants
    }

    /// Runs the next chunk of the prompt, always kernel by kernel. After the last one the first token is sampled.
    pub(super) fn next_chunk(&mut self, bench: Bench<'_>, model: &super::model::Model) -> Result<()> {
        let Some(prefill) = &mut self.prefill else { return Ok(()) };
        let bench = Bench { owner: Some(OTHERS), ..bench };
        let end = (prefill.done + CHUNK).min(self.script.prompt.len());
        let ids = &self.script.prompt[prefill.done..end];
        let positions: Vec<i32> = (prefill.done..end).map(|p| i32::try_from(p).unwrap_or(i32::MAX)).collect();
        bench.room.stream.upload(ids, &prefill.ids)?;
        bench.room.stream.upload(&positions, &prefill.positions)?;
        let view =
            |name: &str, slice| TensorView::new(&root(name, slice, bench.room.pool), QuantType::I32, &[ids.len()]);
        super::step::body(
            bench,
            model,
            &self.kv.layers,
            &view("prompt ids", &prefill.ids)?,
            &view("prompt positions", &prefill.positions)?,
            prefill.scores.as_ref().map(|(_, view)| view),
            &self.controls.hidden,
        )?;
        prefill.done = end;
        self.len = end;
        if end == self.script.prompt.len() {
            super::step::head(bench, model, &self.controls)?;
            self.sampled = 1;
            self.prefill = None;
        }
        Ok(())
    }

    /// Whether the next token does not fit the cache.
    pub(super) fn is_full(&self) -> bool {
        self.len == self.kv.capacity
    }

    /// Moves the cache into one of twice the capacity. The old one goes back to the pool.
    pub(super) fn grow(&mut self, bench: Bench<'_>) -> Result<()> {
        let wider = Kv::new(bench.room, 2 * self.kv.capacity)?;
        let mut plan = Plan::new();
        for (old, new) in self.kv.layers.iter().zip(&wider.layers) {
            for (src, dst) in [(&old.k, &new.k), (&old.v, &new.v)] {
                plan.push(Copy { src: src.narrow(0, 0, self.len)?, dst: dst.narrow(0, 0, self.len)? })?;
            }
        }
        plan.launch(bench.kernels, bench.room.stream.handle())?;
        self.kv = wider;
        Ok(())
    }

    /// The tokens sampled so far.
    pub(super) fn tokens(&self, stream: &Stream) -> Result<Vec<i32>> {
        let mut ring = stream.download(&self.recent)?;
        ring.truncate(self.sampled);
        Ok(ring)
    }
}
