//! A norm of the residual stream and the products that read it.

use evergraph_pool::driver::DeviceInfo;

use super::{
    MatMul, Op, ResidualNorm, RmsNorm, TensorView, all, are_apart, behind, cast, commute, has_kernels, is_able,
    is_dead, is_plain, may_come,
};
use crate::KernelError;
use crate::ops::check::Check;
use crate::ops::{Call, Glu, Launches, Normed, Quantize};
use crate::quant::QuantType;

/// A [`ResidualNorm`] of one token and products that read its norms, in one launch.
///
/// Up to four products with weights in blocks of one type, which read the codes of one norm, and one with a weight of floats, which
/// reads the floats of any. With `glu` there are two products, a gate and its unit, and what comes of both is written in place of the
/// gate; up is written nowhere. Each block of the launch makes the norms for itself; the last to have read the residual stream writes it.
#[derive(Clone, Debug)]
pub struct FusedNorm {
    /// The norm. Without parts the stream stays as it is.
    pub norm: ResidualNorm,
    /// `[out, D]` each, of eight-bit codes.
    pub products: Vec<MatMul>,
    /// `[E, D]` F32, of floats.
    pub router: Option<MatMul>,
    /// Of the first product and the second, to the first's place.
    pub glu: Option<Glu>,
    /// One I32, zero before and after.
    pub counter: TensorView,
}

/// Columns at most: what the threads of a block have in registers.
const MOST_COLS: usize = 4096;
const MOST_PRODUCTS: usize = 4;

/// Makes a group of the norm at `start` and what reads it.
pub(super) fn find(list: &mut [Option<Box<dyn Op>>], start: usize, device: &DeviceInfo, counter: &TensorView) {
    let Some(norm) = list[start].as_ref().and_then(read) else { return };
    let mut group = FusedNorm { norm, products: Vec::new(), router: None, glu: None, counter: counter.clone() };
    if !group.norm_fits() {
        return;
    }
    let mut taken = Vec::new();
    for (place, op) in behind(list, start) {
        let Some(product) = cast::<MatMul>(op) else { continue };
        if group.takes(product) && may_come(list, start, place, &taken) {
            if product.scales.is_some() {
                group.products.push(product.clone())
            } else {
                group.router = Some(product.clone())
            }
            taken.push(place);
        }
    }
    if group.products.is_empty() || !is_able(&group, device) {
        return;
    }
    let gated = with_unit(list, start, &group, &taken).filter(|(_, gated, _)| is_able(gated, device));
    let group = match gated {
        Some((place, gated, quantize)) => {
            list[place] = Some(Box::new(quantize));
            gated
        }
        None => group,
    };
    list[start] = Some(Box::new(group));
    taken.into_iter().for_each(|place| list[place] = None);
}

/// The group with the gated unit of its two products, the place of that, and what is to be there instead: the codes of its floats.
#[allow(clippy::borrowed_box, reason = "what lists hold")]
fn with_unit(
    list: &[Option<Box<dyn Op>>],
    start: usize,
    group: &FusedNorm,
    taken: &[usize],
) -> Option<(usize, FusedNorm, Quantize)> {
    let [gate, up] = group.products.as_slice() else { return None };
    let (place, glu) = behind(list, start).find_map(|(place, op)| {
        let glu = cast::<Glu>(op)?;
        (glu.gate.same_place(&gate.y) && glu.up.same_place(&up.y)).then(|| (place, glu.clone()))
    })?;
    let codes = glu.codes.clone().filter(|_| glu.out.is_none())?;
    // Gate and up are nobody else's, and what comes of them may be written earlier than it was.
    let own = |view: &TensorView| is_dead(list, place, view);
    let written = Glu { out: Some(glu.gate.clone()), codes: None, ..glu };
    let between = |at: &usize| !taken.contains(at) && *at != place;
    let free = (start + 1..place).filter(between).all(|at| list[at].as_ref().is_none_or(|op| commute(&written, &**op)));
    if !(own(&written.gate) && own(&written.up) && free && written.gate.rank() == 2) {
        return None;
    }
    let quantize = Quantize { x: written.gate.clone(), q: codes.q, scales: codes.scales };
    Some((place, FusedNorm { glu: Some(written), ..group.clone() }, quantize))
}

