//! llama.cpp's spellings: single-dash flags of several letters, and environment twins.

use std::ffi::{OsStr, OsString};

/// Single-dash flags of several letters, and the long flags they mean. clap knows one-letter shorts only.
const SPELLINGS: &[(&str, &str)] = &[
    ("-cmoe", "--cpu-moe"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-dev", "--device"),
    ("-fa", "--flash-attn"),
    ("-fit", "--fit"),
    ("-fitc", "--fit-ctx"),
    ("-fitt", "--fit-target"),
    ("-mg", "--main-gpu"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ngl", "--n-gpu-layers"),
    ("-oe", "--output-err"),
    ("-ot", "--override-tensor"),
    ("-pg", "--pg"),
    ("-sm", "--split-mode"),
    ("-tb", "--threads-batch"),
    ("-ts", "--tensor-split"),
    ("-ub", "--ubatch-size"),
    ("--n-predict", "--predict"),
    ("--gpu-layers", "--n-gpu-layers"),
    ("--temperature", "--temp"),
    ("--override-tensors", "--override-tensor"),
];

/// Flags of llama.cpp that are not here, and the long flags that the error is to name: as letters they would mean others.
const ABSENT: &[(&str, &str)] = &[
    ("-hf", "--hf-repo"),
    ("-hff", "--hf-file"),
    ("-hfr", "--hf-repo"),
    ("-hft", "--hf-token"),
    ("-lm", "--load-mode"),
    ("-lv", "--log-verbosity"),
    ("-md", "--model-draft"),
    ("-mmp", "--mmap"),
    ("-mu", "--model-url"),
    ("-nkvo", "--no-kv-offload"),
    ("-nopo", "--no-op-offload"),
    ("-rpc", "--rpc"),
];

/// Flags whose next word is text of the user and never a flag.
const TEXT_FLAGS: &[&str] = &["-p", "--prompt", "-f", "--file", "-m", "--model", "-sys", "--system-prompt", "--tokens"];

/// Environment names of llama.cpp that are not `LLAMA_ARG_` plus the long flag.
const LLAMA_NAMES: &[(&str, &str)] = &[
    ("ubatch-size", "LLAMA_ARG_UBATCH"),
    ("batch-size", "LLAMA_ARG_BATCH"),
    ("predict", "LLAMA_ARG_N_PREDICT"),
    ("top-k", "LLAMA_ARG_TOP_K"),
];

/// Rewrites llama.cpp's spellings into long flags. Words after `--`, and texts, stay as they are.
pub fn normalise(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut out: Vec<OsString> = Vec::new();
    let mut verbatim = false;
    let mut text_next = false;
    for arg in args {
        if verbatim || text_next {
            text_next = false;
            out.push(arg);
            continue;
        }
        verbatim = arg == OsStr::new("--");
        text_next = TEXT_FLAGS.iter().any(|flag| arg == OsStr::new(flag));
        out.push(rewrite(&arg).unwrap_or(arg));
    }
    out
}

/// Whether words that may not make sense ask for JSON all the same.
pub(super) fn asks_for_json(args: &[OsString]) -> bool {
    let text = |at: usize| at > 0 && TEXT_FLAGS.iter().any(|flag| args[at - 1] == OsStr::new(flag));
    let words = args.iter().take_while(|arg| *arg != OsStr::new("--"));
    words.enumerate().any(|(at, arg)| arg == OsStr::new("--json") && !text(at))
}

fn rewrite(arg: &OsStr) -> Option<OsString> {
    let arg = arg.to_str()?;
    let (flag, value) = match arg.split_once('=') {
        Some((flag, value)) => (flag, Some(value)),
        None => (arg, None),
    };
    let long = SPELLINGS.iter().chain(ABSENT).find(|(short, _)| *short == flag)?.1;
    Some(match value {
        Some(value) => format!("{long}={value}").into(),
        None => long.into(),
    })
}

/// Gives each long flag its twins in the environment: `EVERGRAPH_…` first, then llama.cpp's `LLAMA_ARG_…`. As there, the last
/// of several values wins where a flag takes one, and a negative number is a value, which may be refused as such.
pub(super) fn as_llama_reads(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|sub| {
        sub.args_override_self(true).mut_args(|arg| {
            let takes_value = matches!(arg.get_action(), clap::ArgAction::Set | clap::ArgAction::Append);
            let arg = if takes_value && !arg.is_positional() { arg.allow_negative_numbers(true) } else { arg };
            let Some(long) = arg.get_long() else { return arg };
            if matches!(long, "help" | "version" | "json" | "tokens" | "prompt") {
                return arg;
            }
            let upper = long.replace('-', "_").to_ascii_uppercase();
            let llama = LLAMA_NAMES
                .iter()
                .find(|(flag, _)| *flag == long)
                .map_or_else(|| format!("LLAMA_ARG_{upper}"), |(_, name)| (*name).to_owned());
            let ours = format!("EVERGRAPH_{upper}");
            let name =
                if std::env::var_os(&ours).is_none() && std::env::var_os(&llama).is_some() { llama } else { ours };
            let arg = if matches!(arg.get_action(), clap::ArgAction::SetTrue) {
                // In the environment llama.cpp says 1, on and the like.
                arg.value_parser(clap::builder::BoolishValueParser::new())
            } else {
                arg
            };
            arg.env(name).hide_env(true)
        })
    })
}
