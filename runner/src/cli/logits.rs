//! `evergraph logits`: the numbers behind a choice.

use std::sync::Arc;

use serde_json::json;

use super::flags::{DeviceFlags, EngineFlags, ModelFlags, TokenList};
use super::output::Output;
use super::run::{graphs_json, merged, pool_json};
use crate::error::{Error, Result};
use crate::models::Decoder;
use crate::sampling::Sampling;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// The token ids of the prompt
    #[arg(long, value_name = "1,2,3", allow_hyphen_values = true)]
    tokens: TokenList,
    /// Greedy steps of one token after the prompt
    #[arg(long, value_name = "N", default_value_t = 0)]
    decode: usize,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    device: DeviceFlags,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// Rows of logits held at a time.
const ROWS: usize = 16;

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    flags.engine.check()?;
    let file = Arc::new(flags.model.open()?);
    let runtime = flags.engine.open(&flags.device)?;
    if flags.tokens.0.is_empty() {
        return Err(Error::argument("--tokens", "at least one id", "none"));
    }
    let needed = flags.tokens.0.len().saturating_add(flags.decode);
    let config = |model: &Decoder| {
        flags.tokens.check(model.vocabulary)?;
        let mut config = flags.engine.session(Some(needed.min(model.context)), flags.tokens.0.len());
        config.logit_rows = ROWS;
        Ok(config)
    };
    let (mut session, placement) = flags.engine.start(file, &runtime, &config)?;
    let prompt = flags.tokens.check(session.model().vocabulary)?;
    if needed > session.context() {
        return Err(Error::ContextFull { tokens: needed, context: session.context() });
    }
    session.set_sampling(&Sampling::greedy(), &prompt)?;

    let mut tops = Vec::new();
    let mut last = Vec::new();
    session.feed(&prompt, |session, _, count| {
        for first in (0..count).step_by(session.logit_rows()) {
            let rows = session.logit_rows().min(count - first);
            let logits = session.logits(first, rows)?;
            finite(&logits)?;
            tops.extend(logits.chunks(session.model().vocabulary).map(|row| top(row, 5)));
            last = logits[(rows - 1) * session.model().vocabulary..].to_vec();
        }
        Ok(())
    })?;

    let mut greedy = Vec::new();
    let mut decode_tops = Vec::new();
    if flags.decode > 0 {
        greedy.push(session.pick()?);
        for step in 0..flags.decode {
            let next = session.decode()?;
            decode_tops.push(top(&session.last_logits()?, 5));
            if step + 1 < flags.decode {
                greedy.push(next);
            }
        }
    }

    for (position, row) in tops.iter().enumerate() {
        out.line(format!("{position:>5}  {}", show(row)))?;
    }
    for (id, row) in greedy.iter().zip(&decode_tops) {
        out.line(format!("after {id:>7}  {}", show(row)))?;
    }
    let final_logits = if flags.decode > 0 { session.last_logits()? } else { last.clone() };
    finite(&final_logits)?;
    out.document(&merged(
        flags.engine.json(&runtime),
        json!({
            "last_logits": last,
            "top5": tops,
            "greedy": greedy,
            "decode_top5": decode_tops,
            "final_logits": final_logits,
            "placement": placement,
            "pool": pool_json(&runtime),
            "graphs": graphs_json(&runtime),
        }),
    ))
}

/// Refuses what is infinite or no number: nothing that follows from it means anything.
pub(super) fn finite(logits: &[f32]) -> Result<()> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        None => Ok(()),
        Some(at) => Err(Error::CheckFailed(format!("logits that are numbers: one is {}", logits[at]))),
    }
}

/// The greatest logits with their ids, best first, the lowest id first among equals.
fn top(logits: &[f32], count: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    let better = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if order.len() > count {
        order.select_nth_unstable_by(count, better);
        order.truncate(count);
    }
    order.sort_unstable_by(better);
    order
}

fn show(row: &[(usize, f32)]) -> String {
    row.iter().map(|(id, value)| format!("{id}:{value:.4}")).collect::<Vec<_>>().join("  ")
}
