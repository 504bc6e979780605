//! The plan of a model's steps, printed.

use clap::ValueEnum;
use evergraph_kernels::host::HOST;
use evergraph_kernels::plan::{PlanStep, Tensor, dot, text};
use evergraph_pool::driver::DeviceOrdinal;
use serde_json::{Value, json};

use super::output::Output;
use crate::engine::{Plans, Session};
use crate::error::Result;

/// What a plan is printed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlanFormat {
    /// A line a step.
    Text,
    /// One document.
    Json,
    /// Graphs for Graphviz.
    Dot,
}

/// Prints what steps of a prompt of so many tokens, and of one token, would do.
pub(super) fn print(session: &mut Session, tokens: usize, format: PlanFormat, out: &mut Output) -> Result<()> {
    let plans = session.plans(tokens)?;
    match format {
        PlanFormat::Text => {
            out.line(format!("a prompt of {} tokens:\n{}", plans.tokens, text(&plans.prompt)))?;
            out.line(format!("one token:\n{}", text(&plans.decode)))
        }
        PlanFormat::Dot => out.line(format!("{}{}", dot(&plans.prompt), dot(&plans.decode))),
        PlanFormat::Json => {
            let document = document(&plans);
            match out.json() {
                true => out.document(&document),
                false => out.line(document.to_string()),
            }
        }
    }
}

fn document(plans: &Plans) -> Value {
    json!({
        "prompt": { "tokens": plans.tokens, "steps": steps(&plans.prompt) },
        "decode": { "tokens": 1, "steps": steps(&plans.decode) },
    })
}

fn device(device: DeviceOrdinal) -> Value {
    if device == HOST { json!("host") } else { json!(device.0) }
}

fn steps(steps: &[PlanStep]) -> Vec<Value> {
    let tensor = |tensor: &Tensor| {
        json!({
            "root": tensor.root,
            "device": device(tensor.device),
            "type": tensor.ty,
            "shape": tensor.shape.as_slice(),
            "offset_bytes": tensor.offset_bytes,
            "bytes": tensor.bytes,
            "split": tensor.split,
        })
    };
    let step = |(number, step): (usize, &PlanStep)| {
        json!({
            "step": number,
            "op": step.op,
            "device": device(step.device),
            "crosses": step.crosses,
            "writes": step.writes.iter().map(tensor).collect::<Vec<_>>(),
            "reads": step.reads.iter().map(tensor).collect::<Vec<_>>(),
            "after": step.after,
        })
    };
    steps.iter().enumerate().map(step).collect()
}
