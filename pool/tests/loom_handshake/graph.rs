//! A captured graph of one kernel, and the launch side of a cache.

use std::sync::Arc;

use crate::handshake::{Launcher, Lease, Patience, Proven, RetireHost};
use crate::mutant;
use crate::pool::{Dependent, Pool};

/// One thing the graph depends on.
#[derive(Debug)]
struct Dependency {
    pool: Arc<Pool>,
    block: usize,
    generation: u32,
    proven: Proven,
}

#[derive(Debug)]
pub(crate) struct Graph {
    launcher: Launcher,
    stream: usize,
    tag: u32,
    launches: u64,
    evicts_itself: bool,
    dependencies: Vec<Dependency>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ran {
    Launched,
    /// Refused: repair or an eager run comes next.
    Stale,
}

impl Graph {
    pub(crate) fn new(stream: usize, tag: u32) -> Self {
        Self { launcher: Launcher::new(), stream, tag, launches: 0, evicts_itself: false, dependencies: Vec::new() }
    }

    pub(crate) fn dependent(&self) -> Dependent {
        Dependent { lease: Arc::clone(self.launcher.lease()), stream: self.stream }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        self.launcher.lease()
    }

    /// Numbers launches from `number` on: the stream had others before.
    pub(crate) fn numbered_from(mut self, number: u64) -> Self {
        self.launches = number - 1;
        self
    }

    /// The memory that its repair asks for is its own.
    pub(crate) fn evicting_itself(mut self) -> Self {
        self.evicts_itself = true;
        self
    }

    /// Registers with a block, as the hand-out of a quiet window did.
    pub(crate) fn on(mut self, pool: &Arc<Pool>, block: usize) -> Self {
        let generation = pool.locked(|state| state.register(block, self.dependent()));
        self.depend(pool, block, generation);
        self
    }

    pub(crate) fn depend(&mut self, pool: &Arc<Pool>, block: usize, generation: u32) {
        self.dependencies.push(Dependency { pool: Arc::clone(pool), block, generation, proven: Proven::NONE });
    }

    /// The end of a capture proves nothing.
    pub(crate) fn end_capture(&mut self) {
        if mutant::is("proven-by-capture-end") {
            for dependency in &mut self.dependencies {
                dependency.proven = dependency.pool.locked(|state| state.proven());
            }
        }
    }

    /// Under each pool's lock: everything good? Then that epoch is proven.
    pub(crate) fn walk(&mut self) -> Ran {
        for dependency in &mut self.dependencies {
            let Dependency { pool, block, generation, .. } = dependency;
            let lease = self.launcher.lease();
            let good =
                pool.locked(|state| (state.good(*block, *generation) && !lease.is_dead()).then(|| state.proven()));
            match good {
                None => return Ran::Stale,
                Some(_) if mutant::is("proven-after-unlock") => {
                    dependency.proven = pool.locked(|state| state.proven());
                }
                Some(proven) => dependency.proven = proven,
            }
        }
        Ran::Launched
    }

    /// One run: launch if undisturbed, else walk and try once more.
    pub(crate) fn run(&mut self) -> Ran {
        if self.try_launch() {
            return Ran::Launched;
        }
        loop {
            if mutant::is("lease-kept") {
                // The walk happens under the lease, and so does whatever repair would do.
                let lease = Arc::clone(self.launcher.lease());
                let _kept = lease.enter();
                if self.walk() == Ran::Stale {
                    self.make_room();
                    return Ran::Stale;
                }
            } else if self.walk() == Ran::Stale {
                self.make_room();
                return Ran::Stale;
            }
            if self.try_launch() {
                return Ran::Launched;
            }
        }
    }

    /// Repair allocates, and the allocation may take the graph's own memory.
    fn make_room(&self) {
        for Dependency { pool, block, .. } in &self.dependencies {
            if self.evicts_itself {
                pool.give_back(*block, Patience::Wait);
            }
            // Wait out another retirer: the block must be quiet before it can be asked for.
            while pool.locked(|state| state.retiring(*block)) {
                loom::thread::yield_now();
            }
        }
    }

    fn try_launch(&mut self) -> bool {
        let number = self.launches + 1;
        let mut proven = self.dependencies.iter().map(|d| (&*d.pool.epoch, d.proven)).collect::<Vec<_>>();
        if mutant::is("one-device-unread") {
            proven.truncate(1);
        }
        let first = &self.dependencies[0];
        let last = &self.dependencies[self.dependencies.len() - 1];
        let (stream, tag) = (self.stream, self.tag);
        let launched = self.launcher.launch(proven, number, || {
            first.pool.device.launch(stream, number, first.block, tag);
            if self.dependencies.len() > 1 {
                last.pool.device.launch(stream, number, last.block, tag);
            }
        });
        self.launches += u64::from(launched.is_some());
        launched.is_some()
    }
}
