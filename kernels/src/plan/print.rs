//! A plan for people and programs: as a list of plain steps, as text, as a DOT graph.

use std::fmt::Write as _;

use evergraph_pool::driver::DeviceOrdinal;
use smallvec::SmallVec;

use super::Plan;
use crate::host::HOST;
use crate::ops::TensorView;

/// A tensor that a step touches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// The root's name.
    pub root: String,
    /// The device of the root's memory.
    pub device: DeviceOrdinal,
    /// Element type.
    pub ty: &'static str,
    /// Elements along each dimension.
    pub shape: SmallVec<[usize; 4]>,
    /// First byte, counted from the root's.
    pub offset_bytes: usize,
    /// From the first to the last byte.
    pub bytes: usize,
    /// Whether the root is a weight split over devices.
    pub split: bool,
}

/// One step of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanStep {
    /// Its op.
    pub op: &'static str,
    /// Where it runs.
    pub device: DeviceOrdinal,
    /// What it writes. Of a row write, the cache: what comes of it is the whole.
    pub writes: Vec<Tensor>,
    /// What it reads.
    pub reads: Vec<Tensor>,
    /// The steps that it comes after, by their numbers in the list.
    pub after: Vec<usize>,
    /// Whether it brings memory from another device.
    pub crosses: bool,
}

impl Tensor {
    fn of(view: &TensorView) -> Self {
        Self {
            root: view.root().name.clone(),
            device: view.root().device,
            ty: view.ty().name(),
            shape: SmallVec::from_slice(view.shape()),
            offset_bytes: view.offset_bytes(),
            bytes: view.range().len(),
            split: view.root().is_split(),
        }
    }
}

impl std::fmt::Display for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.root)?;
        if self.offset_bytes > 0 {
            write!(f, "+{}", self.offset_bytes)?;
        }
        write!(f, ":{}{:?}", self.ty, self.shape.as_slice())?;
        if self.split { f.write_str("(split)") } else { Ok(()) }
    }
}

impl Plan {
    /// Its steps as plain values, in order.
    #[must_use]
    pub fn steps(&self) -> Vec<PlanStep> {
        let tensors = |views: Vec<&TensorView>| views.into_iter().map(Tensor::of).collect();
        let steps = self.ops.iter().zip(&self.devices).zip(self.order());
        steps
            .map(|((op, device), after)| PlanStep {
                op: op.name(),
                device: *device,
                writes: tensors(op.writes()),
                reads: tensors(op.reads()),
                after: after.into_vec(),
                crosses: op.crosses(),
            })
            .collect()
    }
}

fn place(device: DeviceOrdinal) -> String {
    if device == HOST { "host".to_owned() } else { format!("device {device}") }
}

fn list(tensors: &[Tensor]) -> String {
    tensors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// One line a step.
#[must_use]
pub fn text(steps: &[PlanStep]) -> String {
    let mut out = String::new();
    for (number, step) in steps.iter().enumerate() {
        let from = if step.crosses { step.reads.first().map(|read| read.device) } else { None };
        let from = from.map_or_else(String::new, |device| format!(" from {}", place(device)));
        let after: Vec<String> = step.after.iter().map(ToString::to_string).collect();
        // Writing into a string can not fail.
        let _ = writeln!(
            out,
            "{number:>5}  {:<8}  {}{from}  {} <- {}  after [{}]",
            place(step.device),
            step.op,
            list(&step.writes),
            list(&step.reads),
            after.join(", ")
        );
    }
    out
}

/// A graph for Graphviz: a box around the steps of each device, copies between devices in bold.
#[must_use]
pub fn dot(steps: &[PlanStep]) -> String {
    let mut out = String::from("digraph plan {\n  rankdir=TB;\n  node [shape=box, fontname=\"monospace\"];\n");
    let mut devices: Vec<DeviceOrdinal> = Vec::new();
    for step in steps {
        if !devices.contains(&step.device) {
            devices.push(step.device);
        }
    }
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    for (index, device) in devices.iter().enumerate() {
        let _ = writeln!(out, "  subgraph cluster_{index} {{\n    label=\"{}\";", place(*device));
        for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.device == *device) {
            let label = format!("{number} {}\\n{}", step.op, escaped(&list(&step.writes)));
            let style = if step.crosses { ", style=bold" } else { "" };
            let _ = writeln!(out, "    s{number} [label=\"{label}\"{style}];");
        }
        out.push_str("  }\n");
    }
    for (number, step) in steps.iter().enumerate() {
        for before in &step.after {
            let _ = writeln!(out, "  s{before} -> s{number};");
        }
    }
    out.push_str("}\n");
    out
}
