//! The traces that come with the project, in `traces/`, and what they are made of.
//!
//! Each is made by a few lines here, so that what it tells can be read; a test holds the files to them.

use std::fmt::Write as _;

/// A trace that comes with the project.
#[derive(Clone, Copy)]
pub struct Shipped {
    /// Its file in `traces/`.
    pub file: &'static str,
    /// What it tells.
    pub about: &'static str,
    make: fn() -> String,
}

impl std::fmt::Debug for Shipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shipped").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Shipped {
    /// The trace itself.
    #[must_use]
    pub fn text(&self) -> String {
        (self.make)()
    }
}

/// All of them.
pub const SHIPPED: &[Shipped] = &[
    Shipped { file: "moe-decode.jsonl", about: "decoding with a mixture of 128 experts", make: moe_decode },
    Shipped {
        file: "growing-prefill.jsonl",
        about: "a long prompt: scratch grows with the text",
        make: growing_prefill,
    },
    Shipped {
        file: "prefill-decode.jsonl",
        about: "prompts of many lengths between decode steps, caches that come and go",
        make: prefill_decode,
    },
    Shipped { file: "sizes-8k.jsonl", about: "8, 16, 24 ... 512 MiB, one at a time", make: sizes_8k },
    Shipped {
        file: "growing-scratch-74.jsonl",
        about: "scratch grows on a full card beside 74 captured graphs",
        make: growing_scratch_74,
    },
    Shipped {
        file: "large-request-74.jsonl",
        about: "one request that 74 captured graphs have to make room for",
        make: large_request_74,
    },
    Shipped { file: "rmm-sample.csv", about: "the format of RMM's log", make: rmm_sample },
];

const MIB: u64 = 1 << 20;
/// A step of the ladder that scratch climbs: 8 MiB and 5 per cent, in tenths of a MiB.
const RUNG_TENTHS: u64 = 84;

/// A rung of the ladder, in bytes: whole blocks of 512.
fn rung(k: u64) -> u64 {
    k * RUNG_TENTHS * MIB / 10 / 512 * 512
}

/// A trace while it is written.
struct Trace {
    text: String,
    events: u64,
    next_id: u64,
}

