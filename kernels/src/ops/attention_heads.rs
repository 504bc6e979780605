//! Heads made ready for attention.

use evergraph_pool::driver::DeviceInfo;

use super::check::Check;
use super::kv_store::CACHE_TYPES;
use super::{Call, Launches, Op, TensorView};
use crate::KernelError;

/// Queries normed and rotated in place; keys normed, rotated and stored; values stored, normed or not.
///
/// The same bits as [`RmsNorm`](super::RmsNorm) per head, [`Rope`](super::Rope) (halves) over the first `dims` elements and
/// [`KvStore`](super::KvStore), in one launch. Keys and values are read only, so that they may be the same.
#[derive(Clone, Debug)]
pub struct AttentionHeads {
    /// `[T, H, d]` F32, d at most [`MOST`](Self::MOST).
    pub q: TensorView,
    /// `[d]` F32.
    pub q_norm: TensorView,
    /// Keys and values; none where they are those of another block.
    pub new: Option<NewKeys>,
    /// `[T]` I32, in device memory.
    pub positions: TensorView,
    /// Added to mean squares; more than 0.
    pub eps: f32,
    /// The first elements of a head that are rotated; even.
    pub dims: usize,
    /// Frequency base (theta).
    pub base: f32,
    /// Factor of every angle.
    pub scale: f32,
    /// Frequency divisors `[dims / 2]` F32; none means ones.
    pub factors: Option<TensorView>,
}

/// Keys and values, and the cache that they go to: token `t` to row `positions[t]`, or `positions[t] mod C` in a ring.
#[derive(Clone, Debug)]
pub struct NewKeys {
    /// `[T, Hkv, d]` F32.
    pub k: TensorView,
    /// `[d]` F32.
    pub k_norm: TensorView,
    /// `[T, Hkv, dv]` F32; may be `k`.
    pub v: TensorView,
    /// Whether values are normed, without a weight.
    pub norm_values: bool,
    /// `[C, Hkv, d]` F32, F16 or BF16.
    pub k_cache: TensorView,
    /// `[C, Hkv, dv]`, the type of `k_cache`.
    pub v_cache: TensorView,
    /// Whether rows wrap around.
    pub ring: bool,
}

impl AttentionHeads {
    /// Most elements of a head.
    pub const MOST: usize = 4096;

    /// What is read and never written.
    fn inputs(&self) -> Vec<(&'static str, &TensorView)> {
        let mut list = vec![("q_norm", &self.q_norm), ("positions", &self.positions)];
        list.extend(self.factors.iter().map(|factors| ("factors", factors)));
        list.extend(self.new.iter().flat_map(|new| [("k", &new.k), ("k_norm", &new.k_norm), ("v", &new.v)]));
        list
    }
}

