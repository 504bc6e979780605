//! Cases of heads made ready for attention.

use super::{Case, Tensors};
use crate::KernelError;
use crate::ops::{AttentionHeads, LatentHeads, NewKeys, TensorView, Yarn};
use crate::quant::QuantType;

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    dims: usize,
    ty: QuantType,
    ring: bool,
    /// Columns between heads.
    gap: usize,
}

const PLAIN: Shape =
    Shape { tokens: 1, heads: 4, kv_heads: 2, d: 64, dv: 64, dims: 64, ty: QuantType::F32, ring: false, gap: 0 };

impl Shape {
    fn rows(&self, t: &mut Tensors<'_>, heads: usize, cols: usize) -> Result<TensorView, KernelError> {
        t.strided_noise(&[self.tokens, heads, cols], self.gap / 2, self.gap)
    }

    fn cache(&self, t: &mut Tensors<'_>, cols: usize) -> Result<TensorView, KernelError> {
        let (capacity, wide) = (self.tokens + 4, cols + self.gap);
        let values = vec![0.25; capacity * self.kv_heads * wide];
        t.typed(self.ty, &[capacity, self.kv_heads, wide], &values)?.narrow(2, self.gap / 2, cols)
    }

    fn op(&self, t: &mut Tensors<'_>) -> Result<AttentionHeads, KernelError> {
        let Shape { tokens, heads, kv_heads, d, dv, dims, ring, .. } = *self;
        // Later tokens in earlier rows; in a ring from far away, around its end.
        let first = if ring { 90_003 } else { tokens as i32 + 2 };
        let positions: Vec<i32> = (0..tokens as i32).map(|t| first - t).collect();
        Ok(AttentionHeads {
            q: self.rows(t, heads, d)?,
            q_norm: t.noise(&[d])?,
            new: Some(NewKeys {
                k: self.rows(t, kv_heads, d)?,
                k_norm: t.noise(&[d])?,
                v: self.rows(t, kv_heads, dv)?,
                norm_values: true,
                k_cache: self.cache(t, d)?,
                v_cache: self.cache(t, dv)?,
                ring,
            }),
            positions: t.ints(&[tokens], &positions)?,
            eps: 1e-6,
            dims,
            base: 1e4,
            scale: 0.5,
            factors: None,
        })
    }
}

fn case(name: impl Into<String>, shape: Shape, change: fn(&mut AttentionHeads, Option<TensorView>)) -> Case {
    // A value may fall to either side where it is rounded to 16 bits.
    let tolerance = match shape.ty {
        QuantType::F16 => 1e-3,
        QuantType::BF16 => 8e-3,
        _ => 2e-6,
    };
    Case::new("attention_heads", name, tolerance, move |t| {
        let mut op = shape.op(t)?;
        let factors: Vec<f32> = (0..shape.dims / 2).map(|i| if i < 5 { 1.0 + i as f32 } else { 1e30 }).collect();
        let factors = if factors.is_empty() { None } else { Some(t.floats(&[shape.dims / 2], &factors)?) };
        change(&mut op, factors);
        Ok(Box::new(op))
    })
}

/// Queries and rows of a compressed cache.
#[derive(Clone, Copy)]
struct Latent {
    tokens: usize,
    heads: usize,
    /// Widths that are normed, and rotated.
    rank: usize,
    turned: usize,
    ty: QuantType,
    yarn: Option<Yarn>,
    magnitude: f32,
    in_place: bool,
    /// Whether rows are aligned to 16 bytes.
    aligned: bool,
}

impl Latent {
    fn case(self, name: impl Into<String>) -> Case {
        let tolerance = match self.ty {
            QuantType::F16 => 1e-3,
            QuantType::BF16 => 8e-3,
            _ => 2e-6,
        };
        Case::new("latent_heads", name, tolerance, move |t| {
            let Self { tokens, heads, rank, turned, ty, yarn, magnitude, in_place, aligned } = self;
            // The last part of each head.
            let q = t.noise(&[tokens, heads, turned + 3])?.narrow(2, 3, turned)?;
            let out = match in_place {
                true => q.clone(),
                false => t.strided_output(&[tokens, heads, turned], 2, 5)?,
            };
            let capacity = tokens + 3;
            let (gap, start) = if aligned { (8, 8) } else { (2, 1) };
            let wide = rank + turned + gap;
            let cache = t.typed(ty, &[capacity, wide], &vec![0.5; capacity * wide])?;
            // Later tokens in earlier rows.
            let positions: Vec<i32> = (0..tokens).map(|token| (capacity - 1 - token) as i32).collect();
            Ok(Box::new(LatentHeads {
                q,
                out,
                kv: t.strided_noise(&[tokens, rank + turned], if aligned { 4 } else { 1 }, 4)?,
                norm: t.noise(&[rank])?,
                positions: t.ints(&[tokens], &positions)?,
                cache: cache.narrow(1, start, rank + turned)?,
                eps: 1e-6,
                base: 1e4,
                scale: 1.0,
                yarn,
                magnitude,
            }))
        })
    }
}