/// The norm that an op is.
#[allow(clippy::borrowed_box, reason = "what lists hold")]
fn read(op: &Box<dyn Op>) -> Option<ResidualNorm> {
    if let Some(norm) = cast::<ResidualNorm>(op) {
        return Some(norm.clone());
    }
    let norm = cast::<RmsNorm>(op)?;
    let normed =
        Normed { weight: norm.weight.clone()?, scale: norm.scale, out: norm.out.clone(), codes: norm.codes.clone() };
    // Other blocks read the row while results are written.
    let apart = normed_apart(&normed, &norm.x);
    let plain = norm.x.rank() == 2 && norm.residual.is_none() && norm.gain == 1.0 && apart;
    plain.then(|| ResidualNorm {
        h: norm.x.clone(),
        parts: Vec::new(),
        weight: None,
        gain: 1.0,
        eps: norm.eps,
        normed: vec![normed],
    })
}

fn normed_apart(normed: &Normed, h: &TensorView) -> bool {
    let codes = normed.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]);
    normed.out.iter().chain(codes).all(|view| !view.overlaps(h))
}

impl FusedNorm {
    /// Whether kernels have room for the norm.
    fn norm_fits(&self) -> bool {
        let ResidualNorm { h, parts, weight, normed, .. } = &self.norm;
        let rows =
            [h].into_iter().chain(weight).chain(parts.iter().flat_map(|part| [&part.x].into_iter().chain(&part.norm)));
        let normed = normed.iter().flat_map(|normed| {
            let codes = normed.codes.iter().flat_map(|codes| [&codes.q, &codes.scales]);
            [&normed.weight].into_iter().chain(&normed.out).chain(codes)
        });
        h.dim(0) == 1
            && h.cols() <= MOST_COLS
            && h.cols().is_multiple_of(32)
            && rows.chain(normed).all(is_plain)
            && self.norm.normed.iter().all(|normed| normed.scale.is_finite())
    }

    /// The number of the norm whose codes a product reads, or whose floats.
    fn norm_of(&self, product: &MatMul) -> Option<usize> {
        self.norm.normed.iter().position(|normed| match (&product.scales, &normed.codes, &normed.out) {
            (Some(scales), Some(codes), _) => codes.q.same_place(&product.x) && codes.scales.same_place(scales),
            (None, _, Some(out)) => out.same_place(&product.x),
            _ => false,
        })
    }

    fn takes(&self, product: &MatMul) -> bool {
        let Some(of) = self.norm_of(product) else { return false };
        if product.scales.is_none() {
            return self.router.is_none() && product.w.ty() == QuantType::F32 && is_plain(&product.w);
        }
        let like_others =
            self.products.first().is_none_or(|first| first.w.ty() == product.w.ty() && self.norm_of(first) == Some(of));
        has_kernels(&product.w) && like_others && self.products.len() < MOST_PRODUCTS
    }

    /// Whether the residual stream is written.
    pub(crate) fn sums(&self) -> bool {
        !self.norm.parts.is_empty()
    }

    /// The number of the norm that products in blocks read, and of that of the router.
    pub(crate) fn which(&self) -> [usize; 2] {
        let of = |product: Option<&MatMul>| product.and_then(|product| self.norm_of(product)).unwrap_or(0);
        [of(self.products.first()), of(self.router.as_ref())]
    }

    /// The ops that it is, as they would run one after the other. Without parts the norm is one of itself.
    fn parts(&self) -> Vec<Box<dyn Op>> {
        let ResidualNorm { h, eps, normed, .. } = &self.norm;
        let mut list: Vec<Box<dyn Op>> = Vec::new();
        if self.sums() {
            list.push(Box::new(self.norm.clone()));
        }
        for normed in normed.iter().filter(|_| !self.sums()) {
            let norm = RmsNorm::new(h.clone(), normed.weight.clone(), h.clone(), *eps);
            let (out, codes) = (normed.out.clone(), normed.codes.clone());
            list.push(Box::new(RmsNorm { scale: normed.scale, out, codes, ..norm }));
        }
        for product in self.products.iter().chain(&self.router) {
            list.push(Box::new(product.clone()));
        }
        list.extend(self.glu.iter().map(|glu| Box::new(glu.clone()) as Box<dyn Op>));
        list
    }
}

