//! `evergraph doctor`: what is there, what is missing, how to get it.

use serde_json::{Value, json};

use super::device::{CudaProbe, find_library};
use super::output::Output;
use super::size::format_size;
use crate::error::Result;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(_flags: &Flags, out: &mut Output) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = memory_bytes();
    let probe = CudaProbe::new();
    let missing = probe.missing();
    let libraries: Vec<(&str, Option<String>)> = [
        ("nvrtc", &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"][..]),
        ("cublas", &["libcublas.so.13", "libcublas.so.12", "libcublas.so"]),
        ("nccl", &["libnccl.so.2", "libnccl.so"]),
    ]
    .into_iter()
    .map(|(name, files)| (name, files.iter().find_map(|file| find_library(file))))
    .collect();

    let mut document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "devices": [{
            "backend": "host",
            "name": "host device (CPU)",
            "usable": true,
            "vmm": true,
            "threads": cores,
            "memory_bytes": memory,
        }],
        "cuda": {
            "kernel_driver": probe.kernel_driver,
            "library": probe.library,
            "usable": missing.is_none(),
            "missing": missing.as_ref().map(|(what, _)| what),
        },
    });
    for (name, path) in &libraries {
        document[*name] = path.as_ref().map_or(Value::Null, |path| json!(path));
    }
    out.document(&document)?;

    out.line(format!("evergraph {}", env!("CARGO_PKG_VERSION")))?;
    out.line(format!("  ok       host device: {cores} threads, {} of memory, VMM", format_size(memory.unwrap_or(0))))?;
    match &missing {
        None => out.line("  ok       cuda")?,
        Some((what, advice)) => out.line(format!("  missing  cuda: {what}\n           until then: {advice}"))?,
    }
    for (name, path) in &libraries {
        match path {
            Some(path) => out.line(format!("  ok       {name}: {path}"))?,
            None => out.line(format!(
                "  missing  {name}: only needed on cuda; it comes with the CUDA toolkit or NVIDIA's pip wheels"
            ))?,
        }
    }
    Ok(())
}

/// Memory of this machine that is free or can be freed, bytes.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
