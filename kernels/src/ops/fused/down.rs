//! The last products of feed-forward parts.

use evergraph_pool::driver::DeviceInfo;

use super::{
    ExpertMatMul, ExpertSum, MatMul, Op, Quantize, TensorView, all, behind, cast, commute, has_kernels, is_able,
    is_dead, is_plain, may_come, may_wait,
};
use crate::KernelError;
use crate::ops::check::Check;
use crate::ops::{Call, Launches};

/// A product of one token's floats, as codes, or a product for each chosen expert with the weighted sum over them, or both side by side, in
/// one launch. Codes of the floats and outputs of single experts are written nowhere.
#[derive(Clone, Debug)]
pub struct FusedDown {
    /// The dense part: codes of floats, and `[D, F]`.
    pub dense: Option<(Quantize, MatMul)>,
    /// `[E, D, F]`, of codes `[1, K, F]`, and the sum.
    pub experts: Option<(ExpertMatMul, ExpertSum)>,
}

const MOST_USED: usize = 32;
/// 32 columns each, over all slots: what kernels stage at once.
const MOST_UNITS: usize = 1024;

/// Makes a group of the op at `start`, codes or products of experts, and what reads it.
pub(super) fn find(list: &mut [Option<Box<dyn Op>>], start: usize, device: &DeviceInfo) {
    if let Some(quantize) = list[start].as_ref().and_then(cast::<Quantize>).cloned() {
        let reader = behind(list, start).find(|(_, op)| {
            op.reads().into_iter().any(|view| view.overlaps(&quantize.q) || view.overlaps(&quantize.scales))
        });
        let Some((place, product)) = reader.and_then(|(place, op)| Some((place, cast::<MatMul>(op)?.clone()))) else {
            return;
        };
        let dead = is_dead(list, place, &quantize.q) && is_dead(list, place, &quantize.scales);
        let group = FusedDown { dense: Some((quantize, product)), experts: None };
        if dead && may_wait(list, start, place) && is_able(&group, device) {
            list[place] = Some(Box::new(group));
            list[start] = None;
        }
        return;
    }
    let Some(product) = list[start].as_ref().and_then(cast::<ExpertMatMul>).cloned() else { return };
    let sum = behind(list, start).find_map(|(at, op)| {
        let sum = cast::<ExpertSum>(op).filter(|sum| sum.y.same_place(&product.y))?;
        Some((at, sum.clone()))
    });
    let Some((at, sum)) = sum.filter(|(at, _)| is_dead(list, *at, &product.y) && may_come(list, start, *at, &[]))
    else {
        return;
    };
    let group = FusedDown { dense: None, experts: Some((product, sum)) };
    if is_able(&group, device) {
        list[start] = Some(Box::new(group));
        list[at] = None;
    }
}

/// Puts dense groups that may wait into the next one of experts.
pub(super) fn join(list: &mut Vec<Box<dyn Op>>, device: &DeviceInfo) {
    let mut start = 0;
    while start < list.len() {
        let dense = cast::<FusedDown>(&list[start]).filter(|group| group.experts.is_none()).cloned();
        let later = list.iter().enumerate().skip(start + 1).take(super::SIGHT).find_map(|(place, op)| {
            let group = cast::<FusedDown>(op).filter(|group| group.dense.is_none())?;
            Some((place, group.clone()))
        });
        if let (Some(dense), Some((place, group))) = (dense, later)
            && list[start + 1..place].iter().all(|between| commute(&dense, &**between))
        {
            let both = FusedDown { dense: dense.dense, ..group };
            if is_able(&both, device) {
                list[place] = Box::new(both);
                list.remove(start);
                continue;
            }
        }
        start += 1;
    }
}

impl FusedDown {
    fn parts(&self) -> Vec<Box<dyn Op>> {
        let mut list: Vec<Box<dyn Op>> = Vec::new();
        if let Some((quantize, product)) = &self.dense {
            list.extend([Box::new(quantize.clone()) as Box<dyn Op>, Box::new(product.clone())]);
        }
        if let Some((product, sum)) = &self.experts {
            list.extend([Box::new(product.clone()) as Box<dyn Op>, Box::new(sum.clone())]);
        }
        list
    }

