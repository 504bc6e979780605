//! What a captured graph refers to, read back on a CUDA device and compared with what is known to be in it:
//! `cargo test -p evergraph-kernels --features gpu --test scan_cuda`.
//!
//! One story after the other, each in a process of its own: a story that faults loses its context. Without a device
//! nothing runs and nothing passes. Kernels are compiled by NVRTC; stories of cuBLAS are skipped where it is not to be
//! had. Arguments that are not options are parts of names of the stories to tell.

#![allow(clippy::unwrap_used, unsafe_code)]

mod blas;
mod cache;
mod library_face;
mod nodes;
mod rig;

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use evergraph_pool::driver::cuda;

use rig::Rig;

/// A story and its name. It says why it was not told, if it was not.
type Story = (&'static str, fn(&Rig) -> Told);
type Told = Result<(), String>;

const STORY: &str = "EVERGRAPH_SCAN_STORY";
const LIMIT: Duration = Duration::from_secs(90);
/// The exit status of a story that was not told.
const UNTOLD: u8 = 77;

fn stories() -> impl Iterator<Item = Story> {
    [nodes::STORIES, blas::STORIES, library_face::STORIES, cache::STORIES].into_iter().flatten().copied()
}

fn main() -> ExitCode {
    if let Ok(wanted) = std::env::var(STORY) {
        let (_, story) = stories().find(|(name, _)| *name == wanted).unwrap();
        return match story(&Rig::new()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(why) => {
                println!("skipped: {why}");
                ExitCode::from(UNTOLD)
            }
        };
    }
    if std::env::args().any(|arg| arg == "--list") {
        return ExitCode::SUCCESS;
    }
    if cuda::device_count() == 0 {
        println!("skipped: no device; 0 stories told");
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let (mut told, mut failed, mut skipped) = (0, 0, 0);
    for (name, _) in stories().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|part| name.contains(part))) {
        let (verdict, text) = in_a_child(name);
        println!("{name} ... {verdict}");
        text.lines().for_each(|line| println!("    {line}"));
        match verdict.as_str() {
            "ok" => told += 1,
            "skipped" => skipped += 1,
            _ => failed += 1,
        }
    }
    println!("{told} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn in_a_child(story: &str) -> (String, String) {
    let log = std::env::temp_dir().join(format!("evergraph-scan-{}", std::process::id()));
    let file = std::fs::File::create(&log).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(STORY, story)
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let verdict = loop {
        match child.try_wait().unwrap() {
            Some(status) if status.success() => break "ok".to_owned(),
            Some(status) if status.code() == Some(i32::from(UNTOLD)) => break "skipped".to_owned(),
            Some(status) => break format!("FAILED ({status})"),
            None if start.elapsed() > LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                break "FAILED (hangs)".to_owned();
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    (verdict, text)
}
