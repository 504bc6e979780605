//! Choice of the next token on the device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::check::Check;
use super::{Call, Op, TensorView};
use crate::KernelError;
use crate::quant::QuantType;

/// Sampling parameters and state, one per sequence, in device memory: changing them needs no new graph.
///
/// Order: repeat penalty, greedy if `temp <= 0`, top-k, top-p, min-p, temperature, draw.
#[derive(Clone, Copy, PartialEq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SampleState {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Draws so far; the n-th draw depends on seed and n only. The op counts it up, greedy or not.
    pub counter: u64,
    /// Temperature; 0 or less means greedy.
    pub temp: f32,
    /// Keep the K most likely; 0 or less means all.
    pub top_k: i32,
    /// Keep the fewest most likely whose probabilities reach this sum; 1 or more means all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 or less means none.
    pub min_p: f32,
    /// Logits of recent tokens are divided by this where positive, else multiplied; 1 means off.
    pub repeat_penalty: f32,
    /// How many recent tokens the penalty looks at; 0 none, negative all that the ring holds.
    pub repeat_last_n: i32,
    /// Tokens ever appended to the ring; token number n is at `n mod N`.
    pub recent_len: u64,
}

impl SampleState {
    /// Bytes in device memory.
    pub const BYTES: usize = size_of::<Self>();

    /// Stands for a token where the best logit is infinite, or none is a number.
    pub const NONE: i32 = -1;

    /// Greedy, without penalty.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            seed: 0,
            counter: 0,
            temp: 0.0,
            top_k: 40,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            recent_len: 0,
        }
    }
}

/// Picks the next token, writes it to `token` and appends it to the ring of recent tokens; [`SampleState::NONE`] where logits
/// are no numbers.
#[derive(Clone, Debug)]
pub struct Sample {
    /// `[V]` F32; not changed.
    pub logits: TensorView,
    /// `[SampleState::BYTES]` I8, aligned to 8 bytes: one [`SampleState`].
    pub state: TensorView,
    /// `[N]` I32: the ring of recent tokens.
    pub recent: TensorView,
    /// `[1]` I32.
    pub token: TensorView,
}

impl Op for Sample {
    fn name(&self) -> &'static str {
        "sample"
    }

    fn reads(&self) -> Vec<&TensorView> {
        vec![&self.logits, &self.state, &self.recent]
    }

    fn writes(&self) -> Vec<&TensorView> {
        vec![&self.state, &self.recent, &self.token]
    }

    fn sources_mut(&mut self) -> Vec<&mut TensorView> {
        vec![&mut self.logits]
    }

    fn check(&self) -> Result<(), KernelError> {
        let check = Check(self.name());
        check.rank("logits", &self.logits, &["V"])?;
        check.f32("logits", &self.logits)?;
        check.ty("state", &self.state, &[QuantType::I8], "I8")?;
        check.shape("state", &self.state, &[SampleState::BYTES])?;
        if !self.state.ptr().0.is_multiple_of(8) {
            return Err(check.layout("state", &self.state, "must be aligned to 8 bytes"));
        }
        check.rank("recent", &self.recent, &["N"])?;
        check.i32("recent", &self.recent)?;
        check.i32("token", &self.token)?;
        check.shape("token", &self.token, &[1])?;
        let (logits, state, recent) = (("logits", &self.logits), ("state", &self.state), ("recent", &self.recent));
        check.apart("token", &self.token, &[logits, state, recent])?;
        check.apart("recent", &self.recent, &[logits, state])?;
        check.apart("state", &self.state, &[logits])
    }

    fn call(&self) -> Call {
        Call::new(1)
            .threads(1024, 1)
            .view(&self.logits)
            .dim(self.logits.dim(0))
            .view(&self.state)
            .view(&self.recent)
            .dim(self.recent.dim(0))
            .view(&self.token)
    }
}