impl Op for FusedNorm {
    fn name(&self) -> &'static str {
        "fused_norm"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let mut norm = self.norm.reads();
        norm.push(&self.counter);
        // What the norm writes goes to the products inside the launch.
        let made = self.norm.writes();
        let weights = self.products.iter().chain(&self.router);
        let others = weights.flat_map(Op::reads).filter(|view| !made.iter().any(|made| made.same_place(view)));
        all([norm, others.collect()])
    }

    fn writes(&self) -> Vec<&TensorView> {
        let mut norm = self.norm.writes();
        if !self.sums() {
            norm.retain(|view| **view != self.norm.h);
        }
        norm.push(&self.counter);
        // The unit writes where the gate is; up is handed on.
        let products = self.products.iter().take(if self.glu.is_some() { 1 } else { MOST_PRODUCTS });
        all([norm].into_iter().chain(products.chain(&self.router).map(Op::writes)))
    }

    fn leftovers(&self) -> Vec<&TensorView> {
        self.glu.iter().map(|glu| &glu.up).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.parts().iter().try_for_each(|part| part.check())?;
        let check = Check(self.name());
        check.parameter(self.norm_fits(), "norm", &self.norm, "of one token, contiguous, at most 4096 columns")?;
        let fits = self.products.iter().chain(&self.router).all(|product| self.norm_of(product).is_some());
        let types = self.products.iter().all(|p| has_kernels(&p.w) && p.w.ty() == self.products[0].w.ty());
        let same = self.products.iter().all(|p| self.norm_of(p) == self.norm_of(&self.products[0]));
        check.parameter(fits && types && same, "products", &self.products, "readers of one norm, of one type")?;
        check.parameter(
            (1..=MOST_PRODUCTS).contains(&self.products.len()),
            "products",
            self.products.len(),
            "1 to 4",
        )?;
        let unit = self.glu.as_ref().is_none_or(|glu| {
            let [gate, up] = self.products.as_slice() else { return false };
            let of_both = glu.gate.same_place(&gate.y) && glu.up.same_place(&up.y) && gate.w.dim(0) == up.w.dim(0);
            of_both && glu.codes.is_none() && glu.out.as_ref().is_some_and(|out| out.same_place(&gate.y))
        });
        check.parameter(unit, "glu", &self.glu, "of both products, to the place of the first")?;
        let mut ops = self.parts();
        ops.truncate(ops.len() - usize::from(self.glu.is_some()));
        check.parameter(are_apart(&ops), "products", &self.products, "that write nothing that others read before")?;
        check.i32("counter", &self.counter)
    }

    fn call(&self) -> Call {
        let ResidualNorm { h, parts, weight, normed, gain, eps } = &self.norm;
        let mut call = Call::new(1).dim(h.cols()).float(*eps).float(*gain);
        for index in 0..2 {
            let part = parts.get(index);
            call = call.optional(part.map(|part| &part.x)).optional(part.and_then(|part| part.norm.as_ref()));
        }
        call = call.view(h).optional(Some(h).filter(|_| self.sums())).optional(weight.as_ref());
        for index in 0..ResidualNorm::MOST_NORMED {
            let normed = normed.get(index);
            let codes = normed.and_then(|normed| normed.codes.as_ref());
            call = call
                .optional(normed.map(|normed| &normed.weight))
                .optional(normed.and_then(|normed| normed.out.as_ref()))
                .optional(codes.map(|codes| &codes.q))
                .optional(codes.map(|codes| &codes.scales))
                .float(normed.map_or(1.0, |normed| normed.scale));
        }
        call
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" {
            return crate::cuda::launch::fused_norm(self, device);
        }
        self.parts().iter().flat_map(|part| part.launches(device)).collect()
    }
}
