//! A witness that believes nobody: it reads the driver's call log and tells what really happened.
//!
//! It keeps its own books of what is mapped and malloc'd, of what each captured graph was given as addresses, and
//! of which slices the demo took on top. From these it decides, call by call, which graphs are good, what made
//! the others stale, how each was made good again, and whether any was ever launched while it was not.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use evergraph_pool::driver::{Call, FunctionHandle, ParamLayout};

/// The line that the demo puts into the log before it asks the graph cache for a step. `key` names the step; `moved` is
/// 1 if it is meant for other memory than the last time.
pub(super) const STEP: &str = "demo.step";
/// The line after a slice was taken: `ptr`, `bytes`, `owner`.
pub(super) const TAKE: &str = "demo.take";
/// The same for a slice in memory that several graphs share by design: `ptr`, `bytes`.
pub(super) const SHARE: &str = "demo.share";

/// The owner of memory that is no graph's scratch.
pub(super) const OTHERS: u64 = 1 << 63;

/// Why a graph went stale.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Cause {
    /// Pages under one of its addresses were unmapped.
    Unbacked,
    /// Memory under one of its addresses was freed to the driver.
    Freed,
    /// Memory under one of its addresses was handed to another owner.
    Reissued,
}

/// Something that made graphs stale, for the account.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Blow {
    pub(super) cause: Cause,
    /// Bytes that changed hands.
    pub(super) bytes: u64,
    /// The steps whose graphs it made stale, in order.
    pub(super) keys: Vec<u64>,
}

/// A finished step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seen {
    pub(super) way: Way,
    /// Driver calls that it took, other than binding the device.
    pub(super) calls: u64,
    /// Pages that were mapped.
    pub(super) mapped: u64,
}

/// How a step that had a graph before was carried out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Way {
    /// First runs without a graph.
    WarmUp,
    /// The first capture.
    Captured,
    /// One launch of a good graph.
    Replayed,
    /// Pages came back under its addresses, then one launch of the same exec.
    Remapped,
    /// The same exec with new arguments.
    Updated,
    /// A new exec.
    Recaptured,
    /// Kernel by kernel, although there was a graph or a capture was begun.
    Eager,
}

/// What the log shows, added up.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// Calls that gave memory back to the driver (`unmap`, `free`).
    pub(super) returned_calls: u64,
    /// Bytes of it.
    pub(super) returned_bytes: u64,
    /// Of these calls, those below a live captured graph.
    pub(super) returned_under_graphs: u64,
    /// Times that a good graph went stale, by cause.
    pub(super) stale: HashMap<Cause, u64>,
    /// Hand-outs of memory that a graph of another owner had been captured with: one that still lives and is stale from
    /// then on, or one that has let go of it.
    pub(super) reissues: u64,
    /// Steps, by the way they went.
    pub(super) ways: HashMap<Way, u64>,
    /// Launches of graphs.
    pub(super) launches: u64,
    /// Launches of a graph that was stale at that moment. Must be none.
    pub(super) bad_launches: u64,
    /// The first of them, in words.
    pub(super) first_bad: Option<String>,
    /// Steps whose graph was stale when they were asked for.
    pub(super) met_stale: u64,
    /// Steps whose graph was good when they were asked for, and that were meant for the same memory as before.
    pub(super) undisturbed: u64,
    /// Of those, the ones whose launch was the only driver call (but for binding the device).
    pub(super) undisturbed_replays: u64,
}

impl Findings {
    pub(super) fn way(&self, way: Way) -> u64 {
        self.ways.get(&way).copied().unwrap_or(0)
    }

    pub(super) fn stale_total(&self) -> u64 {
        self.stale.values().sum()
    }
}

/// Memory that a graph was captured with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Baked {
    /// The address among a node's arguments.
    address: u64,
    /// Where the slice ends that it pointed into.
    end: u64,
    /// The malloc that it lay in (an address alone can be somebody else's by now), 0 for a reserved range.
    malloc: u64,
}

#[derive(Debug)]
struct Exec {
    key: u64,
    baked: HashSet<Baked>,
    reissued: bool,
    /// For counting each spell once.
    stale: bool,
}

