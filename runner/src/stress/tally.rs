//! What happened, by kind.

use std::collections::BTreeMap;

use evergraph_graphcache::Ran;

use super::Op;

/// Counts of one worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) ops: BTreeMap<&'static str, u64>,
    pub(super) cancels: u64,
    pub(super) panics: u64,
    pub(super) refusals: u64,
    pub(super) quiet_replays: u64,
    /// Sleeps that went well.
    pub(super) slept: u64,
    ran: BTreeMap<String, u64>,
}

impl Tally {
    pub(super) fn note(&mut self, op: Op) {
        *self.ops.entry(name(op)).or_default() += 1;
    }

    pub(super) fn ran(&mut self, ran: Ran) {
        *self.ran.entry(ran.to_string()).or_default() += 1;
    }

    /// How the cache said that runs ended.
    pub(super) fn said(&self) -> &BTreeMap<String, u64> {
        &self.ran
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (name, n) in &other.ops {
            *self.ops.entry(name).or_default() += n;
        }
        for (name, n) in &other.ran {
            *self.ran.entry(name.clone()).or_default() += n;
        }
        self.cancels += other.cancels;
        self.panics += other.panics;
        self.refusals += other.refusals;
        self.quiet_replays += other.quiet_replays;
        self.slept += other.slept;
    }
}

/// The step's name in the report.
pub(super) fn name(op: Op) -> &'static str {
    match op {
        Op::Alloc { .. } => "alloc",
        Op::Free { .. } => "free",
        Op::Fill { .. } => "fill",
        Op::Copy { .. } => "copy",
        Op::UseAndFree { .. } => "record_stream",
        Op::Read { .. } => "read",
        Op::Run { .. } => "run",
        Op::Rebind { .. } => "rebind",
        Op::Cancel { .. } => "cancel_asked",
        Op::Panic { .. } => "panic_asked",
        Op::Evict { .. } => "evict",
        Op::Flush { .. } => "flush",
        Op::Trim { .. } => "trim",
        Op::Limit { .. } => "limit",
        Op::Fail { .. } => "fail_nth",
        Op::Thread => "thread_switch",
        Op::Step { .. } => "step",
        Op::Sync { .. } => "sync",
        Op::Restream { .. } => "restream",
        Op::Sleep { .. } => "sleep",
        Op::Wake { .. } => "wake",
        Op::Quiet => "quiet",
    }
}
