//! Graphs on several devices, real ones and virtual ones: whose memory moves is noticed by those who depend on it, and by
//! nobody else.

use std::sync::Arc;

use evergraph_graphcache::{CacheError, GraphCache, GraphKey, Module, Ran, Request};
use evergraph_pool::driver::host::{HostDevice, HostMachine};
use evergraph_pool::driver::{
    Args, DevicePtr, DriverErrorKind, DynDriver, EventHandle, Faulty, LaunchConfig, ModuleImage, VirtualMachine,
};
use evergraph_pool::{Content, DeviceSlice, Pool, PoolConfig, PoolMode, Purpose, Stream, Use};

use crate::rig::{BOTH, CHUNK, KERNELS, config, device};

/// One of two devices, with all that it needs.
struct Side {
    faulty: Arc<Faulty>,
    driver: DynDriver,
    pool: Pool,
    stream: Stream,
    module: Arc<Module>,
}

const WORDS: usize = CHUNK / 4;

impl Side {
    fn new(device: DynDriver, mode: PoolMode) -> Self {
        let faulty = Faulty::new(device);
        let driver: DynDriver = faulty.clone();
        driver.bind().unwrap();
        let pool = Pool::new(driver.clone(), PoolConfig::new(mode).chunk(CHUNK).smallest_slab(CHUNK)).unwrap();
        let stream = Stream::new(&driver).unwrap();
        let module = Module::load(&driver, ModuleImage::Host(KERNELS)).unwrap();
        for kernel in KERNELS {
            module.function(kernel.name).unwrap();
        }
        Self { faulty, driver, pool, stream, module }
    }

    fn slice(&self, purpose: Purpose) -> DeviceSlice<u32> {
        self.pool.alloc_for(WORDS, purpose, &self.stream).unwrap()
    }

    /// dst = src + k
    fn add(&self, dst: DevicePtr, src: DevicePtr, k: u32) -> Result<(), CacheError> {
        let function = self.module.function("add")?;
        self.driver.bind()?;
        let mut args = Args::new();
        args.ptr(dst).ptr(src).u32(WORDS as u32).u32(k);
        // SAFETY: the arguments fit `KERNELS`; the host device checks what they point at.
        unsafe {
            self.driver.launch_kernel(function, &LaunchConfig::linear(1, 32), args.as_bytes(), self.stream.handle())?;
        }
        Ok(())
    }

    fn fill(&self, slice: &DeviceSlice<u32>, value: u32) {
        self.stream.upload(&vec![value; WORDS], slice).unwrap();
    }

    fn holds(&self, slice: &DeviceSlice<u32>, value: u32) -> bool {
        self.stream.download(slice).unwrap().iter().all(|word| *word == value)
    }
}

fn pairs(story: impl Fn(&Side, &Side, &GraphCache)) {
    for mode in BOTH {
        for is_virtual in [false, true] {
            eprintln!("-- {mode}, virtual devices: {is_virtual}");
            let [near, far]: [DynDriver; 2] = if is_virtual {
                let one: DynDriver = HostDevice::new(device()).unwrap();
                let devices = VirtualMachine::new(&[one], 2).unwrap();
                [devices[0].clone(), devices[1].clone()]
            } else {
                let devices = HostMachine::new(2, device()).unwrap();
                [devices[0].clone(), devices[1].clone()]
            };
            let (near, far) = (Side::new(near, mode), Side::new(far, mode));
            let cache = GraphCache::new(config());
            story(&near, &far, &cache);
            assert_eq!((near.driver.fault(), far.driver.fault()), (None, None));
        }
    }
}

/// A graph of one device alone: out = input + 1 by way of scratch that the pool may take.
struct Own {
    key: GraphKey,
    input: DeviceSlice<u32>,
    out: DeviceSlice<u32>,
}

impl Own {
    fn new(side: &Side, name: &'static str) -> Self {
        let (input, out) = (side.slice(Purpose::State), side.slice(Purpose::State));
        Self { key: GraphKey::new(name), input, out }
    }

    fn run(&self, side: &Side, cache: &GraphCache, value: u32) -> Ran {
        side.fill(&self.input, value);
        let ran = self.only_run(side, cache);
        assert!(side.holds(&self.out, value + 1), "{ran:?}");
        ran
    }

    fn only_run(&self, side: &Side, cache: &GraphCache) -> Ran {
        let request = Request::new(&self.key, &side.pool, &side.stream).policy(evergraph_pool::ScratchPolicy::Track);
        let run = cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(&self.input, Use::Input)?;
            scope.declare(&self.out, Use::State)?;
            scope.keep(side.module.clone());
            let scratch = scope.alloc::<u32>(WORDS)?;
            side.add(scratch.ptr(), self.input.ptr(), 0)?;
            side.add(self.out.ptr(), scratch.ptr(), 1)
        });
        run.unwrap().ran
    }
}

