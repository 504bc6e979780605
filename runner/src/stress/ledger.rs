//! An account of the device, kept from the driver's log alone.
//!
//! The pool and the cache are not asked: the ledger reads the calls that they made, and between them the marks
//! that the world puts into the same log when it owns a slice and when it lets go. From these it knows which
//! bytes are backed, what every captured graph reads and writes, and whose the bytes were at its capture, so
//! that it can say for each launch whether it was sound.

use std::collections::{BTreeMap, HashMap, HashSet};

use evergraph_kernels::probe::Probe;
use evergraph_pool::driver::host::Live;
use evergraph_pool::driver::{Call, FunctionHandle, UpdateResult};

/// Marks of the world in the log. Their arguments are named as below.
pub(crate) mod mark {
    /// A slice was handed out: `serial`, `ptr`, `bytes`; `scratch` if its bytes may be lost between runs; `arena`,
    /// if not 0, names an arena, whose scratch graphs may share.
    pub(crate) const OWN: &str = "own";
    /// Its owner is about to drop it: `serial`.
    pub(crate) const DISOWN: &str = "disown";
    /// A run of a recipe begins: `recipe`, `stream`.
    pub(crate) const RUN: &str = "run";
    /// It ended: `recipe`, `good`.
    pub(crate) const RAN: &str = "ran";
    /// What this thread unmaps from here on falls asleep: `kept` if its bytes are put aside.
    pub(crate) const SLEEP: &str = "sleep";
    /// No more.
    pub(crate) const SLEPT: &str = "slept";
}

/// What a kernel touches, as (address, bytes) pairs; `None` for a kernel that is not known.
pub(crate) type Named<'a> = &'a dyn Fn(FunctionHandle, &[u8]) -> Option<Vec<(u64, u64)>>;

/// [`Named`] for the probe kernels.
pub(crate) fn named(probe: &Probe, function: FunctionHandle, args: &[u8]) -> Option<Vec<(u64, u64)>> {
    Some(probe.named(function, args)?.iter().map(|words| (words.ptr.0, words.len as u64 * 4)).collect())
}

/// Events that the ledger saw.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) give_backs: u64,
    pub(crate) reissues: u64,
    pub(crate) stale: u64,
    pub(crate) remaps: u64,
    pub(crate) updates: u64,
    pub(crate) recaptures: u64,
    pub(crate) eager: u64,
    pub(crate) captures: u64,
    pub(crate) replays: u64,
    pub(crate) growths: u64,
    pub(crate) injected: u64,
    pub(crate) overlaps: u64,
    pub(crate) bad_launches: u64,
    pub(crate) bad_maps: u64,
}

/// Who has a slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Owner {
    serial: u64,
    scratch: bool,
    arena: u64,
}

impl Owner {
    /// Whether `other` may have bytes of this one without harm to a graph that was captured with it.
    fn shares(self, other: Self) -> bool {
        self.serial == other.serial || (self.arena != 0 && self.arena == other.arena)
    }
}

/// One run of bytes that a graph touches.
#[derive(Clone, Debug)]
struct Range {
    at: u64,
    bytes: u64,
    /// Whose they were at the capture; `None`: nobody's that the world told of.
    owner: Option<Owner>,
    /// They lost their pages since.
    unbacked: bool,
    /// They have other pages than at the capture.
    rebacked: bool,
}

#[derive(Clone, Debug, Default)]
struct Recorded {
    ranges: Vec<Range>,
}

#[derive(Clone, Debug)]
struct Exec {
    recorded: Recorded,
    recipe: Option<u64>,
    bad: Option<String>,
    updated: bool,
}

/// How bytes went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Loss {
    Freed,
    Unmapped,
    /// Unmapped, and put aside: they come back with the pages.
    Kept,
}

impl Loss {
    fn word(self) -> &'static str {
        match self {
            Self::Freed => "freed",
            Self::Unmapped | Self::Kept => "unmapped",
        }
    }
}

/// The account.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    mallocs: BTreeMap<u64, u64>,
    maps: BTreeMap<u64, (u64, u64)>,
    chunks: HashMap<u64, u32>,
    /// Bytes of the chunks whose handles are held.
    created: HashMap<u64, u64>,
    balances: BTreeMap<&'static str, i64>,
    slices: BTreeMap<u64, (u64, Owner)>,
    serials: HashMap<u64, u64>,
    captures: HashMap<u64, Recorded>,
    graphs: HashMap<u64, Recorded>,
    execs: HashMap<u64, Exec>,
    runs: HashMap<std::thread::ThreadId, Run>,
    /// Threads that let memory fall asleep whose bytes are kept.
    keeping: HashSet<std::thread::ThreadId>,
    captured_once: HashSet<u64>,
    seen: Seen,
    first: Option<String>,
}

