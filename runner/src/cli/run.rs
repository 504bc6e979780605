//! `evergraph run`: text from a model.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use evergraph_pool::Pool;
use serde_json::{Value, json};

use super::flags::{DeviceFlags, EngineFlags, ModelFlags, SamplingFlags, TokenList};
use super::logits::finite;
use super::output::{Output, progress, say};
use super::plan::{self, PlanFormat};
use super::size::format_size;
use crate::chat::{ChatTemplate, Message, Part, Render, Reply};
use crate::engine::{ExpertTally, Runtime, Session};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::models::Decoder;
use crate::tokenizer::{Encode, TextStream, Tokenizer};

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// The text to go on from
    #[arg(short = 'p', long = "prompt", value_name = "TEXT", allow_hyphen_values = true, group = "input")]
    prompt: Option<String>,
    /// A file with the text to go on from
    #[arg(short = 'f', long = "file", value_name = "FILE", group = "input")]
    file: Option<PathBuf>,
    /// The token ids to go on from
    #[arg(long, value_name = "1,2,3", allow_hyphen_values = true, group = "input")]
    tokens: Option<TokenList>,
    /// Most tokens to generate; -1: until the model ends or the context is full
    #[arg(short = 'n', long = "predict", value_name = "N", default_value_t = -1, allow_hyphen_values = true)]
    predict: i64,
    /// Go on past the tokens that end a text
    #[arg(long)]
    ignore_eos: bool,
    /// Put the prompt into the model's chat format, as a user's message
    #[arg(long)]
    chat: bool,
    /// The system message of a chat
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system_prompt: Option<String>,
    /// Let the model think before it answers
    #[arg(long, requires = "chat")]
    think: bool,
    /// A chat template (Jinja), or `gemma` or `gemma4`, instead of the file's
    #[arg(long, value_name = "TEMPLATE", requires = "chat")]
    chat_template: Option<String>,
    /// Print what the steps would do, on which devices and in what order, and run nothing
    #[arg(long, value_enum, value_name = "FORMAT")]
    plan: Option<PlanFormat>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    device: DeviceFlags,
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// What a generation gave.
#[derive(Default)]
struct Generated {
    ids: Vec<u32>,
    text: String,
    /// What the model thought, in a chat.
    thought: String,
    /// Of that, what was told already, bytes.
    told: usize,
    prompt_ms: f64,
    decode_ms: f64,
    /// Steps of one token.
    steps: usize,
}

pub(super) fn run(flags: &Flags, out: &mut Output) -> Result<()> {
    flags.engine.check()?;
    let sampling = flags.sampling.sampling()?;
    let start = Instant::now();
    let file = Arc::new(flags.model.open()?);
    // A file without a tokenizer still runs on token ids.
    let tokenizer =
        if flags.tokens.is_some() && !Tokenizer::is_in(&file)? { None } else { Some(Tokenizer::from_gguf(&file)?) };
    let prompt = prompt_ids(flags, &file, tokenizer.as_ref())?;
    let runtime = flags.engine.open(&flags.device)?;
    let config = |_: &Decoder| Ok(flags.engine.session(None, 512));
    let (mut session, placement) = flags.engine.start(file, &runtime, &config)?;
    if let Some(format) = flags.plan {
        return plan::print(&mut session, prompt.len(), format, out);
    }
    session.set_sampling(&sampling, &prompt)?;
    let load_ms = ms(start);

    let generated = generate(flags, &mut session, tokenizer.as_ref(), &prompt, out)?;
    let per_s = |count: usize, ms: f64| if ms > 0.0 { count as f64 * 1000.0 / ms } else { 0.0 };
    let timings = json!({
        "load_ms": load_ms,
        "prompt_ms": generated.prompt_ms,
        "decode_ms": generated.decode_ms,
        "prompt_per_s": per_s(prompt.len(), generated.prompt_ms),
        "decode_per_s": per_s(generated.steps, generated.decode_ms),
    });
    say(format!(
        "prompt: {} tokens, {:.1} a second; generated: {} tokens, {:.1} a second; load: {load_ms:.0} ms; pool peak: {}",
        prompt.len(),
        per_s(prompt.len(), generated.prompt_ms),
        generated.ids.len(),
        per_s(generated.steps, generated.decode_ms),
        format_size(runtime.pool().stats().reserved_bytes.peak),
    ));
    let experts = experts_json(&session)?;
    out.document(&merged(
        flags.engine.json(&runtime),
        json!({
            "prompt_tokens": prompt,
            "tokens": generated.ids,
            "text": generated.text,
            "thought": generated.thought,
            "seed": sampling.seed,
            "timings": timings,
            "pool": pool_json(&runtime),
            "graphs": graphs_json(&runtime),
            "cache_bytes": session.cache_bytes(),
            "expert_cache": experts,
            "placement": placement,
            "resident_peak_bytes": resident_peak_bytes(),
        }),
    ))
}

