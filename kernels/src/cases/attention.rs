//! Cases of attention, fused and in three kernels.

use super::{Case, Tensors};
use crate::KernelError;
use crate::ops::{Attention, AttentionScores, AttentionValues, SoftMax, Spread, TensorView};
use crate::quant::QuantType;

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    /// Tokens in the cache before the first query.
    past: usize,
    window: Option<u32>,
    softcap: Option<f32>,
    sinks: bool,
    ty: QuantType,
    ring: bool,
    /// Columns between the heads of a cache row.
    gap: usize,
    /// Whether keys are spread, and a result in codes is asked for.
    spread: bool,
    codes: bool,
    /// Whether values are the first part of the keys' rows.
    shared: bool,
}

const PLAIN: Shape = Shape {
    tokens: 1,
    heads: 8,
    kv_heads: 2,
    d: 64,
    dv: 64,
    past: 70,
    window: None,
    softcap: None,
    sinks: false,
    ty: QuantType::F16,
    ring: false,
    gap: 0,
    spread: false,
    codes: false,
    shared: false,
};

impl Shape {
    fn capacity(&self) -> usize {
        match self.window {
            Some(window) if self.ring => window as usize + self.tokens - 1,
            _ => self.past + self.tokens + 3,
        }
    }

    /// A cache whose rows after the last position hold no numbers.
    fn cache(&self, t: &mut Tensors<'_>, width: usize) -> Result<TensorView, KernelError> {
        let (capacity, wide) = (self.capacity(), width + self.gap);
        let mut values = t.random(capacity * self.kv_heads * wide);
        let used = (self.past + self.tokens).min(capacity) * self.kv_heads * wide;
        values[used..].fill(f32::NAN);
        t.typed(self.ty, &[capacity, self.kv_heads, wide], &values)?.narrow(2, 0, width)
    }

    fn positions(&self, t: &mut Tensors<'_>) -> Result<TensorView, KernelError> {
        let first = self.past as i32;
        t.ints(&[self.tokens], &(first..first + self.tokens as i32).collect::<Vec<_>>())
    }

    fn queries(&self, t: &mut Tensors<'_>) -> Result<TensorView, KernelError> {
        let values: Vec<f32> = t.random(self.tokens * self.heads * self.d).iter().map(|x| 3.0 * x).collect();
        t.strided(&[self.tokens, self.heads, self.d], &values, self.gap, 2 * self.gap)
    }

    /// Room and zeros, none where keys are not spread.
    fn spread(&self, t: &mut Tensors<'_>) -> Result<Option<Spread>, KernelError> {
        let Some(counters) = Attention::counters(self.tokens, self.heads, self.kv_heads) else { return Ok(None) };
        let Some(room) = Attention::room(self.tokens, self.heads, self.kv_heads, self.dv) else { return Ok(None) };
        Ok(Some(Spread { room: t.output(&[room])?, counters: t.ints(&[counters], &vec![0; counters])? }))
    }

    fn scores(self, name: &str) -> Case {
        Case::new("attention_scores", name, 2e-6, move |t| {
            let (q, k, positions) = (self.queries(t)?, self.cache(t, self.d)?, self.positions(t)?);
            let scores = t.strided_output(&[self.tokens, self.heads, self.capacity()], self.gap, 2 * self.gap)?;
            let Self { window, softcap, ring, .. } = self;
            Ok(Box::new(AttentionScores { q, k, positions, scores, scale: 0.3, window, softcap, ring }))
        })
    }

    fn values(self, name: &str) -> Case {
        // Sums over many keys are put together in another order.
        let tolerance = if self.past > 8000 { 5e-6 } else { 2e-6 };
        Case::new("attention_values", name, tolerance, move |t| {
            let weights = t.random(self.tokens * self.heads * self.capacity());
            let p = t.strided(&[self.tokens, self.heads, self.capacity()], &weights, self.gap, self.gap)?;
            let (v, positions) = (self.cache(t, self.dv)?, self.positions(t)?);
            let out = t.strided_output(&[self.tokens, self.heads, self.dv], 2 * self.gap, 3 * self.gap)?;
            Ok(Box::new(AttentionValues { p, v, positions, out, window: self.window, ring: self.ring }))
        })
    }

