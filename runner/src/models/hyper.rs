//! Residual streams: several beside each other, which each part of a block reads as a weighted sum and writes by weights made
//! from the streams themselves (hyper-connections).

use evergraph_kernels::ops::{HcExpand, HcMix, HcSplitSinkhorn, HcWeightedSum, MatMul, RmsNorm, TensorView};
use evergraph_kernels::plan::PeerCopy;
use evergraph_pool::driver::DeviceOrdinal;

use super::weights::Weights;
use crate::engine::Step;
use crate::error::Result;

/// What makes the weights, in `f32`.
#[derive(Debug)]
pub struct Mixer {
    /// `[(2 + n) n, n D]`, or `[n, n D]` where streams are only read.
    pub mix: TensorView,
    /// `[(2 + n) n]` or `[n]`.
    pub base: TensorView,
    /// `[3]` or `[1]`.
    pub scale: TensorView,
}

impl Mixer {
    /// The one whose tensors begin with `name`, for `n` streams of this width; one that only reads is smaller.
    pub(super) fn load(weights: &Weights, name: &str, [n, width]: [usize; 2], writes: bool) -> Result<Self> {
        let rows = if writes { (2 + n) * n } else { n };
        Ok(Self {
            mix: weights.get(&format!("{name}_fn.weight"), &[rows, n * width])?,
            base: weights.vector(&format!("{name}_base.weight"), rows)?,
            scale: weights.vector(&format!("{name}_scale.weight"), if writes { 3 } else { 1 })?,
        })
    }
}

/// The streams of a step's tokens, and scratch of what reads and writes them.
#[derive(Debug)]
pub(super) struct Streams {
    /// `[T, n, D]`.
    z: TensorView,
    /// `[T, n D]`.
    normed: TensorView,
    /// `[T, (2 + n) n]`.
    mixed: TensorView,
    /// `[T, n]`.
    pre: TensorView,
    /// `[T, n]`.
    post: TensorView,
    /// `[T, n, n]`.
    comb: TensorView,
    /// `[T, D]`: what a part of a block reads.
    pub(super) x: TensorView,
    iterations: u32,
    eps: f32,
    /// Added to mean squares.
    norm_eps: f32,
}

impl Streams {
    /// Room for `n` streams of this width; contents are undefined.
    pub(super) fn new(
        step: &mut Step<'_>,
        [tokens, n, width]: [usize; 3],
        (iterations, eps, norm_eps): (u32, f32, f32),
    ) -> Result<Self> {
        Ok(Self {
            z: step.floats("residual streams", &[tokens, n, width])?,
            normed: step.floats("normed streams", &[tokens, n * width])?,
            mixed: step.floats("mixed streams", &[tokens, (2 + n) * n])?,
            pre: step.floats("weights of read streams", &[tokens, n])?,
            post: step.floats("weights of written streams", &[tokens, n])?,
            comb: step.floats("weights between streams", &[tokens, n, n])?,
            x: step.floats("sum of streams", &[tokens, width])?,
            iterations,
            eps,
            norm_eps,
        })
    }

    /// Where they are.
    pub(super) fn device(&self) -> DeviceOrdinal {
        self.z.root().device
    }

    /// The same on the device that the step is on now.
    pub(super) fn moved(&self, step: &mut Step<'_>, dims: [usize; 3], sums: (u32, f32, f32)) -> Result<Self> {
        let there = Self::new(step, dims, sums)?;
        step.push(PeerCopy { src: self.z.clone(), dst: there.z.clone() })?;
        Ok(there)
    }

    /// All streams of a token in one row, `[T, n D]`.
    pub(super) fn flat(&self) -> Result<TensorView> {
        Ok(self.z.reshape(self.normed.shape())?)
    }

    /// Stream `number`, `[T, D]`.
    pub(super) fn stream(&self, number: usize) -> Result<TensorView> {
        let width = self.z.dim(2);
        Ok(self.flat()?.narrow(1, number * width, width)?)
    }

    /// Appends what a part of a block reads, as [`x`](Self::x), and the weights by which its output will be
    /// [written](Self::write).
    pub(super) fn read(&self, step: &mut Step<'_>, mixer: &Mixer) -> Result<()> {
        let mix = HcMix { post: self.post.clone(), comb: self.comb.clone(), iterations: self.iterations };
        self.sum(step, mixer, &self.mixed, Some(mix))
    }

    /// Appends what comes after the last block, as [`x`](Self::x).
    pub(super) fn read_last(&self, step: &mut Step<'_>, mixer: &Mixer) -> Result<()> {
        let (tokens, n) = (self.pre.dim(0), self.pre.dim(1));
        let mixed = self.mixed.reshape(&[self.mixed.len()])?.narrow(0, 0, tokens * n)?.reshape(&[tokens, n])?;
        self.sum(step, mixer, &mixed, None)
    }

    fn sum(&self, step: &mut Step<'_>, mixer: &Mixer, mixed: &TensorView, mix: Option<HcMix>) -> Result<()> {
        let norm = RmsNorm::new(self.flat()?, mixer.base.clone(), self.normed.clone(), self.norm_eps);
        step.push(RmsNorm { weight: None, ..norm })?;
        step.push(MatMul::new(mixer.mix.clone(), self.normed.clone(), mixed.clone()))?;
        let (m, scale, base) = (mixed.clone(), mixer.scale.clone(), mixer.base.clone());
        step.push(HcSplitSinkhorn { m, scale, base, pre: self.pre.clone(), mix, eps: self.eps })?;
        step.push(HcWeightedSum { z: self.z.clone(), pre: self.pre.clone(), out: self.x.clone() })
    }

    /// Appends the streams after a part of a block that made `y` (`[T, D]`) of what it last [read](Self::read).
    pub(super) fn write(&self, step: &mut Step<'_>, y: &TensorView) -> Result<()> {
        let (z, post, comb) = (self.z.clone(), self.post.clone(), self.comb.clone());
        step.push(HcExpand { y: y.clone(), z: z.clone(), post, comb, out: z })
    }
}