impl Op for AttentionHeads {
    fn name(&self) -> &'static str {
        "attention_heads"
    }

    fn reads(&self) -> Vec<&TensorView> {
        // A row write leaves the rest of a cache as it was.
        let caches = self.new.iter().flat_map(|new| [&new.k_cache, &new.v_cache]);
        let inputs = self.inputs().into_iter().map(|(_, view)| view);
        [&self.q].into_iter().chain(inputs).chain(caches).collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        let caches = self.new.iter().flat_map(|new| [&new.k_cache, &new.v_cache]);
        [&self.q].into_iter().chain(caches).collect()
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        let new = self.new.iter_mut().flat_map(|new| [&mut new.k, &mut new.k_norm, &mut new.v]);
        [&mut self.q_norm, &mut self.positions].into_iter().chain(&mut self.factors).chain(new).collect()
    }

    fn writes_rows(&self) -> bool {
        true
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("q", &self.q, &["T", "H", "d"])?;
        let (tokens, d) = (self.q.dim(0), self.q.dim(2));
        check.parameter(d <= Self::MOST, "d", d, "at most 4096 elements a head")?;
        check.i32("positions", &self.positions)?;
        check.shape("positions", &self.positions, &[tokens])?;
        for (role, view) in self.inputs().into_iter().chain([("q", &self.q)]).filter(|(role, _)| *role != "positions") {
            check.f32(role, view)?;
        }
        check.shape("q_norm", &self.q_norm, &[d])?;
        check.parameter(
            self.dims.is_multiple_of(2) && self.dims <= d,
            "dims",
            self.dims,
            "even, and no more than a head has",
        )?;
        if let Some(factors) = &self.factors {
            check.shape("factors", factors, &[self.dims / 2])?;
        }
        check.apart("q", &self.q, &self.inputs())?;
        if let Some(new) = &self.new {
            check.rank("k", &new.k, &["T", "Hkv", "d"])?;
            check.rank("v", &new.v, &["T", "Hkv", "dv"])?;
            let (heads, dv) = (new.k.dim(1), new.v.dim(2));
            check.shape("k", &new.k, &[tokens, heads, d])?;
            check.shape("k_norm", &new.k_norm, &[d])?;
            check.shape("v", &new.v, &[tokens, heads, dv])?;
            check.parameter(dv <= Self::MOST, "dv", dv, "at most 4096 elements a head")?;
            check.ty("k_cache", &new.k_cache, CACHE_TYPES, "F32, F16 or BF16")?;
            check.ty("v_cache", &new.v_cache, &[new.k_cache.ty()], "the type of k_cache")?;
            let capacity = new.k_cache.dim(0);
            check.shape("k_cache", &new.k_cache, &[capacity, heads, d])?;
            check.shape("v_cache", &new.v_cache, &[capacity, heads, dv])?;
            if tokens > capacity {
                return Err(check.bad_shape("k_cache", &new.k_cache, format!("at least {tokens} rows")));
            }
            for (role, cache) in [("k_cache", &new.k_cache), ("v_cache", &new.v_cache)] {
                check.apart(role, cache, &self.inputs())?;
                check.apart(role, cache, &[("q", &self.q)])?;
            }
            check.apart("k_cache", &new.k_cache, &[("v_cache", &new.v_cache)])?;
        }
        check.parameter(self.eps.is_finite() && self.eps > 0.0, "eps", self.eps, "positive")?;
        check.parameter(self.base.is_finite() && self.base > 0.0, "base", self.base, "positive")?;
        check.parameter(self.scale.is_finite() && self.scale > 0.0, "scale", self.scale, "positive")
    }

    fn call(&self) -> Call {
        let (tokens, heads, d) = (self.q.dim(0), self.q.dim(1), self.q.dim(2));
        let new = self.new.as_ref();
        let (kv_heads, dv) = new.map_or((0, 0), |new| (new.k.dim(1), new.v.dim(2)));
        let widest = d.max(dv);
        // A block for each head, which takes tokens in turns: what it knows of the rotation serves all of them.
        let mut call = Call::new(heads + 2 * kv_heads).threads(widest, 4).shared_floats(widest + self.dims / 2);
        call.config.grid[1] = u32::try_from(tokens).unwrap_or(u32::MAX).clamp(1, 64);
        let strided = |call: Call, view: Option<&TensorView>| {
            call.optional(view).optional_stride(view, 0).optional_stride(view, 1)
        };
        let call = strided(call, Some(&self.q)).view(&self.q_norm);
        let call = strided(call, new.map(|new| &new.k)).optional(new.map(|new| &new.k_norm));
        let call = strided(call, new.map(|new| &new.v)).view(&self.positions);
        let call = strided(strided(call, new.map(|new| &new.k_cache)), new.map(|new| &new.v_cache));
        call.optional(self.factors.as_ref())
            .ty(new.map_or(&self.q, |new| &new.k_cache))
            .dim(new.map_or(0, |new| new.k_cache.dim(0)))
            .dim(usize::from(new.is_some_and(|new| new.ring)))
            .dim(usize::from(new.is_some_and(|new| new.norm_values)))
            .dim(tokens)
            .dim(heads)
            .dim(kv_heads)
            .dim(d)
            .dim(dv)
            .dim(self.dims / 2)
            .float(self.eps)
            .float(self.base)
            .float(self.scale)
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" { crate::cuda::launch::attention_heads(self) } else { super::single(self) }
    }
}
