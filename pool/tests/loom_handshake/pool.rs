//! A pool of a few blocks, with the retire side of the handshake as it ships.

use std::sync::Arc;

use loom::sync::Mutex;

use crate::device::Device;
use crate::handshake::{self, Cleared, Epoch, EpochWriter, Lease, Need, Patience, Proven, Retire, RetireHost};
use crate::mutant;

/// A dependent, as the pool knows it: its lease and its stream.
#[derive(Clone, Debug)]
pub(crate) struct Dependent {
    pub(crate) lease: Arc<Lease>,
    pub(crate) stream: usize,
}

#[derive(Debug)]
pub(crate) struct Block {
    generation: u32,
    mapped: bool,
    live: bool,
    retiring: bool,
    dependents: Vec<Dependent>,
    /// Queued work that may still touch the block.
    uses: Vec<(usize, u64)>,
}

#[derive(Debug)]
pub(crate) struct State {
    epoch: EpochWriter,
    /// Stands in for the epoch where a mutant forgets to move it.
    idle: EpochWriter,
    forget_bump: bool,
    device: Arc<Device>,
    blocks: Vec<Block>,
    /// Streams that capture, with the event recorded when they began.
    capturing: Vec<Option<u64>>,
    by_events: bool,
}

/// What changes together.
#[derive(Clone, Debug)]
pub(crate) enum Victim {
    Block(usize),
    /// A graph that depends on a block.
    Graph(Dependent, usize),
}

impl Retire for State {
    type Victim = Victim;

    fn epoch(&mut self) -> &mut EpochWriter {
        if self.forget_bump { &mut self.idle } else { &mut self.epoch }
    }

    fn mark(&mut self, victim: &Victim) -> bool {
        match victim {
            Victim::Block(block) => {
                let block = &mut self.blocks[*block];
                let ours = !block.live && block.mapped && !block.retiring;
                block.retiring |= ours;
                ours
            }
            Victim::Graph(graph, _) => {
                let first = !graph.lease.is_dead();
                graph.lease.mark_dead();
                first
            }
        }
    }

    fn unmark(&mut self, victim: &Victim) {
        match victim {
            Victim::Block(block) => self.blocks[*block].retiring = false,
            // A dead graph stays dead.
            Victim::Graph(..) => {}
        }
    }

    fn leases(&self, victim: &Victim, visit: &mut dyn FnMut(&Arc<Lease>)) {
        match victim {
            Victim::Block(block) => self.blocks[*block].dependents.iter().for_each(|d| visit(&d.lease)),
            Victim::Graph(graph, _) => visit(&graph.lease),
        }
    }
}

impl State {
    /// Whether a record (block, generation) still holds.
    pub(crate) fn good(&self, block: usize, generation: u32) -> bool {
        let block = &self.blocks[block];
        block.mapped && block.generation == generation && (!block.retiring || mutant::is("retiring-ignored"))
    }

    pub(crate) fn retiring(&self, block: usize) -> bool {
        self.blocks[block].retiring && !mutant::is("retiring-ignored")
    }

    pub(crate) fn proven(&self) -> Proven {
        self.epoch.proven()
    }

    pub(crate) fn register(&mut self, block: usize, dependent: Dependent) -> u32 {
        self.blocks[block].dependents.push(dependent);
        self.blocks[block].generation
    }

    pub(crate) fn generation(&self, block: usize) -> u32 {
        self.blocks[block].generation
    }

    fn unregister(&mut self, block: usize, graph: &Dependent, last: (usize, u64)) {
        let block = &mut self.blocks[block];
        block.dependents.retain(|d| !Arc::ptr_eq(&d.lease, &graph.lease));
        if !mutant::is("eviction-forgets-launch") {
            block.uses.push(last);
        }
    }

    /// A free block for a window; free means free of owners and of retirers.
    pub(crate) fn hand_out(&mut self, block: usize) -> bool {
        let block = &mut self.blocks[block];
        let free = !block.live && block.mapped && !block.retiring;
        block.live |= free;
        free
    }

    pub(crate) fn free(&mut self, block: usize) {
        self.blocks[block].live = false;
    }

    /// Starts a capture: records the stream's event, then says that it captures.
    pub(crate) fn begin_capture(&mut self, stream: usize) {
        if !mutant::is("capture-begun-unlocked") {
            self.capturing[stream] = Some(self.device.record(stream));
            self.device.begin_capture(stream);
        } else {
            self.capturing[stream] = Some(0);
        }
    }

    pub(crate) fn end_capture(&mut self, stream: usize) {
        self.device.end_capture(stream);
        self.capturing[stream] = None;
    }
}

