//! The command line as users and scripts see it: results, exit statuses, bad input.

#![allow(clippy::unwrap_used, missing_docs)]

mod answers;
mod bench;
mod devices;
mod files;
mod words;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).display().to_string()
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evergraph"));
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("EVERGRAPH_") || name.starts_with("LLAMA_ARG_"))
    {
        command.env_remove(name);
    }
    command.args(words);
    command
}

fn evergraph(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

/// Runs a command that must work; returns its JSON document.
#[track_caller]
fn works(words: &[&str]) -> serde_json::Value {
    let mut words = words.to_vec();
    words.push("--json");
    let output = evergraph(&words);
    let talk = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {talk}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that must fail with a status; returns what it said.
#[track_caller]
fn fails(words: &[&str], status: i32) -> String {
    let output = evergraph(words);
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{words:?}: {talk}");
    assert!(output.stdout.is_empty(), "{words:?} wrote a result: {}", String::from_utf8_lossy(&output.stdout));
    assert!(!talk.contains("panicked"), "{words:?}: {talk}");
    assert!(!talk.trim().is_empty(), "{words:?} said nothing");
    talk
}

/// A scratch file that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("evergraph-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }
    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
