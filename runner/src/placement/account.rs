//! Where the bytes of a model and its sequence are.

use serde_json::{Value, json};

use super::{Home, expert_block};
use crate::engine::Session;

/// What one side of the machine holds, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Share {
    /// Weights.
    pub weights_bytes: u64,
    /// Of those, weights of experts.
    pub experts_bytes: u64,
    /// Keys and values of a text as long as can be.
    pub cache_most_bytes: u64,
    /// Keys and values now.
    pub cache_bytes: u64,
    /// Experts of the other side that this one keeps a copy of, since they are chosen often.
    pub kept_experts_bytes: u64,
    /// Scratch of a step of a prompt, where that is known.
    pub prompt_scratch_bytes: Option<u64>,
    /// Scratch of a step of one token, where that is known.
    pub decode_scratch_bytes: Option<u64>,
}

/// What each side holds of a model and one sequence on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Account {
    /// The device.
    pub device: Share,
    /// The host.
    pub host: Share,
    /// Whether the device reads weights where the host has them, so that they take nothing of its pool.
    pub in_place: bool,
}

impl Share {
    /// All of it, with a cache as long as can be.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let scratch = self.prompt_scratch_bytes.unwrap_or(0).saturating_add(self.decode_scratch_bytes.unwrap_or(0));
        let weights = self.weights_bytes.saturating_add(self.kept_experts_bytes);
        weights.saturating_add(self.cache_most_bytes).saturating_add(scratch)
    }

    fn json(&self) -> Value {
        json!({
            "weights_bytes": self.weights_bytes,
            "experts_bytes": self.experts_bytes,
            "kept_experts_bytes": self.kept_experts_bytes,
            "cache_most_bytes": self.cache_most_bytes,
            "cache_bytes": self.cache_bytes,
            "prompt_scratch_bytes": self.prompt_scratch_bytes,
            "decode_scratch_bytes": self.decode_scratch_bytes,
            "total_bytes": self.total_bytes(),
        })
    }
}

impl Account {
    /// Of a sequence and its model, as they are now. Scratch is known of a [rehearsal](crate::engine::Runtime::rehearsal).
    #[must_use]
    pub fn of(session: &Session) -> Self {
        let (weights, cache, runtime) = (&session.model().weights, session.cache(), session.runtime());
        let mut account = Self { in_place: runtime.reads_in_place(), ..Self::default() };
        for tensor in weights.read() {
            let share = match weights.home(tensor.name()) {
                Home::Device => &mut account.device,
                Home::Host => &mut account.host,
            };
            share.weights_bytes = share.weights_bytes.saturating_add(tensor.bytes());
            if expert_block(tensor.name()).is_some() {
                share.experts_bytes = share.experts_bytes.saturating_add(tensor.bytes());
            }
        }
        let (made, made_on_host) = weights.made_bytes();
        account.host.weights_bytes = account.host.weights_bytes.saturating_add(made_on_host as u64);
        let device = &mut account.device;
        device.weights_bytes = device.weights_bytes.saturating_add(made as u64);
        (device.cache_bytes, device.cache_most_bytes) = (cache.bytes() as u64, cache.most_bytes() as u64);
        device.kept_experts_bytes = session.expert_cache_bytes() as u64;
        device.prompt_scratch_bytes = runtime.scratch_of("prompt").map(|bytes| bytes as u64);
        device.decode_scratch_bytes = runtime.scratch_of("decode").map(|bytes| bytes as u64);
        account.host.cache_most_bytes = cache.host_bytes() as u64;
        account
    }

    /// With the scratch that a rehearsal found.
    #[must_use]
    pub fn with_scratch_of(mut self, rehearsed: &Self) -> Self {
        let (from, to) = (&rehearsed.device, &mut self.device);
        (to.prompt_scratch_bytes, to.decode_scratch_bytes) = (from.prompt_scratch_bytes, from.decode_scratch_bytes);
        self
    }

    /// As JSON documents have it.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({ "device": self.device.json(), "host": self.host.json(), "weights_in_place": self.in_place })
    }
}
