//! The choice of experts and the products with their first weights.

use evergraph_pool::driver::DeviceInfo;

use super::{
    ExpertMatMul, Op, Router, TensorView, all, are_apart, behind, cast, has_kernels, is_able, is_dead, is_plain,
    may_come,
};
use crate::KernelError;
use crate::ops::check::Check;
use crate::ops::{Call, Glu, Launches, Scoring};

/// A [`Router`] of one token and one or two products with the experts that it chooses, in one launch.
///
/// With `glu` the products are a gate and its unit, two or merged, and the codes of what comes of both are written; the products
/// themselves are written nowhere. Each block of the launch makes the choice for itself. No groups of experts, at most 256 experts and 32 used.
#[derive(Clone, Debug)]
pub struct FusedRouter {
    /// The choice.
    pub router: Router,
    /// `[E, out, D]` each, of the same eight-bit codes: gate and up, or both merged.
    pub products: Vec<ExpertMatMul>,
    /// Of the products, as codes.
    pub glu: Option<Glu>,
}

const MOST_EXPERTS: usize = 256;
const MOST_USED: usize = 32;
/// Columns at most: what kernels stage at once.
const MOST_COLS: usize = 8192;

/// Makes a group of the choice at `start` and the products that read it.
pub(super) fn find(list: &mut [Option<Box<dyn Op>>], start: usize, device: &DeviceInfo) {
    let Some(router) = list[start].as_ref().and_then(cast::<Router>).cloned() else { return };
    let mut group = FusedRouter { router, products: Vec::new(), glu: None };
    let mut taken = Vec::new();
    for (place, op) in behind(list, start) {
        let Some(product) = cast::<ExpertMatMul>(op) else { continue };
        if group.takes(product) && may_come(list, start, place, &taken) {
            group.products.push(product.clone());
            taken.push(place);
        }
    }
    if group.products.is_empty() || !is_able(&group, device) {
        return;
    }
    if let Some((place, gated)) = with_unit(list, start, &group, &taken).filter(|(_, gated)| is_able(gated, device)) {
        taken.push(place);
        group = gated;
    }
    list[start] = Some(Box::new(group));
    taken.into_iter().for_each(|place| list[place] = None);
}

/// The group with the gated unit of its products, and the place of that.
fn with_unit(
    list: &[Option<Box<dyn Op>>],
    start: usize,
    group: &FusedRouter,
    taken: &[usize],
) -> Option<(usize, FusedRouter)> {
    let (place, glu) = behind(list, start).find_map(|(place, op)| {
        let glu = cast::<Glu>(op)?;
        group.is_unit(glu).then(|| (place, glu.clone()))
    })?;
    let own = group.products.iter().all(|product| is_dead(list, place, &product.y));
    let may = own && may_come(list, start, place, taken);
    may.then(|| (place, FusedRouter { glu: Some(glu), ..group.clone() }))
}

impl FusedRouter {
    /// Whether this is the unit of the products, which are then all its own.
    fn is_unit(&self, glu: &Glu) -> bool {
        let hidden = glu.gate.cols();
        let of_both = match self.products.as_slice() {
            [gate, up] => glu.gate.same_place(&gate.y) && glu.up.same_place(&up.y),
            [both] if both.y.cols() == 2 * hidden => {
                let half = |start| both.y.narrow(2, start, hidden).ok();
                let is = |view: &TensorView, half: Option<TensorView>| half.is_some_and(|half| half.same_place(view));
                is(&glu.gate, half(0)) && is(&glu.up, half(hidden))
            }
            _ => false,
        };
        of_both && glu.out.is_none() && glu.codes.is_some()
    }

    fn takes(&self, product: &ExpertMatMul) -> bool {
        let same = |first: &ExpertMatMul| {
            first.w.ty() == product.w.ty() && first.x.same_place(&product.x) && first.w.dim(2) == product.w.dim(2)
        };
        self.products.len() < 2
            && product.ids.same_place(&self.router.ids)
            && product.x.rank() == 2
            && product.w.dim(2) <= MOST_COLS
            && product.more.is_none()
            && has_kernels(&product.w)
            && product.scales.as_ref().is_some_and(is_plain)
            && is_plain(&product.x)
            && self.products.first().is_none_or(same)
    }