    /// The weights of its products.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &TensorView> {
        let dense = self.dense.iter().map(|(_, product)| &product.w);
        dense.chain(self.experts.iter().map(|(product, _)| &product.w))
    }

    fn dense_fits(&self) -> bool {
        self.dense.as_ref().is_none_or(|(quantize, product)| {
            let scales = product.scales.as_ref().map(TensorView::ptr);
            quantize.q.ptr() == product.x.ptr()
                && scales == Some(quantize.scales.ptr())
                && product.x.cols() == quantize.x.cols()
                && product.x.dim(0) == 1
                && quantize.x.rows() == 1
                && is_plain(&quantize.x)
                && product.w.dim(1) / 32 <= MOST_UNITS
        })
    }

    fn experts_fit(&self) -> bool {
        self.experts.as_ref().is_none_or(|(product, sum)| {
            let (used, cols) = (product.ids.dim(1), product.w.dim(2));
            product.scales.as_ref().is_some_and(is_plain)
                && is_plain(&product.x)
                && product.ids.dim(0) == 1
                && product.x.rank() == 3
                && product.more.is_none()
                && used <= MOST_USED
                && used * cols / 32 <= MOST_UNITS
                && sum.y.same_place(&product.y)
                && sum.residual.is_none()
                && sum.out.is_contiguous()
                && sum
                    .expert_scale
                    .as_ref()
                    .is_none_or(|(scale, ids)| ids.same_place(&product.ids) && scale.dim(0) == product.w.dim(0))
        })
    }
}

impl Op for FusedDown {
    fn name(&self) -> &'static str {
        "fused_down"
    }

    fn reads(&self) -> Vec<&TensorView> {
        let mut views = Vec::new();
        if let Some((quantize, product)) = &self.dense {
            views.push(vec![&quantize.x, &product.w]);
        }
        if let Some((product, sum)) = &self.experts {
            let scale = sum.expert_scale.iter().map(|(scale, _)| scale).collect();
            views.extend([product.reads(), vec![&sum.weights], scale]);
        }
        all(views)
    }

    fn writes(&self) -> Vec<&TensorView> {
        let dense = self.dense.iter().map(|(_, product)| &product.y);
        dense.chain(self.experts.iter().map(|(_, sum)| &sum.out)).collect()
    }

    fn leftovers(&self) -> Vec<&TensorView> {
        let dense = self.dense.iter().flat_map(|(quantize, _)| quantize.writes());
        dense.chain(self.experts.iter().map(|(product, _)| &product.y)).collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.parts().iter().try_for_each(|part| part.check())?;
        let check = Check(self.name());
        check.parameter(self.weights().count() > 0, "parts", 0, "a dense part, experts, or both")?;
        check.parameter(self.dense_fits(), "dense", &self.dense, "a product of one token's codes")?;
        check.parameter(self.experts_fit(), "experts", &self.experts, "products of one token's codes and their sum")?;
        let types = self.weights().all(has_kernels) && self.weights().map(TensorView::ty).is_sorted_by(|a, b| a == b);
        check.parameter(types, "weights", self.weights().map(TensorView::ty).collect::<Vec<_>>(), "one type")?;
        let (reads, writes) = (self.reads(), self.writes());
        let apart = writes.iter().all(|to| !reads.iter().any(|from| from.overlaps(to)));
        let alone = writes.len() < 2 || !writes[0].overlaps(writes[1]);
        check.parameter(apart && alone, "results", writes, "apart from all that is read")
    }

    /// None: the kernel takes what its launch works out, too (`args`).
    fn call(&self) -> Call {
        Call::none()
    }

    fn launches(&self, device: &DeviceInfo) -> Launches {
        if device.backend == "cuda" {
            return crate::cuda::launch::fused_down(self, device);
        }
        self.parts().iter().flat_map(|part| part.launches(device)).collect()
    }
}

impl FusedDown {
    /// The kernel's arguments, for so many blocks of the dense part, and so many warps (logarithms) that share its rows and the experts'.
    pub(crate) fn args(&self, dense_blocks: usize, dense_log: u32, log: u32) -> Call {
        let dense = self.dense.as_ref();
        let product = dense.map(|(_, product)| product);
        let call = Call::none()
            .dim(dense_blocks)
            .dim(dense_log as usize)
            .optional(product.map(|product| &product.w))
            .optional(dense.map(|(quantize, _)| &quantize.x))
            .dim(product.map_or(32, |product| product.w.dim(1)))
            .dim(product.map_or(0, |product| product.w.dim(0)))
            .optional(product.map(|product| &product.y))
            .dim(log as usize);
        let (product, sum) = self.experts.as_ref().map(|(product, sum)| (product, sum)).unzip();
        call.optional(product.map(|product| &product.w))
            .dim(product.map_or(0, |product| product.w.dim(0)))
            .optional(product.map(|product| &product.ids))
            .optional(sum.map(|sum| &sum.weights))
            .optional(sum.and_then(|sum| sum.expert_scale.as_ref()).map(|(scale, _)| scale))
            .optional(product.map(|product| &product.x))
            .optional(product.and_then(|product| product.scales.as_ref()))
            .dim(product.map_or(0, |product| product.ids.dim(1)))
            .dim(product.map_or(32, |product| product.w.dim(2)))
            .dim(product.map_or(0, |product| product.w.dim(1)))
            .optional(sum.map(|sum| &sum.out))
    }
}
