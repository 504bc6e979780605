//! Which ops work on weights that are split over devices.

/// How the weights of an op may be split over devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// By rows: each device makes some columns of the result from the whole input, and they are put side by side.
    Rows,
    /// By experts: each device does the experts that it has.
    Experts,
    /// By heads: each device does the heads that it has.
    Heads,
    /// Not at all: what it reads is small and is on every device as a whole. Weights that are split around it do not concern it.
    Whole,
}

/// An op that may stand in a model whose weights are split, and what of its weights may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitOp {
    /// The op.
    pub op: &'static str,
    /// How.
    pub split: Split,
    /// What it is that is split, or why nothing is.
    pub what: &'static str,
}

const fn op(op: &'static str, split: Split, what: &'static str) -> SplitOp {
    SplitOp { op, split, what }
}

/// The one list of ops that accept weights split over devices. An op that reads a weight and is not here, or is here as
/// [`Whole`](Split::Whole), is refused by a plan where the weight it reads is split: it runs nowhere else instead.
pub static SPLIT_OPS: &[SplitOp] = &[
    op("matmul", Split::Rows, "rows of the weight, [N, D] by N"),
    op("expert_matmul", Split::Experts, "experts of the weight, [E, N, D] by E"),
    op("head_matmul", Split::Heads, "heads of the weight, [H, N, D] by H"),
    op("rope_tail", Split::Whole, "it has no weight; heads of its input may be on their devices"),
    op("hc_split_sinkhorn", Split::Whole, "a scale and a base of a few floats"),
    op("hc_weighted_sum", Split::Whole, "it has no weight; its streams are whole"),
    op("hc_expand", Split::Whole, "it has no weight; its streams are whole"),
    op("fp8_kv_quantize", Split::Whole, "it has no weight; a key is one row"),
];

/// Whether an op accepts a weight split over devices.
#[must_use]
pub fn accepts_split(name: &str) -> bool {
    SPLIT_OPS.iter().any(|known| known.op == name && known.split != Split::Whole)
}