#[test]
fn a_flush_on_one_device_is_nothing_to_graphs_of_another() {
    pairs(|near, far, cache| {
        let (here, there) = (Own::new(near, "here"), Own::new(far, "there"));
        for value in 0..5 {
            here.run(near, cache, value);
            there.run(far, cache, value);
        }
        let bumps = near.pool.counters().epoch_bumps;
        assert!(far.pool.trim_to(0).unwrap() > 0);
        assert_eq!(near.pool.counters().epoch_bumps, bumps);
        // One call, with nothing to be proven again.
        near.driver.bind().unwrap();
        near.faulty.set_logging(true);
        assert_eq!(here.only_run(near, cache), Ran::Replayed);
        near.faulty.set_logging(false);
        assert_eq!(near.faulty.take_log().iter().map(|call| call.name).collect::<Vec<_>>(), ["launch"]);
        assert_ne!(there.run(far, cache, 9), Ran::Replayed, "its scratch was taken");
        assert_eq!(here.run(near, cache, 10), Ran::Replayed);
    });
}

/// A graph that begins on one device, goes on in a stream of another, and comes back.
struct Relay {
    input: DeviceSlice<u32>,
    here: DeviceSlice<u32>,
    there: DeviceSlice<u32>,
    far: DeviceSlice<u32>,
    out: DeviceSlice<u32>,
    events: [EventHandle; 2],
}

impl Relay {
    fn new(near: &Side, far: &Side) -> Self {
        let event = |side: &Side| {
            side.driver.bind().unwrap();
            side.driver.event_create(false).unwrap()
        };
        Self {
            input: near.slice(Purpose::State),
            here: near.slice(Purpose::Scratch),
            there: far.slice(Purpose::Scratch),
            far: far.slice(Purpose::State),
            out: near.slice(Purpose::State),
            events: [event(near), event(far)],
        }
    }

    fn run(&self, near: &Side, far: &Side, cache: &GraphCache, value: u32) -> Ran {
        near.fill(&self.input, value);
        far.fill(&self.far, 0xEE);
        let key = GraphKey::new("relay");
        let (others, bound) = ([&far.pool], [self.here.allocation(), self.there.allocation()]);
        let request = Request::new(&key, &near.pool, &near.stream).others(&others).bound(&bound);
        let (zero, one, bytes) = (near.pool.device(), far.pool.device(), self.input.bytes());
        let run = cache.run(&request, |scope| -> Result<(), CacheError> {
            scope.declare(&self.input, Use::Input)?;
            scope.declare(&self.here, Use::Scratch)?;
            scope.declare(&self.there, Use::Scratch)?;
            scope.declare(&self.far, Use::State)?;
            scope.declare(&self.out, Use::State)?;
            scope.keep(near.module.clone());
            scope.keep(far.module.clone());
            let (home, away) = (near.stream.handle(), far.stream.handle());
            near.add(self.here.ptr(), self.input.ptr(), 2)?;
            near.driver.memcpy_peer(self.there.ptr(), one, self.here.ptr(), zero, bytes, home)?;
            near.driver.event_record(self.events[0], home)?;
            far.driver.bind()?;
            far.driver.stream_wait_event(away, self.events[0])?;
            far.add(self.far.ptr(), self.there.ptr(), 5)?;
            far.driver.event_record(self.events[1], away)?;
            near.driver.bind()?;
            near.driver.stream_wait_event(home, self.events[1])?;
            near.driver.memcpy_peer(self.out.ptr(), zero, self.far.ptr(), one, bytes, home)?;
            Ok(())
        });
        let ran = run.unwrap().ran;
        assert!(near.holds(&self.out, value + 7), "{ran:?}");
        ran
    }

    fn settle(&self, near: &Side, far: &Side, cache: &GraphCache) {
        let ran: Vec<Ran> = (0..5).map(|value| self.run(near, far, cache, value)).collect();
        assert_eq!(ran, [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed, Ran::Replayed]);
    }
}

#[test]
fn a_graph_over_two_devices_goes_stale_by_a_flush_on_either() {
    for flushed in [0, 1] {
        pairs(|near, far, cache| {
            let own = Own::new(near, "own");
            (0..4).for_each(|value| drop(own.run(near, cache, value)));
            let mut relay = Relay::new(near, far);
            relay.settle(near, far, cache);
            let (side, other) = if flushed == 0 { (near, far) } else { (far, near) };
            let bumps = [side, other].map(|side| side.pool.counters().epoch_bumps);
            let fresh = side.slice(Purpose::Scratch);
            drop(std::mem::replace(if flushed == 0 { &mut relay.here } else { &mut relay.there }, fresh));
            side.stream.synchronize().unwrap();
            side.pool.trim_to(0).unwrap();
            assert!(side.pool.counters().epoch_bumps > bumps[0]);
            assert_eq!(other.pool.counters().epoch_bumps, bumps[1]);
            assert_ne!(relay.run(near, far, cache, 100), Ran::Replayed);
            let ran: Vec<Ran> = (0..5).map(|value| relay.run(near, far, cache, 200 + value)).collect();
            assert_eq!(ran[3..], [Ran::Replayed; 2], "{ran:?}");
            let ran = own.run(near, cache, 300);
            assert!(flushed == 0 || ran == Ran::Replayed, "{ran:?}");
        });
    }
}

