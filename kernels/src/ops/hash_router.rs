//! Experts chosen by the token's number.

use super::check::Check;
use super::{Call, Op, Scoring, TensorView};
use crate::KernelError;

/// The experts that a table names for each token, and their weights, in `f32`.
///
/// `s = scoring(logits)`; weights are `s` of the experts in the token's row of the table, over their sum if `norm`, times
/// `scale`. A token or an expert out of range is a fault.
#[derive(Clone, Debug)]
pub struct HashRouter {
    /// `[T, E]` F32.
    pub logits: TensorView,
    /// `[V, K]` I32, contiguous.
    pub table: TensorView,
    /// `[T]` I32, in device memory.
    pub tokens: TensorView,
    /// `[T, K]` I32, contiguous.
    pub ids: TensorView,
    /// `[T, K]` F32, contiguous.
    pub weights: TensorView,
    /// From logits to scores.
    pub scoring: Scoring,
    /// Whether weights are divided by their sum.
    pub norm: bool,
    /// Factor of the weights.
    pub scale: f32,
}

impl Op for HashRouter {
    fn name(&self) -> &'static str {
        "hash_router"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.logits, &self.table, &self.tokens]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.ids, &self.weights]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.logits, &mut self.table, &mut self.tokens]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("table", &self.table, &["V", "K"])?;
        check.i32("table", &self.table)?;
        check.contiguous("table", &self.table)?;
        let used = self.table.dim(1);
        let inputs = [("table", &self.table), ("tokens", &self.tokens)];
        check.choice(&self.logits, [&self.ids, &self.weights], used, &inputs)?;
        check.parameter(used <= self.logits.dim(1), "experts used", used, "at most those that there are")?;
        check.i32("tokens", &self.tokens)?;
        check.shape("tokens", &self.tokens, &[self.logits.dim(0)])?;
        check.parameter(self.scale.is_finite(), "scale", self.scale, "finite")
    }

    fn call(&self) -> Call {
        Call::new(self.logits.dim(0))
            .threads(1, 1)
            .view(&self.logits)
            .stride(&self.logits, 0)
            .view(&self.table)
            .dim(self.table.dim(0))
            .view(&self.tokens)
            .view(&self.ids)
            .view(&self.weights)
            .dim(self.logits.dim(0))
            .dim(self.logits.dim(1))
            .dim(self.table.dim(1))
            .dim(match self.scoring {
                Scoring::Softmax => 0,
                Scoring::Sigmoid => 1,
                Scoring::SqrtSoftplus => 2,
            })
            .dim(usize::from(self.norm))
            .float(self.scale)
    }
}