fn latent(list: &mut Vec<Case>) {
    let plain = Latent {
        tokens: 1,
        heads: 16,
        rank: 512,
        turned: 64,
        ty: QuantType::F16,
        yarn: None,
        magnitude: 1.0,
        in_place: true,
        aligned: true,
    };
    let yarn = Some(Yarn { factor: 40.0, original_context: 64, beta_fast: 32.0, beta_slow: 1.0 });
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        list.push(Latent { ty, ..plain }.case(format!("{ty}, one token")));
        let many =
            Latent { ty, tokens: 300, heads: 3, rank: 33, turned: 10, yarn, in_place: false, aligned: false, ..plain };
        list.push(many.case(format!("{ty}, more tokens than blocks, YaRN")));
    }
    let f32s = Latent { ty: QuantType::F32, tokens: 5, ..plain };
    list.push(Latent { heads: 128, yarn, in_place: false, ..f32s }.case("128 heads, YaRN"));
    list.push(
        Latent { heads: 9, rank: 1, turned: 2, magnitude: 1.3, ..f32s }.case("one column and one pair, a magnitude"),
    );
    list.push(Latent { aligned: false, rank: 500, ..f32s }.case("rows that are not aligned"));
    list.push(Latent { rank: 300, turned: 132, heads: 3, ..f32s }.case("rows that are not all of a warp's"));
    list.push(Latent { heads: 1, rank: 2100, turned: 600, in_place: false, ..f32s }.case("wide rows, one head"));
}

pub(super) fn cases() -> Vec<Case> {
    let mut list = Vec::new();
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for ring in [false, true] {
            let name = format!("{ty}{}", if ring { ", ring" } else { "" });
            list.push(case(&name, Shape { ty, ring, ..PLAIN }, |_, _| {}));
            let odd = Shape { tokens: 3, kv_heads: 1, d: 30, dv: 18, dims: 10, gap: 3, ..PLAIN };
            list.push(case(format!("{name}, odd widths and gaps"), Shape { ty, ring, ..odd }, |_, _| {}));
        }
    }
    let wide = Shape { heads: 3, kv_heads: 3, d: 512, dv: 256, dims: 512, ..PLAIN };
    list.push(case("wide heads, factors", wide, |op, factors| op.factors = factors));
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for d in [256, 512] {
            let whole = Shape { d, dv: d, dims: d, tokens: 3, ty, ..PLAIN };
            list.push(case(format!("{ty}, heads of {d}, turned whole"), whole, |_, _| {}));
        }
    }
    let ring = Shape { d: 256, dv: 256, dims: 256, ring: true, ty: QuantType::F16, tokens: 70, gap: 16, ..PLAIN };
    list.push(case("heads of 256 in a ring, factors", ring, |op, factors| op.factors = factors));
    list.push(case("heads of 512, queries only", Shape { d: 512, dims: 512, ..PLAIN }, |op, _| op.new = None));
    list.push(case("heads of 256, values as they are", Shape { d: 256, dv: 256, dims: 256, ..PLAIN }, |op, _| {
        op.new.iter_mut().for_each(|new| new.norm_values = false);
    }));
    list.push(case("more tokens than blocks", Shape { tokens: 150, d: 32, dims: 32, ..PLAIN }, |_, _| {}));
    list.push(case("widest, in turns", Shape { d: 4096, dv: 7, dims: 512, tokens: 2, ..PLAIN }, |_, _| {}));
    list.push(case("nothing rotated", Shape { dims: 0, ..PLAIN }, |_, _| {}));
    list.push(case("queries only", Shape { tokens: 2, ..PLAIN }, |op, _| op.new = None));
    list.push(case("values as they are", PLAIN, |op, _| {
        op.new.iter_mut().for_each(|new| new.norm_values = false);
    }));
    latent(&mut list);
    list.push(case("values are the keys", Shape { tokens: 2, ..PLAIN }, |op, _| {
        op.new.iter_mut().for_each(|new| new.v = new.k.clone());
    }));
    list
}