    fn case(self, name: &str) -> Case {
        let visible = |t: usize| (self.past + t + 1).min(self.window.map_or(usize::MAX, |w| w as usize));
        // Rows that are read at least once, and queries and results.
        let rows = (0..self.tokens).map(visible).max().unwrap_or(0) + self.tokens - 1;
        let cache = rows.min(self.capacity()) * self.kv_heads * (self.d + self.dv) * self.ty.type_bytes();
        let bytes = cache + 4 * self.tokens * self.heads * (self.d + self.dv);
        let case = Case::new("attention", name, 5e-6, move |t| {
            let (q, k) = (self.queries(t)?, self.cache(t, self.d)?);
            let v = if self.shared { k.narrow(2, 0, self.dv)? } else { self.cache(t, self.dv)? };
            let sinks = if self.sinks { Some(t.noise(&[self.heads])?) } else { None };
            let shape = [self.tokens, self.heads, self.dv];
            let out = if self.codes { t.output(&shape)? } else { t.strided_output(&shape, self.gap, self.gap)? };
            Ok(Box::new(Attention {
                q,
                k,
                v,
                positions: self.positions(t)?,
                out,
                scale: (self.d as f32).sqrt().recip(),
                window: self.window,
                softcap: self.softcap,
                sinks,
                ring: self.ring,
                codes: if self.codes { Some(t.whole_codes(&shape)?) } else { None },
                spread: if self.spread { self.spread(t)? } else { None },
            }))
        });
        case.touching(bytes).with_own_codes(self.codes)
    }
}

/// Few tokens whose keys are spread: of one slice and of many, and shapes that are not spread after all.
fn spread(list: &mut Vec<Case>) {
    let local = Shape { spread: true, heads: 4, kv_heads: 2, d: 256, dv: 256, past: 11, codes: true, ..PLAIN };
    let latent = Shape { spread: true, heads: 16, kv_heads: 1, d: 576, dv: 512, past: 11, shared: true, ..PLAIN };
    let small = Shape { spread: true, heads: 4, kv_heads: 1, d: 64, dv: 64, ..PLAIN };
    for (name, shape) in [
        ("local heads", local),
        ("global heads", Shape { heads: 16, d: 512, dv: 512, ..local }),
        ("latent heads", latent),
        ("latent heads, 200 keys", Shape { past: 199, ..latent }),
        ("latent heads, more than 16", Shape { heads: 20, past: 40, ..latent }),
        ("two slices of 80 keys, codes", Shape { heads: 2, past: 159, ..local }),
        ("one key", Shape { past: 0, ..small }),
        ("16 keys", Shape { past: 15, ..small }),
        ("17 keys", Shape { past: 16, ..small }),
        ("a whole tile", Shape { past: 127, ..small }),
        ("a key more than a tile", Shape { past: 128, ..small }),
        ("many slices", Shape { past: 2000, ..small }),
        ("slices of more than a tile", Shape { past: 5000, tokens: 8, kv_heads: 2, ..small }),
        ("some tokens around the edge of a slice", Shape { past: 126, tokens: 5, ..small }),
        ("codes of many slices", Shape { past: 700, codes: true, d: 32, dv: 128, ..small }),
        ("codes of few tokens", Shape { past: 60, tokens: 3, codes: true, ..small }),
        ("a ring that has wrapped", Shape { past: 777, tokens: 4, window: Some(200), ring: true, ..small }),
        ("a ring that is not full", Shape { past: 5, tokens: 3, window: Some(16), ring: true, ..small }),
        ("a window", Shape { past: 600, tokens: 2, window: Some(300), gap: 8, ..small }),
        ("softcap and sinks", Shape { past: 400, tokens: 2, softcap: Some(2.0), sinks: true, ..small }),
        ("sinks of one slice", Shape { past: 40, sinks: true, ..small }),
        ("more tokens than are spread", Shape { past: 40, tokens: 9, codes: true, ..small }),
        ("an odd width", Shape { past: 40, d: 48, dv: 96, codes: true, ..small }),
        ("F32", Shape { past: 150, codes: true, ty: QuantType::F32, ..small }),
        ("rows that are not aligned", Shape { past: 150, gap: 1, ..small }),
    ] {
        list.push(shape.case(&format!("spread: {name}")));
    }
    let deep = |shape: Shape| Shape { past: 16383, ..shape };
    for (name, shape) in [
        ("local heads, 12 keys", Shape { heads: 16, kv_heads: 8, ..local }),
        ("local heads, a window of 1024", Shape { heads: 16, kv_heads: 8, window: Some(1024), past: 16383, ..local }),
        ("global heads, 12 keys", Shape { heads: 16, d: 512, dv: 512, ..local }),
        ("global heads, 16384 keys", deep(Shape { heads: 16, d: 512, dv: 512, ..local })),
        ("latent heads, 1024 keys", Shape { past: 1023, ..latent }),
        ("latent heads, 16384 keys", deep(latent)),
    ] {
        list.push(shape.case(&format!("spread widely: {name}")).large());
    }
}