/// The most memory that this process had in use, where the system tells.
fn resident_peak_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn prompt_ids(flags: &Flags, file: &Gguf, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    if let Some(tokens) = &flags.tokens {
        let vocabulary = tokenizer.map_or(i32::MAX as usize, Tokenizer::vocabulary);
        let ids = tokens.check(vocabulary)?;
        return if ids.is_empty() { Err(Error::argument("--tokens", "at least one id", "none")) } else { Ok(ids) };
    }
    let text = match (&flags.prompt, &flags.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => std::fs::read_to_string(path).map_err(Error::io("can not read", path))?,
        // A plan does not depend on what is said.
        (None, None) if flags.plan.is_some() => return Ok(vec![0]),
        (None, None) => return Err(Error::argument("-p", "a prompt (-p, -f or --tokens)", "none")),
    };
    let Some(tokenizer) = tokenizer else {
        return Err(Error::Tokenizer("the file has none".to_owned()));
    };
    let ids = if flags.chat {
        let template = match &flags.chat_template {
            Some(source) => ChatTemplate::from_source(source, tokenizer)?,
            None => ChatTemplate::from_gguf(file, tokenizer)?,
        };
        let system = flags.system_prompt.iter().map(|text| Message::new("system", text));
        let messages: Vec<Message> = system.chain([Message::new("user", text)]).collect();
        let how = Encode { add_special: false, parse_special: true };
        let render = Render { generate: true, think: flags.think };
        tokenizer.encode(&template.render(&messages, render)?, how)?
    } else {
        tokenizer.encode(&text, Encode::default())?
    };
    if ids.is_empty() {
        return Err(Error::argument("-p", "a text of at least one token", "an empty one"));
    }
    Ok(ids)
}

fn generate(
    flags: &Flags,
    session: &mut Session,
    tokenizer: Option<&Tokenizer>,
    prompt: &[u32],
    out: &mut Output,
) -> Result<Generated> {
    let start = Instant::now();
    let bar = progress(prompt.len() as u64, "prompt");
    session.feed(prompt, |_, _, count| {
        bar.inc(count as u64);
        Ok(())
    })?;
    bar.finish_and_clear();
    let wanted = usize::try_from(flags.predict).unwrap_or(usize::MAX);
    let mut result = Generated::default();
    let mut stream = TextStream::new();
    let mut reply = tokenizer.filter(|_| flags.chat).map(|tokenizer| Reply::new(tokenizer, prompt));
    let mut next = if wanted > 0 { Some(session.pick()?) } else { None };
    if next.is_some() {
        // Later ones are looked at where they are chosen from: on the device, and no further than the best.
        finite(&session.last_logits()?)?;
    }
    result.prompt_ms = ms(start);

    let start = Instant::now();
    while let Some(id) = next {
        let ends = tokenizer.is_some_and(|tokenizer| tokenizer.is_end(id));
        if ends && !flags.ignore_eos {
            break;
        }
        result.ids.push(id);
        let parts = match (&mut reply, tokenizer) {
            (Some(reply), _) => reply.push(id)?,
            (None, Some(tokenizer)) => vec![Part::Text(stream.push(&tokenizer.piece(id, false)?))],
            (None, None) => vec![Part::Text(format!("{id} "))],
        };
        result.take(parts, out)?;
        let full = session.len() >= session.context();
        if full && result.ids.len() < wanted {
            say("the context is full");
        }
        next = if result.ids.len() < wanted && !full {
            result.steps += 1;
            Some(session.decode()?)
        } else {
            None
        };
    }
    result.decode_ms = ms(start);
    let rest = reply.map_or_else(|| vec![Part::Text(stream.finish())], Reply::finish);
    result.take(rest, out)?;
    result.tell_thought();
    out.line("")?;
    Ok(result)
}