impl Trace {
    fn new(name: &str, more: &str) -> Self {
        Self {
            text: format!("{{\"trace\":\"evergraph\",\"version\":1,\"name\":\"{name}\"{more}}}\n"),
            events: 0,
            next_id: 1,
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        self.events += 1;
        // Writing to a string can not fail.
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    fn alloc(&mut self, bytes: u64) -> u64 {
        let id = self.id();
        self.line(format_args!("{{\"do\":\"alloc\",\"id\":{id},\"bytes\":{bytes}}}"));
        id
    }

    fn alloc_for(&mut self, bytes: u64, purpose: &str) -> u64 {
        let id = self.id();
        self.line(format_args!("{{\"do\":\"alloc\",\"id\":{id},\"bytes\":{bytes},\"for\":\"{purpose}\"}}"));
        id
    }

    fn free(&mut self, id: u64) {
        self.line(format_args!("{{\"do\":\"free\",\"id\":{id}}}"));
    }

    fn step(&mut self, name: &str) {
        self.line(format_args!("{{\"do\":\"step\",\"name\":\"{name}\"}}"));
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    fn end(mut self) -> String {
        let events = self.events + 1;
        self.line(format_args!("{{\"do\":\"end\",\"events\":{events}}}"));
        self.text
    }
}

/// A linear congruential generator: the same traces everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Gemma 4 26B-A4B's shape: 30 layers of width 2816, 128 experts of width 704, 8 of them for each token; 4.5 bits a weight.
fn moe_decode() -> String {
    let mut trace = Trace::new("decoding with a mixture of experts", "");
    let quantised = |weights: u64| weights * 9 / 16;
    let (width, ffn, expert) = (2816, 2112, 704);
    trace.alloc_for(262_144 * width * 21 / 32, "weight");
    for layer in 0..30 {
        let heads = if layer % 6 == 5 { 16 * 512 } else { 16 * 256 };
        let kv = if layer % 6 == 5 { 2 * 512 } else { 8 * 256 };
        trace.alloc_for(quantised(width * (2 * heads + 2 * kv)), "weight");
        trace.alloc_for(quantised(3 * width * ffn), "weight");
        trace.alloc_for(quantised(128 * 2 * width * expert), "weight");
        trace.alloc_for(quantised(128 * width * expert), "weight");
        trace.alloc_for(width * 128 * 4, "weight");
        let tokens = if layer % 6 == 5 { 16_384 } else { 1024 + 512 };
        trace.alloc_for(tokens * kv * 2 * 2, "state");
    }
    for token in 0..2 {
        let mut hidden = trace.alloc(width * 4);
        for layer in 0..30 {
            let global = layer % 6 == 5;
            let (heads, kv) = if global { (16 * 512, 2 * 512) } else { (16 * 256, 8 * 256) };
            let normed = trace.alloc(width * 4);
            let (q, k, v) = (trace.alloc(heads * 4), trace.alloc(kv * 4), trace.alloc(kv * 4));
            trace.free(normed);
            let scores = trace.alloc(16 * if global { 4096 + token } else { 1024 } * 4);
            let attended = trace.alloc(heads * 4);
            [q, k, v, scores].into_iter().for_each(|id| trace.free(id));
            let out = trace.alloc(width * 4);
            trace.free(attended);
            trace.free(hidden);
            let (dense, codes) = (trace.alloc(2 * ffn * 4), trace.alloc(width / 32 * 36));
            let (logits, chosen) = (trace.alloc(128 * 4), trace.alloc(8 * 8));
            let inner = trace.alloc(8 * 2 * expert * 4);
            trace.free(dense);
            trace.free(logits);
            let each = trace.alloc(8 * width * 4);
            [codes, inner, chosen].into_iter().for_each(|id| trace.free(id));
            hidden = trace.alloc(width * 4);
            trace.free(each);
            trace.free(out);
        }
        let logits = trace.alloc(262_144 * 4);
        trace.free(hidden);
        trace.free(logits);
        trace.step(&format!("token {token}"));
    }
    trace.end()
}

/// The requests of llama.cpp's pool in the report that this project began with (a prompt of 16384 tokens in pieces of 512,
/// no flash attention, an 8 GB card), as they stood in its log: attention's scores grow with the text. The report names
/// 25.2, 109.2, 142.8, 168, 218.4 and 252 MiB; those between follow from the bytes that were flushed.
const LADDER: [u64; 23] = [3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 24, 26, 28, 30, 30];

fn growing_prefill() -> String {
    let mut trace = Trace::new("a prompt of 16384 tokens in pieces of 512", "");
    trace.alloc_for(6 << 30, "weight");
    trace.alloc_for(600 * MIB, "state");
    let (tokens, width) = (512, 2816);
    for k in LADDER {
        let mut hidden = trace.alloc(tokens * width * 4);
        for _ in 0..3 {
            let (q, kv) = (trace.alloc(tokens * 4096 * 4), trace.alloc(2 * tokens * 2048 * 2));
            let scores = trace.alloc(rung(k));
            let shares = trace.alloc(rung(k) / 2 / 512 * 512);
            trace.free(scores);
            let attended = trace.alloc(tokens * 4096 * 4);
            [q, kv, shares].into_iter().for_each(|id| trace.free(id));
            let next = trace.alloc(tokens * width * 4);
            trace.free(attended);
            trace.free(hidden);
            let experts = trace.alloc(tokens * 8 * 2 * 704 * 4);
            hidden = trace.alloc(tokens * width * 4);
            trace.free(experts);
            trace.free(next);
        }
        trace.free(hidden);
        trace.step(&format!("scores of {} MiB", rung(k) / MIB));
    }
    trace.end()
}

fn prefill_decode() -> String {
    let mut trace = Trace::new("prompts between decode steps", "");
    let mut random = Random(5);
    let (layers, width, kv) = (6, 1152, 2 * 256 * 2 * 2);
    trace.alloc_for(800 * MIB, "weight");
    let mut texts: Vec<(u64, Vec<u64>)> = Vec::new();
    for round in 0..12 {
        // A text arrives; the oldest leaves when there are five.
        if texts.len() == 5 {
            let (_, caches) = texts.remove(random.below(3) as usize);
            caches.into_iter().for_each(|id| trace.free(id));
        }
        let prompt = 64 + random.below(16) * 61;
        let room = (prompt + 256).next_multiple_of(256);
        let caches = (0..layers).map(|_| trace.alloc_for(room * kv, "state")).collect();
        for piece in (0..prompt).step_by(512) {
            let tokens = (prompt - piece).min(512);
            layer(&mut trace, tokens, width, piece + tokens);
        }
        trace.step(&format!("text {round}: a prompt of {prompt}"));
        texts.push((prompt, caches));
        for _ in 0..2 {
            for (seen, _) in &mut texts {
                *seen += 1;
                layer(&mut trace, 1, width, *seen);
            }
            trace.step("a token each");
        }
    }
    trace.end()
}

/// Scratch of two layers for some tokens that look at `seen` of them.
fn layer(trace: &mut Trace, tokens: u64, width: u64, seen: u64) {
    for _ in 0..2 {
        let normed = trace.alloc(tokens * width * 4);
        let q = trace.alloc(tokens * 4 * 256 * 4);
        let scores = trace.alloc(tokens * 4 * seen * 4);
        trace.free(normed);
        let attended = trace.alloc(tokens * 4 * 256 * 4);
        trace.free(scores);
        trace.free(q);
        let inner = trace.alloc(tokens * 2 * 6912 * 4);
        trace.free(attended);
        trace.free(inner);
    }
}

fn sizes_8k() -> String {
    let mut trace = Trace::new("sizes of 8 k MiB, one at a time", "");
    for k in 1..=64 {
        let id = trace.alloc(8 * k * MIB);
        trace.free(id);
        trace.step(&format!("k = {k}"));
    }
    trace.end()
}

/// Weights, caches and compute buffers of the card, bytes.
const CARD: [(u64, &str); 3] = [(6 << 30, "weight"), (600 * MIB, "state"), (300 * MIB, "state")];
/// What they leave, bytes: with 623 to 631 MiB all five flushes of the report happen, at its requests.
const LEFT: u64 = 626 * MIB;

/// The card of the report: all but [`LEFT`] is taken, and 74 graphs are captured. Three of them have large scratch of their
/// own, so that all graphs together hold the 25.5 MiB that were flushed besides the ladder.
fn full_card(name: &str) -> Trace {
    let limit = CARD.iter().map(|(bytes, _)| bytes).sum::<u64>() + LEFT;
    let mut trace = Trace::new(name, &format!(",\"limit_bytes\":{limit},\"slab_bytes\":1048576"));
    for (bytes, purpose) in CARD {
        trace.alloc_for(bytes, purpose);
    }
    for graph in 0..74 {
        let scratch = if graph % 37 == 18 || graph == 36 { rung(1) } else { 4096 };
        trace.line(format_args!("{{\"do\":\"graph\",\"graph\":\"g{graph}\",\"scratch\":[{scratch}],\"kernels\":32}}"));
    }
    for _ in 0..5 {
        run(&mut trace, 0..74);
    }
    trace
}

fn run(trace: &mut Trace, graphs: std::ops::Range<u64>) {
    let (first, last) = (graphs.start, graphs.end.saturating_sub(1));
    for graph in graphs {
        trace.line(format_args!("{{\"do\":\"run\",\"graph\":\"g{graph}\"}}"));
    }
    trace.step(&format!("graphs {first} to {last}"));
}

fn growing_scratch_74() -> String {
    let mut trace = full_card("scratch grows on a full card beside 74 graphs");
    for k in LADDER {
        let scores = trace.alloc(rung(k));
        // As many as the report says were captured when the next flush came.
        let graphs = match k {
            ..=12 => 0..74,
            13..=19 => 0..37,
            20..=24 => 0..64,
            _ => 37..74,
        };
        for _ in 0..2 {
            run(&mut trace, graphs.clone());
        }
        trace.free(scores);
    }
    for _ in 0..4 {
        run(&mut trace, 0..74);
    }
    trace.end()
}

fn large_request_74() -> String {
    let mut trace = full_card("a request that 74 graphs have to make room for");
    let large = trace.alloc(612 * MIB);
    trace.free(large);
    for _ in 0..5 {
        run(&mut trace, 0..74);
    }
    trace.end()
}

fn rmm_sample() -> String {
    let mut text = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    let mut random = Random(9);
    let mut live: Vec<(u64, u64, u64)> = Vec::new();
    let mut next = 0x7f10_0000_0000_u64;
    for event in 0..400_u64 {
        let (minute, micros) = (event / 60, event * 1777 % 1_000_000);
        let mut row = |action: &str, ptr: u64, bytes: u64, stream: u64| {
            let second = event % 60;
            let _ =
                writeln!(text, "139641,10:{minute:02}:{second:02}:{micros:06},{action},0x{ptr:x},{bytes},0x{stream:x}");
        };
        if live.is_empty() || random.below(100) < 55 {
            let magnitude = 12 + random.below(15);
            let (bytes, stream) = (1 + random.below(1 << magnitude), 1 + random.below(2));
            row("allocate", next, bytes, stream);
            live.push((next, bytes, stream));
            next += bytes.next_multiple_of(256);
        } else {
            let (ptr, bytes, stream) = live.swap_remove(random.below(live.len() as u64) as usize);
            // Now and then on the other stream.
            row("free", ptr, bytes, if random.below(8) == 0 { 3 - stream } else { stream });
        }
    }
    let _ = writeln!(text, "139641,10:07:00:000000,allocate failure,(nil),99999999999,0x1");
    text
}