/// What one step did so far.
#[derive(Debug)]
struct Step {
    key: u64,
    /// It had an exec when it began.
    had_exec: bool,
    /// It ever had one.
    known: bool,
    met_stale: bool,
    undisturbed: bool,
    /// Why it was not.
    unbacked: bool,
    /// A capture was begun.
    tried: bool,
    launched: bool,
    updated: bool,
    instantiated: bool,
    mapped: u64,
    calls: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Witness {
    findings: Findings,
    /// Where in the arguments of a kernel, by its handle, words of 8 bytes lie.
    layouts: HashMap<u64, Vec<usize>>,
    next_id: u64,
    mallocs: BTreeMap<u64, (u64, u64)>,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, (u64, bool)>,
    /// The latest slices, by address: how long they are.
    slices: BTreeMap<u64, u64>,
    capturing: HashMap<u64, HashSet<Baked>>,
    graphs: HashMap<u64, HashSet<Baked>>,
    execs: HashMap<u64, Exec>,
    /// Keys that ever had an exec.
    known: HashSet<u64>,
    /// Every address that a graph was ever made with, and whose it was last.
    ever: BTreeMap<u64, u64>,
    step: Option<Step>,
    blows: Vec<Blow>,
}

/// The entry of `map` whose range holds `address`.
fn holding<V>(map: &BTreeMap<u64, V>, address: u64, bytes: impl Fn(&V) -> u64) -> Option<(u64, &V)> {
    let (&base, value) = map.range(..=address).next_back()?;
    (address - base < bytes(value)).then_some((base, value))
}

impl Witness {
    /// With what the driver tells of the kernels' parameters: two numbers side by side look like an address.
    pub(super) fn of(layouts: impl Iterator<Item = (FunctionHandle, Arc<ParamLayout>)>) -> Self {
        let words = |layout: &ParamLayout| {
            layout.params.iter().filter(|param| param.bytes == 8).map(|param| param.offset as usize).collect()
        };
        let layouts = layouts.map(|(function, layout)| (function.0, words(&layout))).collect();
        Self { layouts, ..Self::default() }
    }

    /// Reads on.
    pub(super) fn read(&mut self, log: &[Call]) {
        for call in log {
            if call.name == STEP {
                self.begin_step(call.arg("key").unwrap_or(0), call.arg("moved") == Some(1));
            } else if call.result.is_ok() {
                self.note(call);
            }
        }
    }

    /// What made graphs stale since the last time this was asked.
    pub(super) fn blows(&mut self) -> Vec<Blow> {
        std::mem::take(&mut self.blows)
    }

    /// What was found so far.
    pub(super) fn findings(&self) -> &Findings {
        &self.findings
    }

