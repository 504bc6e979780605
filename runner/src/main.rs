//! The `evergraph` command.

use std::io::Write;
use std::process::ExitCode;

use evergraph_runner::cli::{self, Failure};
use miette::{GraphicalReportHandler, MietteDiagnostic};

fn main() -> ExitCode {
    if let Ok(filter) = tracing_subscriber::EnvFilter::try_from_env("EVERGRAPH_LOG") {
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    }
    match cli::run(std::env::args_os()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Words(error)) => {
            let _ = error.print(); // help goes to standard output, complaints to standard error
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
        }
        Err(Failure::Work(error)) => {
            report(&error);
            ExitCode::from(error.exit_status())
        }
    }
}

fn report(error: &evergraph_runner::Error) {
    let (what, advice) = error.parts();
    let mut diagnostic = MietteDiagnostic::new(what);
    if let Some(advice) = advice {
        diagnostic = diagnostic.with_help(advice);
    }
    let mut text = String::new();
    if GraphicalReportHandler::new().render_report(&mut text, &diagnostic).is_err() {
        text = error.to_string();
    }
    let _ = writeln!(std::io::stderr().lock(), "{}", text.trim_end());
}
