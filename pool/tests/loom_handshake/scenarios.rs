//! The scenarios. Each runs under `loom::model` and panics in some interleaving if the protocol is broken.

use std::sync::Arc;

use loom::thread::spawn;

use crate::device::Device;
use crate::graph::Graph;
use crate::handshake::{Patience, RetireHost};
use crate::mutant;
use crate::pool::Pool;

const A: u32 = 0xa;
const B: u32 = 0xb;

/// A scenario and how far it is explored.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    model: fn(),
    /// How often a thread may be preempted in one execution; `None`: all interleavings. Bounded only where the
    /// full space takes minutes.
    preemptions: Option<usize>,
}

impl Scenario {
    pub(crate) fn explore(self) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = self.preemptions;
        // A hang shows as a spin that never ends.
        builder.max_branches = 400;
        builder.check(self.model);
    }
}

/// A graph replays while its block is given back.
fn basic() {
    let device = Device::new(1, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    device.drain();
}

/// A graph that was never walked runs for the first time while its block is given back.
fn first_run() {
    let device = Device::new(1, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    let launcher = spawn(move || {
        graph.run();
    });
    pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    device.drain();
}

/// The same with a retirer that does not wait for leases; the block may stay.
fn basic_skip() {
    let device = Device::new(1, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    pool.give_back(0, Patience::Skip);
    launcher.join().unwrap();
    device.drain();
}

/// A graph replays while its scratch goes to another owner, in stream order.
fn reissue() {
    let device = Device::new(2, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    pool.reissue(0, Some((1, B)), Patience::Wait);
    launcher.join().unwrap();
    device.drain();
}

/// A graph that goes stale needs memory for its repair, and the only memory is its own.
fn self_evict() {
    let device = Device::new(2, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0).evicting_itself();
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    // Somebody takes the block and drops it again: stale, and free to be given back.
    if pool.reissue(0, Some((1, B)), Patience::Wait) {
        pool.locked(|state| state.free(0));
    }
    launcher.join().unwrap();
    device.drain();
}

/// A window takes a block, while a retirer wants that block and another one whose graph ran on the capturing
/// stream.
fn hand_out() {
    let device = Device::new(1, &[A, A]);
    let pool = Pool::with_events(&device, 2);
    let mut earlier = Graph::new(0, A).on(&pool, 1);
    earlier.run();
    let mut graph = Graph::new(0, A).numbered_from(10);
    let window = {
        let pool = Arc::clone(&pool);
        spawn(move || {
            if mutant::is("capture-begun-unlocked") {
                pool.device.begin_capture(0);
            }
            pool.locked(|state| state.begin_capture(0));
            let late = mutant::is("late-registration");
            // Hand-out and registration: one critical section.
            let generation = pool.locked(|state| {
                state.hand_out(0).then(|| match late {
                    true => state.generation(0),
                    false => state.register(0, graph.dependent()),
                })
            });
            pool.locked(|state| {
                if generation.is_some() {
                    state.free(0);
                }
                state.end_capture(0);
            });
            if let Some(generation) = generation {
                graph.depend(&pool, 0, generation);
                graph.end_capture();
                if late {
                    graph.walk();
                    pool.locked(|state| state.register(0, graph.dependent()));
                }
                graph.run();
            }
        })
    };
    pool.give_back(1, Patience::Wait);
    pool.give_back(0, Patience::Wait);
    window.join().unwrap();
    device.drain();
}

/// Two blocks of two graphs: the retirer turns to the second when the first one's graph is launching.
fn two_retires() {
    let device = Device::new(2, &[A, B]);
    let pool = Pool::new(&device, 2);
    let mut first = Graph::new(0, A).on(&pool, 0);
    let mut second = Graph::new(1, B).on(&pool, 1);
    first.walk();
    second.walk();
    let one = spawn(move || first.run());
    let two = spawn(move || second.run());
    pool.give_back_any(&[0, 1]);
    one.join().unwrap();
    two.join().unwrap();
    device.drain();
}

/// A block goes to another owner, who lets go of it without queueing anything, and is then given back.
fn reissue_then_give_back() {
    let device = Device::new(2, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    if pool.reissue(0, None, Patience::Wait) {
        pool.locked(|state| state.free(0));
    }
    pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    device.drain();
}

/// A graph is evicted while it replays; then the block that it used is given back.
fn evict() {
    let device = Device::new(1, &[A]);
    let pool = Pool::new(&device, 1);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.walk();
    let dependent = graph.dependent();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    pool.evict(&dependent, 0);
    pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    device.drain();
}

/// One graph over two devices, and a retirer on the second.
fn two_devices() {
    let near = Device::new(1, &[A]);
    let far = Device::new(1, &[A]);
    let near_pool = Pool::new(&near, 1);
    let far_pool = Pool::new(&far, 1);
    let mut graph = Graph::new(0, A).on(&near_pool, 0).on(&far_pool, 0);
    graph.walk();
    let launcher = spawn(move || {
        graph.run();
        graph.run();
    });
    far_pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    near.drain();
    far.drain();
}

/// Two launchers of one graph under one lease.
fn two_launchers() {
    let device = Device::new(1, &[A]);
    let pool = Pool::new(&device, 1);
    let graph = Graph::new(0, A).on(&pool, 0);
    let proven = pool.locked(|state| state.proven());
    let launch = {
        let (pool, lease) = (Arc::clone(&pool), Arc::clone(graph.lease()));
        move || {
            let mut guard = lease.enter();
            if guard.undisturbed([(&*pool.epoch, proven)]) {
                guard.launched(pool.device.launch_numbered(0, 0, A));
            }
        }
    };
    let one = spawn(launch.clone());
    let two = spawn(launch);
    pool.give_back(0, Patience::Wait);
    one.join().unwrap();
    two.join().unwrap();
    device.drain();
}

/// The device is busy until a third thread, which needs the pool first, lets it go on; the launch blocks in
/// the driver meanwhile.
fn busy_device() {
    let device = Device::gated(1, &[A]);
    let pool = Pool::new(&device, 2);
    let mut graph = Graph::new(0, A).on(&pool, 0);
    graph.run();
    let launcher = spawn(move || graph.run());
    let opener = {
        let pool = Arc::clone(&pool);
        spawn(move || {
            pool.locked(|state| state.free(1));
            pool.device.open();
        })
    };
    pool.give_back(0, Patience::Wait);
    launcher.join().unwrap();
    opener.join().unwrap();
    device.drain();
}

macro_rules! scenarios {
    ($($test:ident => $name:ident = $model:ident, $preemptions:expr;)*) => {$(
        pub(crate) const $name: Scenario = Scenario { name: stringify!($model), model: $model, preemptions: $preemptions };

        #[test]
        fn $test() {
            let start = std::time::Instant::now();
            $name.explore();
            println!("{:<24} {:?} {:.2} s", $name.name, $name.preemptions, start.elapsed().as_secs_f64());
        }
    )*};
}

scenarios! {
    a_replay_beside_a_give_back_never_touches_unmapped_memory => BASIC = basic, None;
    the_proven_epoch_belongs_to_the_walk => FIRST_RUN = first_run, None;
    a_retirer_that_skips_leased_victims_is_safe => BASIC_SKIP = basic_skip, None;
    a_replay_beside_a_reissue_never_touches_alien_bytes => REISSUE = reissue, None;
    a_graph_may_take_its_own_memory_for_its_repair => SELF_EVICT = self_evict, None;
    a_window_registers_before_anybody_can_retire_its_block => HAND_OUT = hand_out, Some(6);
    a_second_victim_gets_its_own_bump => TWO_RETIRES = two_retires, Some(4);
    uses_survive_an_owner_who_did_nothing => REISSUE_THEN_GIVE_BACK = reissue_then_give_back, None;
    an_evicted_graph_leaves_its_last_launch_behind => EVICT = evict, None;
    every_device_of_a_graph_is_checked => TWO_DEVICES = two_devices, None;
    overlapping_launchers_are_counted => TWO_LAUNCHERS = two_launchers, Some(4);
    nobody_waits_under_the_lock => BUSY_DEVICE = busy_device, Some(4);
}
