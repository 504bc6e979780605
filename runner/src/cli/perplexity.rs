//! `evergraph perplexity`: how surprised a model is by a text.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use super::flags::{DeviceFlags, EngineFlags, ModelFlags};
use super::output::{Output, progress};
use super::run::{graphs_json, merged, pool_json};
use crate::error::{Error, Result};
use crate::models::Decoder;
use crate::tokenizer::{Encode, Tokenizer};

/// A text that fits the context is read in one pass, and every token but the first counts. A longer one is cut
/// into windows of the context's length, as llama.cpp does: each starts with the begin token, and the second
/// half of its tokens counts.
#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// The text, UTF-8; newlines at its end are dropped
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
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
    let text = std::fs::read_to_string(&flags.file).map_err(Error::io("can not read", &flags.file))?;
    let file = Arc::new(flags.model.open()?);
    let tokenizer = Tokenizer::from_gguf(&file)?;
    let tokens = tokenizer.encode(text.trim_end_matches(['\n', '\r']), Encode::default())?;
    if tokens.len() < 2 {
        return Err(Error::argument("-f", "a text of at least two tokens", tokens.len()));
    }
    let runtime = flags.engine.open(&flags.device)?;
    let config = |model: &Decoder| {
        let mut config = flags.engine.session(Some(tokens.len().min(model.context)), 512);
        config.logit_rows = ROWS;
        Ok(config)
    };
    let (mut session, placement) = flags.engine.start(file, &runtime, &config)?;
    if session.context() < 3 && tokens.len() > session.context() {
        return Err(Error::argument("-c", "at least 3: a shorter window predicts nothing", session.context()));
    }
    let windows = windows(&tokens, session.context(), tokenizer.bos());

    let bar = progress(windows.iter().map(|window| window.tokens.len() as u64).sum(), "perplexity");
    let (mut sum, mut counted) = (0.0f64, 0usize);
    for window in &windows {
        session.clear()?;
        session.feed(&window.tokens, |session, start, count| {
            for first in (0..count).step_by(session.logit_rows()) {
                let rows = session.logit_rows().min(count - first);
                // The row of token i predicts token i + 1.
                let wanted = |row: usize| {
                    let next = start + first + row + 1;
                    window.tokens.get(next).filter(|_| next >= window.counts_from)
                };
                if (0..rows).any(|row| wanted(row).is_some()) {
                    let vocabulary = session.model().vocabulary;
                    let logits = session.logits(first, rows)?;
                    for (row, values) in logits.chunks(vocabulary).enumerate() {
                        if let Some(&id) = wanted(row) {
                            sum += surprise(values, id);
                            counted += 1;
                        }
                    }
                }
                bar.inc(rows as u64);
            }
            Ok(())
        })?;
    }
    bar.finish_and_clear();

    let ppl = (sum / counted.max(1) as f64).exp();
    if !ppl.is_finite() {
        return Err(Error::CheckFailed(format!("a perplexity that is a number: it is {ppl}")));
    }
    out.line(format!("perplexity {ppl:.4} over {counted} predictions in {} chunks", windows.len()))?;
    out.document(&merged(
        flags.engine.json(&runtime),
        json!({
            "ppl": ppl,
            "chunks": windows.len(),
            "tokens": tokens.len(),
            "predictions": counted,
            "placement": placement,
            "pool": pool_json(&runtime),
            "graphs": graphs_json(&runtime),
        }),
    ))
}

#[derive(Debug, PartialEq)]
struct Window {
    tokens: Vec<u32>,
    /// The first token whose prediction counts.
    counts_from: usize,
}

fn windows(tokens: &[u32], context: usize, bos: Option<u32>) -> Vec<Window> {
    if tokens.len() <= context || context < 2 {
        return vec![Window { tokens: tokens.to_vec(), counts_from: 1 }];
    }
    tokens
        .chunks_exact(context)
        .map(|chunk| {
            let mut tokens = chunk.to_vec();
            if let (Some(first), Some(bos)) = (tokens.first_mut(), bos) {
                *first = bos;
            }
            Window { tokens, counts_from: context / 2 + 1 }
        })
        .collect()
}

/// `-ln p(id)`, in doubles.
fn surprise(logits: &[f32], id: u32) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let own = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    sum.ln() - f64::from(own - most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_are_read_in_one_pass_and_long_ones_in_windows() {
        let tokens: Vec<u32> = (0..10).collect();
        assert_eq!(windows(&tokens, 10, Some(99)), [Window { tokens: tokens.clone(), counts_from: 1 }]);
        let cut = windows(&tokens, 4, Some(99));
        assert_eq!(cut.len(), 2, "the rest of two tokens is left out");
        assert_eq!(cut[1], Window { tokens: vec![99, 5, 6, 7], counts_from: 3 });
    }

    #[test]
    fn surprise_is_the_negative_log_probability() {
        let logits = [0.0, (3.0f32).ln(), 1000.0 - 1000.0];
        assert!((surprise(&logits, 1) - (5.0f64 / 3.0).ln()).abs() < 1e-6);
        assert!(surprise(&[1e30, -1e30], 0).abs() < 1e-12);
    }
}