#[derive(Debug, Default)]
struct Run {
    recipe: u64,
    launched: bool,
    captured: bool,
    eager: bool,
}

impl Ledger {
    /// Reads a stretch of the log.
    pub(crate) fn read(&mut self, log: &[Call], named: Named<'_>) {
        for call in log {
            self.call(call, named);
        }
    }

    /// What was seen so far.
    pub(crate) fn seen(&self) -> Seen {
        self.seen
    }

    /// The first unsound thing, in words.
    pub(crate) fn first(&self) -> Option<&str> {
        self.first.as_deref()
    }

    /// What was made and not given back, by kind.
    pub(crate) fn leaks(&self) -> Vec<(&'static str, i64)> {
        self.balances.iter().filter(|(_, n)| **n != 0).map(|(what, n)| (*what, *n)).collect()
    }

    /// The same as a host device would tell it.
    pub(crate) fn live(&self) -> Live {
        let count = |what| usize::try_from(self.balances.get(what).copied().unwrap_or(0)).unwrap_or(usize::MAX);
        let mut live = Live::default();
        live.mallocs = count("malloc");
        live.chunks = count("chunk");
        live.mappings = count("mapping");
        live.reservations = count("reservation");
        live.host = count("pinned") + count("registration");
        live.used_bytes = self.mallocs.values().chain(self.created.values()).sum::<u64>() as usize;
        live.streams = count("stream");
        live.events = count("event");
        live.graphs = count("graph");
        live.execs = count("exec");
        live.modules = count("module");
        live.captures = self.captures.len();
        live
    }

    fn call(&mut self, call: &Call, named: Named<'_>) {
        let arg = |name| call.arg(name).unwrap_or(0);
        let found = match &call.result {
            Ok(word) => *word,
            Err(kind) => {
                self.seen.injected += u64::from(matches!(kind, evergraph_pool::driver::DriverErrorKind::Injected));
                if call.name == "end_capture" {
                    self.captures.remove(&arg("stream"));
                }
                return;
            }
        };
        match call.name {
            "malloc" => {
                self.balance("malloc", 1);
                self.seen.growths += 1;
                self.mallocs.insert(found, arg("bytes"));
            }
            "free" => {
                self.balance("malloc", -1);
                self.seen.give_backs += 1;
                let bytes = self.mallocs.remove(&arg("ptr")).unwrap_or(0);
                self.lost(arg("ptr"), bytes, Loss::Freed);
            }
            "create" => {
                self.balance("chunk", 1);
                self.created.insert(found, arg("bytes"));
            }
            "release" => {
                self.balance("chunk", -1);
                self.created.remove(&arg("handle"));
            }
            "address_reserve" => self.balance("reservation", 1),
            "address_free" => self.balance("reservation", -1),
            "map" => self.map(arg("ptr"), arg("bytes"), arg("handle")),
            "unmap" => {
                let kept = self.keeping.contains(&call.thread);
                self.unmap(arg("ptr"), arg("bytes"), if kept { Loss::Kept } else { Loss::Unmapped });
            }
            "host_alloc" => self.balance("pinned", 1),
            "host_free" => self.balance("pinned", -1),
            "host_register" => self.balance("registration", 1),
            "host_unregister" => self.balance("registration", -1),
            "stream_create" => self.balance("stream", 1),
            "stream_destroy" => self.balance("stream", -1),
            "event_create" => self.balance("event", 1),
            "event_destroy" => self.balance("event", -1),
            "module_load" => self.balance("module", 1),
            "module_unload" => self.balance("module", -1),
            "begin_capture" => {
                self.captures.insert(arg("stream"), Recorded::default());
            }
            "end_capture" => {
                self.balance("graph", 1);
                let recorded = self.captures.remove(&arg("stream")).unwrap_or_default();
                self.graphs.insert(found, recorded);
                self.run(call).captured = true;
            }
            "graph_destroy" => {
                self.balance("graph", -1);
                self.graphs.remove(&arg("graph"));
            }
            "instantiate" => self.instantiate(call, found),
            "exec_update" if found == UpdateResult::Updated as u64 => self.update(arg("exec"), arg("graph")),
            "exec_destroy" => {
                self.balance("exec", -1);
                self.execs.remove(&arg("exec"));
            }
            "launch" => self.launch(call),
            "launch_kernel" => {
                let ranges = named(FunctionHandle(arg("function")), &call.payload);
                self.touch(call, &ranges.unwrap_or_default());
            }
            "memset_d8" => self.touch(call, &[(arg("dst"), arg("bytes"))]),
            "memset_d32" => self.touch(call, &[(arg("dst"), arg("words") * 4)]),
            "memcpy_htod" => self.touch(call, &[(arg("dst"), arg("bytes"))]),
            "memcpy_dtoh" => self.touch(call, &[(arg("src"), arg("bytes"))]),
            "memcpy_dtod" => self.touch(call, &[(arg("src"), arg("bytes")), (arg("dst"), arg("bytes"))]),
            mark::OWN => {
                let owner = Owner { serial: arg("serial"), scratch: arg("scratch") == 1, arena: arg("arena") };
                self.own(owner, arg("ptr"), arg("bytes"));
            }
            mark::DISOWN => self.disown(arg("serial")),
            mark::RUN => {
                self.runs.insert(call.thread, Run { recipe: arg("recipe"), ..Run::default() });
            }
            mark::RAN => self.ran(call, arg("good") == 1),
            mark::SLEEP if arg("kept") == 1 => drop(self.keeping.insert(call.thread)),
            mark::SLEPT => drop(self.keeping.remove(&call.thread)),
            _ => {}
        }
    }

