//! Attention over a window of keys that are values too, and compressed keys of what lies before it.

use evergraph_kernels::ops::{
    CompressKeys, CompressedAttention, Entries, Fp8KvQuantize, HeadMatMul, IndexScores, IndexTop, KvStore, RmsNorm,
    RopeTail, TensorView, Yarn,
};

use super::block::{Shared, fitted};
use super::input::{Input, Room};
use super::kv::{CompressedCache, LayerCache};
use crate::engine::Step;
use crate::error::{Error, Result};

/// Attention with one key head, whose keys are values too.
#[derive(Debug)]
pub struct CompressedPart {
    /// Query heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Sliding window, tokens.
    pub window: u32,
    /// How heads are rotated.
    pub tail: Tail,
    /// `[Rq, D]`.
    pub q_a: TensorView,
    /// `[Rq]`.
    pub q_a_norm: TensorView,
    /// `[H d, Rq]`.
    pub q_b: TensorView,
    /// `[d, D]`.
    pub kv: TensorView,
    /// `[d]`.
    pub kv_norm: TensorView,
    /// `[H]`.
    pub sinks: TensorView,
    /// `[g, Ro, H d / g]`: of each group of heads.
    pub output_a: TensorView,
    /// `[D, g Ro]`.
    pub output_b: TensorView,
    /// What makes compressed keys, in layers that have them.
    pub compressor: Option<Compressor>,
    /// Chooses among them, in layers that do not see all.
    pub indexer: Option<Indexer>,
}

/// Rotation of the last elements of a head, pairs of neighbours.
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    /// How many.
    pub dims: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Blending of the frequencies.
    pub yarn: Option<Yarn>,
}

/// Makes one key of many tokens.
#[derive(Debug)]
pub struct Compressor {
    /// Tokens of a key.
    pub ratio: usize,
    /// Whether a key takes in the tokens of the key before, too.
    pub overlap: bool,
    /// `[c, D]`, `c` being the width of a key, or twice that with overlap.
    pub kv: TensorView,
    /// `[c, D]`.
    pub gate: TensorView,
    /// `[ratio, c]`.
    pub ape: TensorView,
    /// `[d]`.
    pub norm: TensorView,
}

/// Chooses the compressed keys that a token sees.
#[derive(Debug)]
pub struct Indexer {
    /// Makes its own keys.
    pub compressor: Compressor,
    /// Heads.
    pub heads: usize,
    /// `[Hi di, Rq]`.
    pub q_b: TensorView,
    /// `[Hi, D]`.
    pub proj: TensorView,
    /// Keys that a token sees at most.
    pub top: usize,
}

/// Scratch that attention of all blocks uses, one after the other.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `[T, Rq]`.
    u: TensorView,
    /// `[T, most of 2 c]`: projections for compressed keys.
    rows: TensorView,
    /// `[T, g Ro]`.
    grouped: TensorView,
    /// What the indexer takes; none where nobody has one.
    index: Option<IndexScratch>,
    rooms: [Option<Room>; 2],
    /// Whether keys are rounded as an 8-bit cache would have them.
    rounded: bool,
}

#[derive(Debug)]
struct IndexScratch {
    /// `[T, Hi di]`.
    q: TensorView,
    /// `[T, Hi]`.
    weights: TensorView,
    /// `[some of T, N]`.
    scores: TensorView,
    /// `[T, Ki]`.
    ids: TensorView,
}

/// Scores that are kept at a time, about: an index over a million tokens does its queries in turns.
const SCORES: usize = 1 << 24;

fn most(values: impl Iterator<Item = usize>) -> usize {
    values.max().unwrap_or(1).max(1)
}