/// Values that are the first part of the keys' rows: a compressed cache, in all ways of attention.
fn shared_rows(list: &mut Vec<Case>) {
    let latent = Shape { heads: 16, kv_heads: 1, d: 576, dv: 512, ..PLAIN };
    let odd = Shape { heads: 5, kv_heads: 1, d: 37, dv: 21, gap: 1, ..PLAIN };
    for (name, shape) in [
        ("one token", Shape { past: 300, ..latent }),
        ("F32, some tokens", Shape { past: 20, tokens: 3, ty: QuantType::F32, ..latent }),
        ("odd widths", Shape { past: 33, tokens: 7, ty: QuantType::BF16, ..odd }),
        ("odd widths, many tokens", Shape { past: 3, tokens: 40, ..odd }),
    ] {
        let views = move |t: &mut Tensors<'_>| {
            let k = shape.cache(t, shape.d)?;
            Ok::<_, KernelError>((k.clone(), k.narrow(2, 0, shape.dv)?, shape.positions(t)?))
        };
        let (heads, tokens) = (shape.heads, shape.tokens);
        let name = |what: &str| format!("values in the rows of keys, {name}{what}");
        list.push(Case::new("attention", name(""), 5e-6, move |t| {
            let (q, (k, v, positions)) = (shape.queries(t)?, views(t)?);
            let out = t.strided_output(&[tokens, heads, shape.dv], 1, 2)?;
            let (window, softcap, sinks, ring) = (None, None, None, false);
            Ok(Box::new(Attention {
                q,
                k,
                v,
                positions,
                out,
                scale: 0.07,
                window,
                softcap,
                sinks,
                ring,
                codes: None,
                spread: None,
            }))
        }));
        list.push(Case::new("attention_values", name(", scores in memory"), 2e-6, move |t| {
            let weights = t.random(tokens * heads * shape.capacity());
            let p = t.strided(&[tokens, heads, shape.capacity()], &weights, 0, 1)?;
            let (_, v, positions) = views(t)?;
            let out = t.output(&[tokens, heads, shape.dv])?;
            Ok(Box::new(AttentionValues { p, v, positions, out, window: None, ring: false }))
        }));
    }
}

