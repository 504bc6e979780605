#![allow(clippy::unwrap_used)]

use evergraph_kernels::host::tensor;
use evergraph_kernels::ops::{Copy, Fill, GetRows, Scale};

use super::*;
use crate::engine::{RuntimeConfig, Step};

/// A device and a host that share steps: each looks up rows of a table of the host's, by ids that lie on the device.
struct Rig {
    runtime: Arc<Runtime>,
    side: HostSide,
    table: TensorView,
    ids: DeviceSlice<i32>,
    out: DeviceSlice<f32>,
}

const ROWS: usize = 5;
const COLS: usize = 8;
const IDS: usize = 3;

impl Rig {
    fn new(work: HostWork, graphs: bool) -> Self {
        let config = RuntimeConfig { host_work: Some(work), graphs, strict: true, ..RuntimeConfig::default() };
        let runtime = Arc::new(Runtime::host(config).unwrap());
        let memory = Arc::new(HostBlock::new(ROWS * COLS * 4).unwrap());
        let table = tensor(&memory, "table", QuantType::F32, &[ROWS, COLS]).unwrap();
        // Row `r` is all `r + 1`: filled by a part of its own.
        let mut plan = evergraph_kernels::ops::Plan::new();
        for row in 0..ROWS {
            plan.push(Fill { x: table.narrow(0, row, 1).unwrap(), value: row as f32 + 1.0 }).unwrap();
        }
        HostPart::new(&plan, Vec::new()).unwrap().run().unwrap();
        let shares = Shares { streamed: None, device: 0 };
        let side = HostSide::new(&runtime, runtime.device(), vec![memory as Keep], shares).unwrap();
        let (pool, stream) = (runtime.pool(), runtime.stream());
        let ids = pool.alloc_for(IDS, Purpose::State, stream).unwrap();
        let out = pool.alloc_for(IDS * COLS, Purpose::State, stream).unwrap();
        Self { runtime, side, table, ids, out }
    }

    /// Twice the rows of these ids, looked up on the host and doubled on the device.
    fn look_up(&self, ids: [i32; IDS]) -> Result<Vec<f32>> {
        self.runtime.stream().upload(&ids, &self.ids)?;
        let device = self.runtime.device();
        let key = StepKey { session: 7, what: "look up", shape: [0; 3] };
        let uses: [(&dyn Tracked, Use); 2] = [(&self.ids, Use::State), (&self.out, Use::State)];
        let _ =
            self.runtime.step_on(self.runtime.device(), key, &uses, &[], Some(&self.side), |step: &mut Step<'_>| {
                let ids = view_of(&self.ids, "ids", device, QuantType::I32, &[IDS])?;
                let out = view_of(&self.out, "out", device, QuantType::F32, &[IDS, COLS])?;
                let there = step.crossing("ids on the host", QuantType::I32, &[IDS])?;
                step.push(Copy { src: ids, dst: there.device })?;
                let rows = step.crossing("rows of the host", QuantType::F32, &[IDS, COLS])?;
                let table = self.table.clone();
                let asked =
                    step.on_host(|step| step.push(GetRows { table, ids: there.host, out: rows.host, scale: 1.0 }))?;
                step.push(Fill { x: out.clone(), value: -1.0 })?;
                step.wait(asked)?;
                step.push(Scale { x: rows.device, out, factor: 2.0 })
            })?;
        let mut found = vec![0.0; IDS * COLS];
        self.runtime.stream().download_into(&self.out, &mut found)?;
        self.side.check()?;
        Ok(found)
    }
}

fn doubled(ids: [i32; IDS]) -> Vec<f32> {
    ids.iter().flat_map(|id| [2.0 * (*id as f32 + 1.0); COLS]).collect()
}

const WAYS: [(HostWork, bool); 4] =
    [(HostWork::Turns, true), (HostWork::Turns, false), (HostWork::Nodes, true), (HostWork::Nodes, false)];

#[test]
fn the_host_answers_every_launch_with_the_ids_of_that_launch() {
    for (work, graphs) in WAYS {
        let rig = Rig::new(work, graphs);
        for round in 0..20 {
            let ids = [round % 5, (round * 3 + 1) % 5, 4];
            assert_eq!(rig.look_up(ids).unwrap(), doubled(ids), "{work:?}, graphs {graphs}, round {round}");
        }
        assert_eq!(rig.runtime.graph_counters().replays > 10, graphs, "{work:?}");
    }
}

#[test]
fn bad_data_in_the_hosts_share_is_a_typed_error_and_the_next_step_works() {
    for (work, graphs) in WAYS {
        let rig = Rig::new(work, graphs);
        // As an eager run, as a capture's first launch and as a replay, whatever is next.
        for round in 0..6 {
            for bad in [ROWS as i32, -1, i32::MIN] {
                let error = rig.look_up([0, bad, 1]).unwrap_err();
                assert!(matches!(error, Error::HostFault { .. }), "{work:?}, graphs {graphs}: {error:?}");
                assert!(error.to_string().contains("row number out of range"), "{error}");
            }
            let ids = [round % 5, 2, 3];
            assert_eq!(rig.look_up(ids).unwrap(), doubled(ids), "{work:?}, graphs {graphs}, round {round}");
        }
    }
}

#[test]
fn two_shares_at_once_and_a_share_without_a_host_are_refused() {
    let rig = Rig::new(HostWork::Turns, true);
    let key = |what| StepKey { session: 7, what, shape: [0; 3] };
    let nothing = |_: &mut Step<'_>| Ok(());
    let twice = rig.runtime.step_on(rig.runtime.device(), key("twice"), &[], &[], Some(&rig.side), |step| {
        let first = step.on_host(nothing)?;
        let second = step.on_host(nothing).map(|_| ());
        step.wait(first)?;
        second
    });
    assert!(matches!(twice, Err(Error::CheckFailed(_))), "{twice:?}");
    let alone = rig.runtime.step(key("alone"), &[], &[], |step| step.on_host(nothing).map(|_| ()));
    assert!(matches!(alone, Err(Error::CheckFailed(_))), "{alone:?}");
    // What was refused left nothing behind.
    assert_eq!(rig.look_up([0, 1, 2]).unwrap(), doubled([0, 1, 2]));
}