impl Scratch {
    /// Room for any of these parts.
    pub(super) fn new<'a>(
        step: &mut Step<'_>,
        parts: impl Iterator<Item = (&'a CompressedPart, &'a LayerCache)> + Clone,
        tokens: usize,
        rounded: bool,
    ) -> Result<Self> {
        let all = || parts.clone().map(|(part, _)| part);
        let rank = most(all().map(|part| part.q_a.dim(0)));
        let grouped = most(all().map(|part| part.output_b.dim(1)));
        let compressors = || all().flat_map(CompressedPart::compressors);
        let rows = most(compressors().map(|compressor| 2 * compressor.kv.dim(0)));
        let indexed = || parts.clone().filter_map(|(part, cache)| part.indexer.as_ref().zip(cache.index()));
        let index = match indexed().next() {
            None => None,
            Some(_) => Some(IndexScratch {
                q: step.floats("index queries", &[tokens, most(indexed().map(|(part, _)| part.q_b.dim(0)))])?,
                weights: step.floats("index weights", &[tokens, most(indexed().map(|(part, _)| part.heads))])?,
                scores: {
                    let entries = most(indexed().map(|(_, cache)| cache.entries.dim(0)));
                    step.floats("index scores", &[(SCORES / entries).clamp(1, tokens), entries])?
                },
                ids: step.scratch(
                    "chosen keys",
                    evergraph_kernels::quant::QuantType::I32,
                    &[tokens, most(indexed().map(|(part, _)| part.top))],
                )?,
            }),
        };
        let reads_u = all().flat_map(|part| [Some(&part.q_b), part.indexer.as_ref().map(|index| &index.q_b)]);
        let rooms = [
            Room::new(step, tokens.saturating_mul(rank), reads_u.flatten())?,
            Room::new(step, tokens.saturating_mul(grouped), all().map(|part| &part.output_b))?,
        ];
        Ok(Self {
            u: step.floats("compressed queries", &[tokens, rank])?,
            rows: step.floats("rows to be compressed", &[tokens, rows])?,
            grouped: step.floats("grouped attention", &[tokens, grouped])?,
            index,
            rooms,
            rounded,
        })
    }
}

impl CompressedPart {
    fn compressors(&self) -> impl Iterator<Item = &Compressor> {
        self.compressor.iter().chain(self.indexer.as_ref().map(|index| &index.compressor))
    }

    /// The weights of the products with its input.
    pub(super) fn projections(&self) -> impl Iterator<Item = &TensorView> {
        let compressed = self.compressors().flat_map(|compressor| [&compressor.kv, &compressor.gate]);
        [&self.q_a, &self.kv].into_iter().chain(compressed).chain(self.indexer.as_ref().map(|index| &index.proj))
    }

    /// The weights of all its products.
    pub(super) fn products(&self) -> impl Iterator<Item = &TensorView> {
        let index = self.indexer.as_ref().map(|index| &index.q_b);
        self.projections().chain([&self.q_b, &self.output_a, &self.output_b]).chain(index)
    }

    /// What attention adds for the normed input `x`, into `shared.y`.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        shared: &Shared,
        scratch: &Scratch,
        x: &Input,
        cache: &LayerCache,
    ) -> Result<()> {
        let (tokens, positions, eps) = (shared.positions.dim(0), &shared.positions, shared.eps);
        let u = fitted(&scratch.u, tokens, self.q_a.dim(0))?;
        x.times(step, &self.q_a, &u)?;
        let index = self.indexer.as_ref().zip(cache.index());
        let reads = [Some(&self.q_b), index.map(|(index, _)| &index.q_b)];
        let queries = Input::unwritten(scratch.rooms[0].as_ref(), &u, reads.into_iter().flatten(), false)?;
        queries.norm(step, RmsNorm::new(u.clone(), self.q_a_norm.clone(), u, eps))?;
        let q = fitted(&shared.q, tokens, self.heads * self.dim)?;
        queries.times(step, &self.q_b, &q)?;
        let q = q.heads(self.heads)?;
        let norm = RmsNorm::new(q.clone(), self.kv_norm.clone(), q.clone(), eps);
        step.push(RmsNorm { weight: None, ..norm })?;
        self.tail.rotate(step, &q, positions, false)?;

        let key = fitted(&shared.k, tokens, self.dim)?;
        x.times(step, &self.kv, &key)?;
        step.push(RmsNorm::new(key.clone(), self.kv_norm.clone(), key.clone(), eps))?;
        let key = key.heads(1)?;
        self.tail.rotate(step, &key, positions, false)?;
        if scratch.rounded {
            step.push(Fp8KvQuantize { x: key.clone(), rotated: self.tail.dims, out: key.clone() })?;
        }
        let (ring, places) = (cache.ring, positions.clone());
        step.push(KvStore { src: key, cache: cache.k.clone(), positions: places, ring })?;

        let chosen = match (index, &scratch.index) {
            (Some((index, keys)), Some(room)) => {
                Some(index.choose(step, self, scratch, room, [x, &queries], keys, shared)?)
            }
            _ => None,
        };
        let entries = match (&self.compressor, cache.compressed.first()) {
            (None, _) => None,
            (Some(compressor), Some(entries)) => {
                compressor.forward(step, &self.tail, scratch, x, entries, shared)?;
                let (cache, ratio) = (entries.entries.clone(), compressor.ratio as u32);
                Some(Entries { cache, ratio, chosen })
            }
            (Some(_), None) => return Err(Error::CheckFailed("a layer without a cache of its keys".to_owned())),
        };
        let out = fitted(&shared.a, tokens, self.heads * self.dim)?;
        let keys = cache.k.reshape(&[cache.k.dim(0), self.dim])?;
        step.push(CompressedAttention {
            q,
            keys,
            entries,
            positions: positions.clone(),
            sinks: Some(self.sinks.clone()),
            out: out.heads(self.heads)?,
            scale: 1.0 / (self.dim as f32).sqrt(),
            window: self.window,
            ring,
        })?;
        // Keys carry their rotation, so what is made of them as values does too.
        self.tail.rotate(step, &out.heads(self.heads)?, positions, true)?;
        let (groups, rank) = (self.output_a.dim(0), self.output_a.dim(1));
        let grouped = fitted(&scratch.grouped, tokens, groups * rank)?;
        let (w, x) = (self.output_a.clone(), out.heads(groups)?);
        step.push(HeadMatMul { w, x, y: grouped.heads(groups)? })?;
        let room = scratch.rooms[1].as_ref();
        Input::new(step, room, &grouped, [&self.output_b])?.times(step, &self.output_b, &shared.y)
    }
}

