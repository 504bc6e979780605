//! Choice of experts.

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;

/// How router outputs become scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Square root of softplus of each.
    SqrtSoftplus,
}

/// What a group of experts counts by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GroupRank {
    /// The sum of its two greatest `s + bias` (DeepSeek-V3).
    #[default]
    TwoGreatest,
    /// Its greatest `s + bias` (DeepSeek-V2).
    Greatest,
}

/// The top K experts of each token and their weights, in `f32`.
///
/// `s = scoring(logits)`; chosen are the K greatest `s + bias`, best first, ties to the lowest index. Weights are
/// `s` of the chosen (never the biased value), over their sum if `norm`, times `scale`. With groups only experts
/// of the best groups compete; a group counts as [`GroupRank`] says.
#[derive(Clone, Debug)]
pub struct Router {
    /// `[T, E]` F32, at most 4096 experts.
    pub logits: TensorView,
    /// `[E]` F32, added for the choice only.
    pub bias: Option<TensorView>,
    /// `[T, K]` I32, contiguous.
    pub ids: TensorView,
    /// `[T, K]` F32, contiguous.
    pub weights: TensorView,
    /// From logits to scores.
    pub scoring: Scoring,
    /// (groups, groups used); none or (1, 1) means all experts compete.
    pub groups: Option<(u32, u32)>,
    /// What a group counts.
    pub group_rank: GroupRank,
    /// Whether weights are divided by their sum.
    pub norm: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// Scores, ranks and sums of groups of a token fit the shared memory that every device has.
const MAX_EXPERTS: usize = 4096;

impl Op for Router {
    fn name(&self) -> &'static str {
        "router"
    }

    fn reads(&self) -> Vec<&TensorView> {
        [Some(&self.logits), self.bias.as_ref()].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.ids, &self.weights]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        [Some(&mut self.logits), self.bias.as_mut()].into_iter().flatten().collect()
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("ids", &self.ids, &["T", "K"])?;
        let used = self.ids.dim(1);
        check.choice(&self.logits, [&self.ids, &self.weights], used, &[])?;
        let experts = self.logits.dim(1);
        check.parameter(experts <= MAX_EXPERTS, "experts", experts, "at most 4096")?;
        if let Some(bias) = &self.bias {
            check.f32("bias", bias)?;
            check.shape("bias", bias, &[experts])?;
        }
        let (groups, groups_used) = self.groups.unwrap_or((1, 1));
        let fits = groups >= 1
            && (1..=groups).contains(&groups_used)
            && experts.is_multiple_of(groups as usize)
            && (groups == 1 || experts / groups as usize >= 2);
        check.parameter(fits, "groups", self.groups, "a divisor of the experts, with no more used than there are")?;
        let available = experts / groups as usize * groups_used as usize;
        if used > available {
            return Err(check.bad_shape("ids", &self.ids, format!("[T, at most {available} experts]")));
        }
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")
    }

    fn call(&self) -> Call {
        let (groups, groups_used) = self.groups.unwrap_or((1, 1));
        // One warp a token; scores, ranks and sums of groups are in shared memory.
        let experts = self.logits.dim(1);
        Call::new(self.logits.dim(0))
            .threads(1, 1)
            .shared_floats(2 * experts + groups as usize)
            .view(&self.logits)
            .stride(&self.logits, 0)
            .optional(self.bias.as_ref())
            .view(&self.ids)
            .view(&self.weights)
            .dim(self.logits.dim(0))
            .dim(self.logits.dim(1))
            .dim(self.ids.dim(1))
            .dim(match self.scoring {
                Scoring::Softmax => 0,
                Scoring::Sigmoid => 1,
                Scoring::SqrtSoftplus => 2,
            })
            .dim(groups as usize)
            .dim(groups_used as usize)
            .dim(usize::from(self.group_rank == GroupRank::Greatest))
            .dim(usize::from(self.norm))
            .float(self.scale)
    }
}
