//! Results to standard output, talk to standard error.

use std::io::{IsTerminal, Write};

use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Where a command's results go.
#[derive(Debug)]
pub(super) struct Output {
    json: bool,
    /// The command's exit status is a verdict: it goes on when nobody reads any more.
    verdict: bool,
    /// A failure is to be told as JSON too.
    json_failure: bool,
    /// Whether there is something of the result.
    begun: bool,
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        Self { json, verdict: false, json_failure: json, begun: false }
    }

    /// For a command that writes its rows one by one, in a format of its own; whether that is one JSON document.
    pub(super) fn of_rows(json: bool) -> Self {
        Self { json_failure: json, ..Self::new(false) }
    }

    /// For commands whose exit status is a verdict: a reader that closes the pipe must not turn a failed check
    /// into a success, so the work goes on unheard.
    pub(super) fn of_a_verdict(json: bool) -> Self {
        Self { verdict: true, ..Self::new(json) }
    }

    /// Whether the result is one JSON document.
    pub(super) fn json(&self) -> bool {
        self.json
    }

    /// Writes a piece of the result at once. Nothing in JSON mode.
    pub(super) fn text(&mut self, text: impl AsRef<str>) -> Result<()> {
        if self.json { Ok(()) } else { self.write(text.as_ref()) }
    }

    /// Writes a line of the result. Nothing in JSON mode.
    pub(super) fn line(&mut self, text: impl AsRef<str>) -> Result<()> {
        if self.json { Ok(()) } else { self.write(&format!("{}\n", text.as_ref())) }
    }

    /// Writes the JSON document. Nothing in text mode.
    pub(super) fn document(&mut self, value: &Value) -> Result<()> {
        if self.json { self.write(&format!("{value}\n")) } else { Ok(()) }
    }

    /// Writes the JSON document of a failure before there was any result. Nothing in text mode, or where one was begun: a
    /// script finds one document.
    pub(super) fn failure(&mut self, error: &Error) {
        if self.json_failure && !self.begun {
            let (what, advice) = error.parts();
            // Nobody reading is fine: the error is told, and stays the exit status.
            let _ = self.write(&format!("{}\n", failure(&what, advice.as_deref(), error.exit_status())));
        }
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.begun |= !text.is_empty();
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if self.verdict && error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            written => written.map_err(Error::Output),
        }
    }
}

/// What stands in place of a result that there is none of.
pub(super) fn failure(what: &str, advice: Option<&str>, exit_status: u8) -> Value {
    json!({ "error": { "what": what, "try": advice, "exit_status": exit_status } })
}

/// Says something to the person who watches. Nobody listening is fine.
pub(super) fn say(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr().lock(), "{}", text.as_ref());
}

/// A progress bar on standard error, or none where that is no terminal.
pub(super) fn progress(total: u64, what: &'static str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let style = indicatif::ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} ({elapsed})");
    let bar = indicatif::ProgressBar::new(total).with_message(what);
    if let Ok(style) = style { bar.with_style(style) } else { bar }
}