impl Tail {
    /// Appends the rotation of the heads `x` (`[T, H, d]`) in place.
    fn rotate(&self, step: &mut Step<'_>, x: &TensorView, positions: &TensorView, inverse: bool) -> Result<()> {
        let &Self { dims, base, yarn } = self;
        step.push(RopeTail { yarn, inverse, ..RopeTail::new(x.clone(), positions.clone(), dims, base) })
    }
}

impl Compressor {
    /// Appends the projections of the step's tokens, and the keys that end at them.
    fn forward(
        &self,
        step: &mut Step<'_>,
        tail: &Tail,
        scratch: &Scratch,
        x: &Input,
        cache: &CompressedCache,
        shared: &Shared,
    ) -> Result<()> {
        let (channels, positions) = (self.kv.dim(0), &shared.positions);
        let rows = fitted(&scratch.rows, positions.dim(0), 2 * channels)?;
        x.times(step, &self.kv, &rows.narrow(1, 0, channels)?)?;
        x.times(step, &self.gate, &rows.narrow(1, channels, channels)?)?;
        let places = positions.clone();
        step.push(KvStore { src: rows, cache: cache.rows.clone(), positions: places, ring: true })?;
        step.push(CompressKeys {
            rows: cache.rows.clone(),
            ape: self.ape.clone(),
            weight: self.norm.clone(),
            positions: positions.clone(),
            cache: cache.entries.clone(),
            overlap: self.overlap,
            eps: shared.eps,
            dims: tail.dims,
            base: tail.base,
            yarn: tail.yarn,
        })
    }
}

impl Indexer {
    /// Appends what chooses keys for each token: `[T, Ki]`.
    #[expect(clippy::too_many_arguments, reason = "what it reads and where it works")]
    fn choose(
        &self,
        step: &mut Step<'_>,
        part: &CompressedPart,
        scratch: &Scratch,
        room: &IndexScratch,
        [x, queries]: [&Input; 2],
        keys: &CompressedCache,
        shared: &Shared,
    ) -> Result<TensorView> {
        let (tokens, positions) = (shared.positions.dim(0), &shared.positions);
        self.compressor.forward(step, &part.tail, scratch, x, keys, shared)?;
        let q = fitted(&room.q, tokens, self.q_b.dim(0))?;
        queries.times(step, &self.q_b, &q)?;
        let q = q.heads(self.heads)?;
        part.tail.rotate(step, &q, positions, false)?;
        let weights = fitted(&room.weights, tokens, self.heads)?;
        x.times(step, &self.proj, &weights)?;
        let ids = fitted(&room.ids, tokens, self.top)?;
        let (ratio, scale) = (self.compressor.ratio as u32, 1.0 / ((self.heads * q.dim(2)) as f32).sqrt());
        let (most, entries) = (room.scores.dim(0), keys.entries.dim(0));
        for first in (0..tokens).step_by(most) {
            let count = most.min(tokens - first);
            let some = |view: &TensorView| view.narrow(0, first, count);
            let scores = fitted(&room.scores.narrow(0, 0, count)?, count, entries)?;
            let (places, keys) = (some(positions)?, keys.entries.clone());
            let (positions, weights) = (places.clone(), some(&weights)?);
            step.push(IndexScores { q: some(&q)?, weights, keys, positions, scores: scores.clone(), ratio, scale })?;
            step.push(IndexTop { scores, positions: places, ids: some(&ids)?, ratio })?;
        }
        Ok(ids)
    }
}