#[derive(Debug)]
pub(crate) struct Pool {
    state: Mutex<State>,
    pub(crate) epoch: Arc<Epoch>,
    pub(crate) device: Arc<Device>,
}

impl Pool {
    pub(crate) fn new(device: &Arc<Device>, blocks: usize) -> Arc<Self> {
        Self::build(device, blocks, false)
    }

    /// A pool that orders by events recorded when it retires, not by launch numbers.
    pub(crate) fn with_events(device: &Arc<Device>, blocks: usize) -> Arc<Self> {
        Self::build(device, blocks, true)
    }

    fn build(device: &Arc<Device>, blocks: usize, by_events: bool) -> Arc<Self> {
        let block = |_| Block {
            generation: 1,
            mapped: true,
            live: false,
            retiring: false,
            dependents: Vec::new(),
            uses: Vec::new(),
        };
        let epoch = EpochWriter::new();
        let published = epoch.published();
        let state = State {
            epoch,
            idle: EpochWriter::new(),
            forget_bump: false,
            device: Arc::clone(device),
            blocks: (0..blocks).map(block).collect(),
            capturing: vec![None; 4],
            by_events,
        };
        Arc::new(Self { state: Mutex::new(state), epoch: published, device: Arc::clone(device) })
    }

    /// Gives a block back to the driver, when the host has seen every use of it complete.
    pub(crate) fn give_back(&self, block: usize, patience: Patience) -> bool {
        handshake::retire(self, &Victim::Block(block), patience, Need::Host, |state, _| {
            let device = Arc::clone(&state.device);
            let entry = &mut state.blocks[block];
            entry.generation += 1;
            entry.mapped = false;
            device.unmap(block);
        })
        .is_some()
    }

    /// Hands a block to another owner in stream order. `writes`: the owner's stream and bytes, if it
    /// queues any work before it lets go again.
    pub(crate) fn reissue(&self, block: usize, writes: Option<(usize, u32)>, patience: Patience) -> bool {
        handshake::retire(self, &Victim::Block(block), patience, Need::Stream, |state, order| {
            let device = Arc::clone(&state.device);
            let entry = &mut state.blocks[block];
            entry.live = true;
            entry.generation += 1;
            // The old dependents were told; their last launches stay as uses until the host sees them over.
            entry.dependents.clear();
            entry.uses = if mutant::is("reissue-forgets-uses") { Vec::new() } else { order.clone() };
            if let Some((stream, tag)) = writes {
                let number = device.write_after(stream, block, tag, order);
                entry.uses.push((stream, number));
            }
        })
        .is_some()
    }

    /// Evicts a graph: a retire of the graph.
    pub(crate) fn evict(&self, graph: &Dependent, block: usize) -> bool {
        let victim = Victim::Graph(graph.clone(), block);
        if mutant::is("eviction-skips-handshake") {
            self.locked(|state| {
                graph.lease.mark_dead();
                state.unregister(block, graph, (graph.stream, graph.lease.last_launch()));
            });
            return true;
        }
        handshake::retire(self, &victim, Patience::Wait, Need::Stream, |state, order| {
            for &last in order {
                state.unregister(block, graph, last);
            }
        })
        .is_some()
    }

    /// Tries victims in turn and takes the first whose dependents are all out of their leases.
    pub(crate) fn give_back_any(&self, blocks: &[usize]) -> bool {
        for (index, &block) in blocks.iter().enumerate() {
            if mutant::is("second-victim-without-bump") {
                self.locked(|state| state.forget_bump = index != 0);
            }
            if self.give_back(block, Patience::Skip) {
                return true;
            }
        }
        false
    }
}

impl RetireHost for Pool {
    type State = State;
    type Order = Vec<(usize, u64)>;

    fn locked<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.lock().unwrap())
    }

    fn order(state: &mut State, victim: &Victim, cleared: &Cleared) -> Vec<(usize, u64)> {
        if mutant::is("no-ordering") {
            return Vec::new();
        }
        let (block, dependents) = match victim {
            Victim::Block(block) => (*block, state.blocks[*block].dependents.clone()),
            Victim::Graph(graph, block) => (*block, vec![graph.clone()]),
        };
        let mut order = match victim {
            Victim::Block(_) => state.blocks[block].uses.clone(),
            Victim::Graph(..) => Vec::new(),
        };
        for (dependent, (_, number)) in dependents.iter().zip(cleared.last_launches()) {
            let number = match (state.by_events, state.capturing[dependent.stream]) {
                (false, _) => number,
                (true, Some(begin)) => begin,
                (true, None) => state.device.record(dependent.stream),
            };
            order.push((dependent.stream, number));
        }
        order
    }

    fn wait(&self, order: &Vec<(usize, u64)>) {
        for &(stream, number) in order {
            self.device.wait(stream, number);
        }
    }
}