    fn balance(&mut self, what: &'static str, by: i64) {
        *self.balances.entry(what).or_default() += by;
    }

    fn blame(&mut self, what: String) {
        self.first.get_or_insert(what);
    }

    fn run(&mut self, call: &Call) -> &mut Run {
        self.runs.entry(call.thread).or_default()
    }

    fn map(&mut self, ptr: u64, bytes: u64, handle: u64) {
        self.balance("mapping", 1);
        self.seen.growths += 1;
        self.maps.insert(ptr, (bytes, handle));
        let mapped = self.chunks.entry(handle).or_default();
        *mapped += 1;
        let mapped = *mapped;
        if mapped > 1 {
            self.seen.bad_maps += 1;
            self.blame(format!("chunk {handle:#x} is mapped at {mapped} ranges at once, lately at {ptr:#x}"));
        }
        for range in self.execs.values_mut().flat_map(|e| &mut e.recorded.ranges) {
            if range.unbacked && overlap(range.at, range.bytes, ptr, bytes) {
                range.rebacked = true;
            }
        }
        let backed: Vec<(u64, u64)> = self.maps.iter().map(|(ptr, (bytes, _))| (*ptr, *bytes)).collect();
        for range in self.execs.values_mut().flat_map(|e| &mut e.recorded.ranges) {
            if range.unbacked && covered(&backed, range.at, range.bytes) {
                range.unbacked = false;
            }
        }
    }

    fn unmap(&mut self, ptr: u64, bytes: u64, how: Loss) {
        let gone: Vec<u64> = self.maps.range(ptr..ptr.saturating_add(bytes)).map(|(at, _)| *at).collect();
        for at in gone {
            let Some((_, handle)) = self.maps.remove(&at) else { continue };
            self.balance("mapping", -1);
            if let Some(mapped) = self.chunks.get_mut(&handle) {
                *mapped -= 1;
            }
        }
        self.seen.give_backs += 1;
        self.lost(ptr, bytes, how);
    }

    /// Bytes went back to the driver. Scratch may get pages again; the bytes of an owner are gone, unless they were kept.
    fn lost(&mut self, ptr: u64, bytes: u64, how: Loss) {
        for exec in self.execs.values_mut() {
            let was_good = exec.bad.is_none() && !exec.recorded.ranges.iter().any(|r| r.unbacked);
            let mut hit = false;
            for range in exec.recorded.ranges.iter_mut().filter(|r| overlap(r.at, r.bytes, ptr, bytes)) {
                hit = true;
                range.unbacked = true;
                let pages_are_enough = range.owner.is_none_or(|owner| owner.scratch) || how == Loss::Kept;
                if how == Loss::Freed || !pages_are_enough {
                    exec.bad
                        .get_or_insert_with(|| format!("{} bytes at {:#x} were {}", range.bytes, range.at, how.word()));
                }
            }
            self.seen.stale += u64::from(hit && was_good);
        }
    }

    fn own(&mut self, owner: Owner, ptr: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let end = ptr.saturating_add(bytes);
        let before = self.slices.range(..end).next_back().filter(|(at, (len, _))| **at + len > ptr);
        if let Some((at, (len, other))) = before.map(|(at, slice)| (*at, *slice)) {
            self.seen.overlaps += 1;
            self.blame(format!(
                "slice {} ({bytes} bytes at {ptr:#x}) overlaps slice {} ({len} bytes at {at:#x})",
                owner.serial, other.serial
            ));
        }
        self.slices.insert(ptr, (bytes, owner));
        self.serials.insert(owner.serial, ptr);
        for exec in self.execs.values_mut() {
            let hit = exec
                .recorded
                .ranges
                .iter()
                .find(|r| !r.owner.is_some_and(|o| o.shares(owner)) && overlap(r.at, r.bytes, ptr, bytes))
                .map(|r| format!("{} bytes at {:#x} went to slice {}", r.bytes, r.at, owner.serial));
            if let Some(hit) = hit {
                self.seen.reissues += 1;
                self.seen.stale += u64::from(exec.bad.is_none());
                exec.bad.get_or_insert(hit);
            }
        }
    }