    fn parts(&self) -> Vec<Box<dyn Op>> {
        let mut list: Vec<Box<dyn Op>> = vec![Box::new(self.router.clone())];
        list.extend(self.products.iter().map(|product| Box::new(product.clone()) as Box<dyn Op>));
        list.extend(self.glu.iter().map(|glu| Box::new(glu.clone()) as Box<dyn Op>));
        list
    }
}

impl Op for FusedRouter {
    fn name(&self) -> &'static str {
        "fused_router"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let made = [&self.router.ids];
        let others =
            self.products.iter().flat_map(Op::reads).filter(|view| !made.iter().any(|made| made.same_place(view)));
        all([self.router.reads(), others.collect()])
    }

    fn writes(&self) -> Vec<&TensorView> {
        let results = match &self.glu {
            Some(glu) => glu.writes(),
            None => self.products.iter().map(|product| &product.y).collect(),
        };
        all([self.router.writes(), results])
    }

    fn leftovers(&self) -> Vec<&TensorView> {
        self.products.iter().filter(|_| self.glu.is_some()).map(|product| &product.y).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.parts().iter().try_for_each(|part| part.check())?;
        let check = Check(self.name());
        let Router { logits, ids, groups, .. } = &self.router;
        let (tokens, experts, used) = (logits.dim(0), logits.dim(1), ids.dim(1));
        check.parameter(tokens == 1, "tokens", tokens, "one")?;
        check.parameter(experts <= MOST_EXPERTS, "experts", experts, "at most 256")?;
        check.parameter(used <= MOST_USED, "used", used, "at most 32")?;
        check.parameter(groups.is_none_or(|(all, _)| all == 1), "groups", groups, "none")?;
        let all_fit = !self.products.is_empty()
            && self.products.iter().enumerate().all(|(index, product)| {
                let before = Self { router: self.router.clone(), products: self.products[..index].to_vec(), glu: None };
                before.takes(product) && product.w.dim(0) == experts
            });
        check.parameter(all_fit, "products", &self.products, "one or two of the chosen, of one type and input")?;
        let unit = self.glu.as_ref().is_none_or(|glu| self.is_unit(glu));
        check.parameter(unit, "glu", &self.glu, "of the products, as codes")?;
        let (reads, results) = (self.reads(), self.writes());
        let free = results.iter().all(|to| !reads.iter().any(|from| from.overlaps(to)));
        check.parameter(free, "results", &results, "apart from all that is read")?;
        let mut ops = self.parts();
        ops.truncate(1 + self.products.len());
        check.parameter(are_apart(&ops), "products", &self.products, "that write nothing that others read")
    }

    fn call(&self) -> Call {
        let Router { logits, bias, ids, weights, scoring, norm, scale, .. } = &self.router;
        let mut call = Call::new(1)
            .view(logits)
            .optional(bias.as_ref())
            .view(ids)
            .view(weights)
            .dim(logits.dim(1))
            .dim(ids.dim(1))
            .dim(match scoring {
                Scoring::Softmax => 0,
                Scoring::Sigmoid => 1,
                Scoring::SqrtSoftplus => 2,
            })
            .dim(usize::from(*norm))
            .float(*scale);
        for index in 0..2 {
            let product = self.products.get(index);
            let y = product.map(|product| &product.y);
            call = call
                .optional(product.map(|product| &product.w))
                .dim(product.map_or(0, |product| product.w.dim(1)))
                .optional(y)
                .optional_stride(y, 1);
        }
        call
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" {
            return crate::cuda::launch::fused_router(self, device);
        }
        self.parts().iter().flat_map(|part| part.launches(device)).collect()
    }
}