/// What only moved on the second device is seen at the launch: each device has an epoch, and all are read.
#[test]
fn the_epoch_of_the_second_device_is_read_too() {
    pairs(|near, far, cache| {
        let mut relay = Relay::new(near, far);
        relay.settle(near, far, cache);
        // The graph's own buffer, not its caller's, who gave it up and named no other.
        let (there, stale) = (relay.there.allocation(), cache.counters().stale);
        relay.there = far.slice(Purpose::Scratch);
        assert_ne!(relay.there.allocation(), there);
        far.pool.trim_to(0).unwrap();
        let key = GraphKey::new("relay");
        let (others, bound) = ([&far.pool], [relay.here.allocation(), there]);
        let request = Request::new(&key, &near.pool, &near.stream).others(&others).bound(&bound);
        let outcome = cache.run(&request, |_| Err(CacheError::NoArena));
        assert!(outcome.is_err() || outcome.is_ok_and(|outcome| outcome.ran != Ran::Replayed));
        assert!(cache.counters().stale > stale);
    });
}

/// A kernel reads the other device's memory in place, by a grant: its graph depends on that memory like on any other, and
/// other pages under it are granted and noticed.
#[test]
fn a_graph_that_rests_on_a_grant_survives_new_pages() {
    pairs(|near, far, cache| {
        near.pool.grant(&far.driver, &[Purpose::State]).unwrap();
        let (input, out) = (near.slice(Purpose::State), far.slice(Purpose::State));
        let run = |value: u32| {
            near.fill(&input, value);
            let key = GraphKey::new("in place");
            let others = [&near.pool];
            let request = Request::new(&key, &far.pool, &far.stream).others(&others);
            let run = cache.run(&request, |scope| -> Result<(), CacheError> {
                scope.declare(&input, Use::Input)?;
                scope.declare(&out, Use::State)?;
                scope.keep(far.module.clone());
                far.add(out.ptr(), input.ptr(), 3)
            });
            let ran = run.unwrap().ran;
            assert!(far.holds(&out, value + 3), "{ran:?}");
            ran
        };
        let ran: Vec<Ran> = (0..4).map(run).collect();
        assert_eq!(ran, [Ran::WarmUp, Ran::WarmUp, Ran::Captured, Ran::Replayed]);
        if near.pool.mode() == PoolMode::Slab {
            return;
        }
        near.pool.sleep(Content::Keep, &[Purpose::State]).unwrap();
        near.pool.wake(&[Purpose::State]).unwrap();
        assert_ne!(run(50), Ran::Replayed, "other pages are taken note of");
        assert_eq!(run(51), Ran::Replayed);
        // A launch after pages came elsewhere in that memory: nothing to this graph.
        let more = near.slice(Purpose::State);
        assert_eq!(run(52), Ran::Replayed);
        drop(more);
    });
}

/// Without a grant virtual devices refuse the launch itself, inside a capture too; stream and cache stay usable.
#[test]
fn an_access_without_a_grant_is_refused_and_breaks_nothing() {
    pairs(|near, far, cache| {
        if near.driver.info().virtual_of.is_none() {
            return; // a fault, which the device does not survive: told in the driver's stories
        }
        let own = Own::new(far, "own");
        let input = near.slice(Purpose::State);
        let key = GraphKey::new("astray");
        for _ in 0..3 {
            let others = [&near.pool];
            let request = Request::new(&key, &far.pool, &far.stream).others(&others);
            let error = cache.run(&request, |scope| -> Result<(), CacheError> {
                scope.declare(&input, Use::Input)?;
                far.add(own.out.ptr(), input.ptr(), 1)
            });
            let error = error.unwrap_err();
            let CacheError::Driver(driver) = &error else { panic!("{error}") };
            let DriverErrorKind::Foreign(foreign) = &driver.kind else { panic!("{error}") };
            assert_eq!((foreign.op.as_str(), foreign.address, foreign.owner.0), ("add", input.ptr(), 0), "{error}");
        }
        let ran: Vec<Ran> = (0..4).map(|value| own.run(far, cache, value)).collect();
        assert_eq!(ran[2..], [Ran::Captured, Ran::Replayed]);
    });
}