    fn note(&mut self, call: &Call) {
        let arg = |name: &str| call.arg(name).unwrap_or(0);
        let result = *call.result.as_ref().unwrap_or(&0);
        if let Some(step) = &mut self.step {
            match call.name {
                "launch" => step.launched = true,
                "begin_capture" => step.tried = true,
                "map" => step.mapped += 1,
                "instantiate" => step.instantiated = true,
                _ => {}
            }
            if call.name != "bind" {
                step.calls += 1;
            }
        }
        match call.name {
            "malloc" => {
                let id = self.id();
                self.mallocs.insert(result, (arg("bytes"), id));
            }
            "free" => {
                if let Some((bytes, id)) = self.mallocs.remove(&arg("ptr")) {
                    self.returned(bytes, Cause::Freed, |baked| baked.malloc == id);
                }
            }
            "address_reserve" => {
                self.reservations.insert(result, arg("bytes"));
            }
            "address_free" => {
                self.reservations.remove(&arg("ptr"));
            }
            "map" => {
                self.mappings.insert(arg("ptr"), (arg("bytes"), false));
            }
            "set_access" => {
                let range = arg("ptr")..arg("ptr") + arg("bytes");
                for (_, (_, accessible)) in self.mappings.range_mut(range) {
                    *accessible = true;
                }
            }
            "unmap" => {
                let range = arg("ptr")..arg("ptr") + arg("bytes");
                self.mappings.retain(|base, _| !range.contains(base));
                self.returned(arg("bytes"), Cause::Unbacked, |baked| {
                    baked.malloc == 0 && baked.address < range.end && range.start < baked.end
                });
            }
            SHARE => self.place_slice(arg("ptr"), arg("bytes")),
            TAKE => {
                self.place_slice(arg("ptr"), arg("bytes"));
                self.take(arg("ptr"), arg("bytes"), arg("owner"));
            }
            "begin_capture" => {
                self.capturing.insert(arg("stream"), HashSet::new());
            }
            "launch_kernel" => {
                let words = match self.layouts.get(&arg("function")) {
                    Some(offsets) => offsets.iter().filter_map(|&offset| word(&call.payload, offset)).collect(),
                    None => words(&call.payload),
                };
                self.bake(arg("stream"), &words);
            }
            "memcpy_dtod" => self.bake(arg("stream"), &[arg("dst"), arg("src")]),
            "memcpy_htod" | "memset_d8" | "memset_d32" => self.bake(arg("stream"), &[arg("dst")]),
            "memcpy_dtoh" => self.bake(arg("stream"), &[arg("src")]),
            "end_capture" => {
                if let Some(baked) = self.capturing.remove(&arg("stream")) {
                    self.graphs.insert(result, baked);
                }
            }
            "graph_destroy" => {
                self.graphs.remove(&arg("graph"));
            }
            "instantiate" => {
                let baked = self.graphs.get(&arg("graph")).cloned().unwrap_or_default();
                let key = self.step.as_ref().map_or(0, |step| step.key);
                self.known.insert(key);
                self.ever.extend(baked.iter().map(|baked| (baked.address, key)));
                self.execs.insert(result, Exec { key, baked, reissued: false, stale: false });
            }
            // Word 0 is `Updated`; anything else left the exec as it was.
            "exec_update" if result == 0 => {
                let baked = self.graphs.get(&arg("graph")).cloned().unwrap_or_default();
                if let Some(exec) = self.execs.get_mut(&arg("exec")) {
                    self.ever.extend(baked.iter().map(|baked| (baked.address, exec.key)));
                    (exec.baked, exec.reissued, exec.stale) = (baked, false, false);
                }
                if let Some(step) = &mut self.step {
                    step.updated = true;
                }
            }
            "exec_destroy" => {
                self.execs.remove(&arg("exec"));
            }
            "launch" => self.launch(arg("exec")),
            _ => {}
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn bake(&mut self, stream: u64, words: &[u64]) {
        if !self.capturing.contains_key(&stream) {
            return;
        }
        let found: Vec<Baked> = words.iter().filter_map(|&address| self.place(address)).collect();
        if let Some(baked) = self.capturing.get_mut(&stream) {
            baked.extend(found);
        }
    }

    /// Where `address` lies now, if it is in memory that somebody took from the driver.
    fn place(&self, address: u64) -> Option<Baked> {
        let malloc = holding(&self.mallocs, address, |m| m.0).map(|(_, m)| m.1);
        if malloc.is_none() && holding(&self.reservations, address, |bytes| *bytes).is_none() {
            return None;
        }
        let end = holding(&self.slices, address, |bytes| *bytes).map_or(address + 1, |(base, bytes)| base + bytes);
        Some(Baked { address, end, malloc: malloc.unwrap_or(0) })
    }

    /// Good memory: the same malloc as then, or mapped pages from end to end that may be touched.
    fn backed(&self, baked: &Baked) -> bool {
        match baked.malloc {
            0 => {
                let mut at = baked.address;
                while at < baked.end {
                    match holding(&self.mappings, at, |m| m.0) {
                        Some((base, &(bytes, true))) => at = base + bytes,
                        _ => return false,
                    }
                }
                true
            }
            id => holding(&self.mallocs, baked.address, |m| m.0).is_some_and(|(_, m)| m.1 == id),
        }
    }

    fn returned(&mut self, bytes: u64, cause: Cause, touches: impl Fn(&Baked) -> bool) {
        self.findings.returned_calls += 1;
        self.findings.returned_bytes += bytes;
        let below = self.strike(cause, bytes, |exec| exec.baked.iter().any(&touches));
        self.findings.returned_under_graphs += u64::from(below > 0);
    }

    /// Marks the graphs that `hit` finds as stale; how many there are.
    fn strike(&mut self, cause: Cause, bytes: u64, hit: impl Fn(&Exec) -> bool) -> u64 {
        let mut keys = Vec::new();
        let mut count = 0;
        for exec in self.execs.values_mut().filter(|exec| hit(exec)) {
            count += 1;
            exec.reissued |= cause == Cause::Reissued;
            if !exec.stale {
                exec.stale = true;
                *self.findings.stale.entry(cause).or_default() += 1;
                keys.push(exec.key);
            }
        }
        keys.sort_unstable();
        match self.blows.last_mut() {
            // One give-back is many calls.
            Some(last) if last.cause == cause => {
                last.bytes += bytes;
                last.keys.extend(keys);
                last.keys.sort_unstable();
                last.keys.dedup();
            }
            _ if count > 0 || cause != Cause::Reissued => self.blows.push(Blow { cause, bytes, keys }),
            _ => {}
        }
        count
    }

    fn place_slice(&mut self, ptr: u64, bytes: u64) {
        let first = holding(&self.slices, ptr, |bytes| *bytes).map_or(ptr, |(base, _)| base);
        let old: Vec<u64> = self.slices.range(first..ptr + bytes).map(|(base, _)| *base).collect();
        for base in old {
            self.slices.remove(&base);
        }
        self.slices.insert(ptr, bytes);
    }

    fn take(&mut self, ptr: u64, bytes: u64, owner: u64) {
        let end = ptr + bytes;
        let theirs = |baked: &Baked| ptr < baked.end && baked.address < end;
        self.strike(Cause::Reissued, bytes, |exec| exec.key != owner && exec.baked.iter().any(theirs));
        let mut reissued = false;
        for (_, last) in self.ever.range_mut(ptr..end) {
            reissued |= std::mem::replace(last, owner) != owner;
        }
        self.findings.reissues += u64::from(reissued);
    }

    fn launch(&mut self, exec: u64) {
        self.findings.launches += 1;
        let Some(found) = self.execs.get(&exec) else {
            self.bad(format!("exec {exec:#x} was launched after it was destroyed"));
            return;
        };
        if found.reissued {
            self.bad(format!("step {:#x} was launched on memory that belongs to somebody else now", found.key));
        } else if let Some(gone) = found.baked.iter().find(|baked| !self.backed(baked)) {
            let (address, end) = (gone.address, gone.end);
            self.bad(format!("step {:#x} was launched with {address:#x}..{end:#x}, not all of it there", found.key));
        } else if let Some(exec) = self.execs.get_mut(&exec) {
            exec.stale = false;
        }
    }

    fn bad(&mut self, what: String) {
        self.findings.bad_launches += 1;
        self.findings.first_bad.get_or_insert(what);
    }

    fn begin_step(&mut self, key: u64, moved: bool) {
        let exec = self.execs.values().find(|exec| exec.key == key);
        let was_good = exec.is_some_and(|exec| !exec.reissued && exec.baked.iter().all(|b| self.backed(b)));
        let unbacked = exec.is_some_and(|exec| !exec.reissued) && !was_good;
        self.step = Some(Step {
            key,
            had_exec: exec.is_some(),
            known: self.known.contains(&key),
            met_stale: exec.is_some() && !was_good,
            undisturbed: was_good && !moved,
            unbacked,
            tried: false,
            launched: false,
            updated: false,
            instantiated: false,
            mapped: 0,
            calls: 0,
        });
    }

    /// Closes the step that began with the last [`STEP`] line.
    pub(super) fn end_step(&mut self) -> Option<Seen> {
        let step = self.step.take()?;
        let way = match () {
            () if !step.launched && !step.had_exec && !step.tried => Way::WarmUp,
            () if !step.launched => Way::Eager,
            () if step.instantiated && step.known => Way::Recaptured,
            () if step.instantiated => Way::Captured,
            () if step.updated => Way::Updated,
            () if step.unbacked && step.mapped > 0 => Way::Remapped,
            () => Way::Replayed,
        };
        *self.findings.ways.entry(way).or_default() += 1;
        self.findings.met_stale += u64::from(step.met_stale);
        if step.undisturbed {
            self.findings.undisturbed += 1;
            self.findings.undisturbed_replays += u64::from(step.launched && step.calls == 1);
        }
        Some(Seen { way, calls: step.calls, mapped: step.mapped })
    }
}

/// Every aligned 8-byte word of packed arguments.
fn words(payload: &[u8]) -> Vec<u64> {
    (0..payload.len() / 8).filter_map(|index| word(payload, index * 8)).collect()
}

fn word(payload: &[u8], offset: usize) -> Option<u64> {
    let bytes = payload.get(offset..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests;