    fn disown(&mut self, serial: u64) {
        if let Some(ptr) = self.serials.remove(&serial)
            && self.slices.get(&ptr).is_some_and(|(_, owner)| owner.serial == serial)
        {
            self.slices.remove(&ptr);
        }
    }

    fn touch(&mut self, call: &Call, ranges: &[(u64, u64)]) {
        let stream = call.arg("stream").unwrap_or(0);
        if !self.captures.contains_key(&stream) {
            self.run(call).eager |= call.name == "launch_kernel";
            return;
        }
        let ranges: Vec<Range> = ranges
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|&(at, bytes)| {
                let owner = self.slices.range(..=at).next_back().filter(|(ptr, (len, _))| at < **ptr + len);
                Range { at, bytes, owner: owner.map(|(_, (_, owner))| *owner), unbacked: false, rebacked: false }
            })
            .collect();
        if let Some(recorded) = self.captures.get_mut(&stream) {
            recorded.ranges.extend(ranges);
        }
    }

    fn instantiate(&mut self, call: &Call, exec: u64) {
        self.balance("exec", 1);
        let recorded = call.arg("graph").and_then(|g| self.graphs.get(&g)).cloned().unwrap_or_default();
        let recipe = self.runs.get(&call.thread).map(|run| run.recipe);
        self.seen.captures += 1;
        if recipe.is_some_and(|recipe| !self.captured_once.insert(recipe)) {
            self.seen.recaptures += 1;
        }
        self.execs.insert(exec, Exec { recorded, recipe, bad: None, updated: false });
    }

    fn update(&mut self, exec: u64, graph: u64) {
        let recorded = self.graphs.get(&graph).cloned().unwrap_or_default();
        if let Some(exec) = self.execs.get_mut(&exec) {
            *exec = Exec { recorded, recipe: exec.recipe, bad: None, updated: true };
        }
    }

    fn launch(&mut self, call: &Call) {
        self.run(call).launched = true;
        self.seen.replays += 1;
        let handle = call.arg("exec").unwrap_or(0);
        let backed: Vec<(u64, u64)> = self.backed();
        let Some(exec) = self.execs.get_mut(&handle) else {
            self.seen.bad_launches += 1;
            return self.blame(format!("launch of exec {handle:#x}, which does not exist"));
        };
        let bad = exec.bad.clone().or_else(|| {
            let hole = exec.recorded.ranges.iter().find(|r| !covered(&backed, r.at, r.bytes))?;
            Some(format!("{} bytes at {:#x} are not backed", hole.bytes, hole.at))
        });
        let remapped = exec.recorded.ranges.iter().any(|r| r.rebacked);
        exec.recorded.ranges.iter_mut().for_each(|r| r.rebacked = false);
        let updated = std::mem::take(&mut exec.updated);
        let recipe = exec.recipe;
        if let Some(bad) = bad {
            self.seen.bad_launches += 1;
            return self.blame(format!("launch of a graph of recipe {recipe:?} with a bad token: {bad}"));
        }
        self.seen.remaps += u64::from(remapped);
        self.seen.updates += u64::from(updated);
    }

    fn ran(&mut self, call: &Call, good: bool) {
        let run = self.runs.remove(&call.thread).unwrap_or_default();
        if good && run.eager && !run.launched && !run.captured && self.captured_once.contains(&run.recipe) {
            self.seen.eager += 1;
        }
    }

    fn backed(&self) -> Vec<(u64, u64)> {
        let mut backed: Vec<(u64, u64)> = self.mallocs.iter().map(|(at, bytes)| (*at, *bytes)).collect();
        backed.extend(self.maps.iter().map(|(at, (bytes, _))| (*at, *bytes)));
        backed.sort_unstable();
        backed
    }
}

fn overlap(a: u64, a_bytes: u64, b: u64, b_bytes: u64) -> bool {
    a < b.saturating_add(b_bytes) && b < a.saturating_add(a_bytes)
}

/// Whether sorted `backed` pieces hold all of the range.
fn covered(backed: &[(u64, u64)], mut at: u64, bytes: u64) -> bool {
    let end = at.saturating_add(bytes);
    while at < end {
        let i = backed.partition_point(|(start, _)| *start <= at);
        match i.checked_sub(1).map(|i| backed[i]) {
            Some((start, len)) if at < start.saturating_add(len) => at = start + len,
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests;