impl Generated {
    /// Writes text as it comes; a thought is told aside, once it is whole.
    fn take(&mut self, parts: Vec<Part>, out: &mut Output) -> Result<()> {
        for part in parts {
            match part {
                Part::Thought(thought) => self.thought.push_str(&thought),
                Part::Text(text) => {
                    self.tell_thought();
                    out.text(&text)?;
                    self.text.push_str(&text);
                }
            }
        }
        Ok(())
    }

    fn tell_thought(&mut self) {
        let thought = self.thought.get(self.told..).unwrap_or_default().trim();
        if !thought.is_empty() {
            say(format!("thought: {thought}"));
        }
        self.told = self.thought.len();
    }
}

fn ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}

/// Puts the entries of two objects into one.
pub(super) fn merged(mut first: Value, second: Value) -> Value {
    if let (Value::Object(first), Value::Object(second)) = (&mut first, second) {
        first.extend(second);
    }
    first
}

/// What the pool did.
pub(super) fn pool_json(runtime: &Runtime) -> Value {
    let of = |pool: &Pool| {
        let (stats, counters) = (pool.stats(), pool.counters());
        [stats.reserved_bytes.peak, stats.allocated_bytes.peak, counters.give_backs]
    };
    let json = |[reserved, allocated, give_backs]: [u64; 3]| {
        json!({
            "mode": runtime.pool().mode().to_string(),
            "reserved_peak_bytes": reserved,
            "allocated_peak_bytes": allocated,
            "give_backs": give_backs,
        })
    };
    let each: Vec<[u64; 3]> = runtime.units().iter().map(|unit| of(unit.pool())).collect();
    let sum = |at: usize| each.iter().map(|values| values[at]).fold(0, u64::saturating_add);
    let mut all = json([sum(0), sum(1), sum(2)]);
    if each.len() > 1 {
        all["devices"] = each.into_iter().map(json).collect();
    }
    all
}

/// How often the device kept what single tokens chose of the host's experts, which is said too; null where it keeps none.
pub(super) fn experts_json(session: &Session) -> Result<Value> {
    let Some(ExpertTally { chosen, hits, came, .. }) = session.expert_tally()? else { return Ok(Value::Null) };
    let bytes = session.expert_cache_bytes();
    let share = 100.0 * hits as f64 / chosen.max(1) as f64;
    say(format!(
        "cache of experts: {}; {hits} of {chosen} chosen were there ({share:.1} %)",
        format_size(bytes as u64)
    ));
    Ok(json!({ "bytes": bytes, "chosen": chosen, "hits": hits, "came": came }))
}

/// What the graph cache did.
pub(super) fn graphs_json(runtime: &Runtime) -> Value {
    let counters = runtime.graph_counters();
    json!({
        "captures": counters.captures,
        "replays": counters.replays,
        "remaps": counters.remaps,
        "updates": counters.updates,
        "recaptures": counters.recaptures,
        "eager": counters.eager,
        "evictions": counters.evictions,
        "warm_ups": counters.warm_ups,
        "stale": counters.stale,
    })
}