pub(super) fn cases() -> Vec<Case> {
    let mut list = vec![
        PLAIN.case("one query"),
        Shape { past: 0, ..PLAIN }.case("one key"),
        Shape { past: 0, tokens: 5, ..PLAIN }.case("a prompt from the start"),
        Shape { past: 300, tokens: 9, ..PLAIN }.case("a prompt over several spans"),
        Shape { past: 1000, ty: QuantType::F32, ..PLAIN }.case("F32 cache"),
        Shape { past: 700, ty: QuantType::BF16, tokens: 2, ..PLAIN }.case("BF16 cache"),
        Shape { past: 126, tokens: 3, heads: 3, kv_heads: 3, ..PLAIN }.case("a key head each"),
        Shape { past: 40, tokens: 2, heads: 20, kv_heads: 1, ..PLAIN }.case("one key head for all"),
        Shape { past: 30, heads: 12, kv_heads: 4, d: 7, dv: 3, gap: 1, ..PLAIN }.case("odd widths and gaps"),
        Shape { past: 30, tokens: 2, d: 80, dv: 130, gap: 2, ty: QuantType::F32, ..PLAIN }
            .case("other widths of values"),
        Shape { past: 300, heads: 4, kv_heads: 1, d: 256, dv: 256, ..PLAIN }.case("wide heads"),
        Shape { past: 140, tokens: 2, heads: 16, kv_heads: 2, d: 512, dv: 512, ..PLAIN }.case("wider heads"),
        Shape { past: 150, heads: 16, kv_heads: 1, d: 576, dv: 512, ty: QuantType::BF16, ..PLAIN }.case("latent heads"),
        Shape { past: 20, heads: 2, kv_heads: 1, d: 300, dv: 1300, ..PLAIN }.case("values wider than a block"),
        Shape { past: 600, tokens: 3, window: Some(300), ..PLAIN }.case("window"),
        Shape { past: 3, tokens: 4, window: Some(1), ..PLAIN }.case("window of one"),
        Shape { past: 777, tokens: 4, window: Some(128), ring: true, ..PLAIN }.case("ring"),
        Shape { past: 5, tokens: 3, window: Some(16), ring: true, ..PLAIN }.case("a ring that is not full"),
        Shape { past: 400, tokens: 4, softcap: Some(2.0), ..PLAIN }.case("softcap"),
        Shape { past: 290, tokens: 4, sinks: true, ..PLAIN }.case("sinks"),
        Shape { past: 500, tokens: 3, sinks: true, window: Some(128), ring: true, ..PLAIN }.case("sinks and ring"),
    ];
    let model = Shape { heads: 32, kv_heads: 8, d: 128, dv: 128, ..PLAIN };
    list.push(Shape { past: 511, ..model }.case("decode, 512 keys").large());
    list.push(Shape { past: 8191, ..model }.case("decode, 8192 keys").large());
    list.push(Shape { past: 0, tokens: 512, ..model }.case("prompt of 512").large());
    list.push(Shape { past: 4096, tokens: 512, ..model }.case("prompt of 512 after 4096").large());
    shared_rows(&mut list);
    spread(&mut list);
    list.push(Case::new("attention", "positions in any order", 5e-6, |t| {
        let shape = Shape { past: 300, tokens: 6, heads: 4, ..PLAIN };
        let (q, k, v) = (shape.queries(t)?, shape.cache(t, shape.d)?, shape.cache(t, shape.dv)?);
        let (positions, out) = (t.ints(&[6], &[305, 0, 129, 128, 3, 260])?, t.output(&[6, 4, 64])?);
        let (window, softcap, sinks, ring) = (Some(100), None, None, false);
        Ok(Box::new(Attention {
            q,
            k,
            v,
            positions,
            out,
            scale: 0.1,
            window,
            softcap,
            sinks,
            ring,
            codes: None,
            spread: None,
        }))
    }));
    list.push(Case::new("attention", "far apart scores", 5e-6, |t| {
        let shape = Shape { past: 400, heads: 4, ..PLAIN };
        let (q, k, v) = (shape.queries(t)?, shape.cache(t, shape.d)?, shape.cache(t, shape.dv)?);
        let (positions, out) = (shape.positions(t)?, t.output(&[1, 4, 64])?);
        let (window, softcap, sinks, ring) = (None, None, None, false);
        Ok(Box::new(Attention {
            q,
            k,
            v,
            positions,
            out,
            scale: 40.0,
            window,
            softcap,
            sinks,
            ring,
            codes: None,
            spread: None,
        }))
    }));
    let few = [
        PLAIN,
        Shape { past: 0, heads: 4, ..PLAIN },
        Shape { past: 333, heads: 2, d: 512, dv: 512, ty: QuantType::BF16, softcap: Some(1.5), ..PLAIN },
        Shape { past: 200, tokens: 3, window: Some(50), gap: 3, ty: QuantType::F32, ..PLAIN },
        Shape { past: 200, tokens: 2, heads: 3, kv_heads: 3, window: Some(130), ring: true, ..PLAIN },
        Shape { past: 9, tokens: 2, heads: 20, kv_heads: 2, d: 7, dv: 5, ty: QuantType::BF16, ..PLAIN },
        Shape { past: 5, tokens: 2, window: Some(16), ring: true, gap: 8, d: 600, dv: 24, ..PLAIN },
    ];
    let many = [
        Shape { past: 70, tokens: 20, ..PLAIN },
        Shape { past: 0, tokens: 70, heads: 2, kv_heads: 1, d: 40, dv: 72, ty: QuantType::F32, ..PLAIN },
        Shape { past: 130, tokens: 9, heads: 16, window: Some(60), softcap: Some(2.0), gap: 1, ..PLAIN },
        Shape { past: 300, tokens: 33, heads: 3, kv_heads: 3, window: Some(100), ring: true, ..PLAIN },
        Shape { past: 3, tokens: 40, heads: 4, window: Some(90), ring: true, ty: QuantType::BF16, ..PLAIN },
        Shape { past: 60, tokens: 17, d: 7, dv: 5, heads: 4, ty: QuantType::BF16, ..PLAIN },
    ];
    for shape in few.into_iter().chain(many) {
        let ring = if shape.ring { " in a ring" } else { "" };
        let name = format!("{} {} tokens after {}{ring}", shape.ty, shape.tokens, shape.past);
        list.push(shape.scores(&name));
        list.push(shape.values(&name));
    }
    let deep = Shape { past: 16384, tokens: 512, heads: 16, d: 512, dv: 512, ..PLAIN };
    for (name, shape) in [("decode after 16384", Shape { tokens: 1, ..deep }), ("prompt of 512 after 16384", deep)] {
        list.push(shape.scores(name).large());
        list.push(shape.values(name).large());
    }
    for tokens in [3, 40] {
        let name = format!("{tokens} tokens after 50, a value that is no number for the last");
        list.push(Case::new("attention_values", name, 2e-6, move |t| {
            let shape = Shape { past: 50, tokens, heads: 2, kv_heads: 1, ..PLAIN };
            let (rows, used) = (shape.capacity(), shape.past + tokens);
            let mut values = t.random(rows * shape.dv);
            values[(used - 1) * shape.dv..].fill(f32::NAN);
            let (p, v) = (t.noise(&[tokens, 2, rows])?, t.typed(shape.ty, &[rows, 1, shape.dv], &values)?);
            let (positions, out) = (shape.positions(t)?, t.output(&[tokens, 2, shape.dv])?);
            Ok(Box::new(AttentionValues { p, v, positions, out, window: None, ring: false }))
        }));
    }
    list.push(Case::new("attention_values", "weights of rows that are not seen", 2e-6, |t| {
        let shape = Shape { past: 300, tokens: 6, heads: 4, ..PLAIN };
        let (p, v) = (t.noise(&[6, 4, shape.capacity()])?, shape.cache(t, shape.dv)?);
        let (positions, out) = (t.ints(&[6], &[305, 0, 129, 128, 3, 260])?, t.output(&[6, 4, 64])?);
        Ok(Box::new(AttentionValues { p, v, positions, out, window: Some(100), ring: false }))
    }));
    for [tokens, heads, columns] in [[1, 1, 1], [2, 3, 7], [1, 4, 5000], [9, 2, 300]] {
        list.push(Case::new("soft_max", format!("{tokens}x{heads}x{columns}"), 2e-6, move |t| {
            let mut x: Vec<f32> = t.random(tokens * heads * columns).iter().map(|x| 20.0 * x).collect();
            x.iter_mut().skip(2).step_by(3).for_each(|x| *x = f32::NEG_INFINITY);
            let x = t.strided(&[tokens, heads, columns], &x, 1, 3)?;
            Ok(Box::new(SoftMax { out: x.clone(), x }))
        }));
    }
    list.push(Case::new("soft_max", "nothing visible, NaN and infinity", 2e-6, |t| {
        let mut x = vec![0.0; 3 * 40];
        x[..40].fill(f32::NEG_INFINITY);
        x[45] = f32::NAN;
        x[100] = f32::INFINITY;
        Ok(Box::new(SoftMax { x: t.floats(&[1, 3, 40], &x)?, out: t.output(&[1, 3, 40])? }))
    }));
    list
}
