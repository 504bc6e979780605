//! `evergraph doctor`: what is there, what is missing, how to get it.

use std::path::PathBuf;

use evergraph_kernels::cpu::InstructionSets;
use evergraph_pool::driver::DeviceInfo;
use evergraph_pool::driver::cuda::{self, Survey};
use serde_json::{Value, json};

use super::device::{find_library, kernel_driver, kernels_missing};
use super::output::Output;
use super::size::format_size;
use crate::device;
use crate::error::Result;

#[derive(Debug, clap::Args)]
pub(super) struct Flags {
    /// Print one JSON document
    #[arg(long)]
    pub(super) json: bool,
}

/// A library that CUDA devices are used with.
struct Library {
    name: &'static str,
    files: &'static [&'static str],
    /// What it is for.
    does: &'static str,
    /// Where it comes from.
    get: &'static str,
}

const LIBRARIES: &[Library] = &[
    Library {
        name: "nvrtc",
        files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        does: "compiles the kernels for a device at first use",
        get: "pip install nvidia-cuda-nvrtc (and its lib folder in LD_LIBRARY_PATH), or the CUDA toolkit",
    },
    Library {
        name: "cublas",
        files: &["libcublas.so.13", "libcublas.so.12", "libcublas.so"],
        does: "large products of floats",
        get: "pip install nvidia-cublas, or the CUDA toolkit",
    },
    Library {
        name: "nccl",
        files: &["libnccl.so.2", "libnccl.so"],
        does: "not used yet",
        get: "pip install nvidia-nccl-cu13, or NVIDIA's packages",
    },
];

pub(super) fn run(_flags: &Flags, out: &mut Output) -> Result<()> {
    let survey = cuda::survey();
    let libraries: Vec<(&Library, Option<PathBuf>)> =
        LIBRARIES.iter().map(|l| (l, l.files.iter().find_map(|file| find_library(file)))).collect();
    out.document(&document(&survey, &libraries))?;

    let (threads, memory) = (threads(), memory_bytes().unwrap_or(0));
    out.line(format!("evergraph {}", env!("CARGO_PKG_VERSION")))?;
    out.line(format!("  ok       host: {threads} threads, {} of memory, VMM", format_size(memory)))?;
    for line in processor(&InstructionSets::current()) {
        out.line(line)?;
    }
    for info in &survey.devices {
        let (major, minor) = info.compute_capability;
        out.line(format!(
            "  ok       cuda:{}: {}, compute capability {major}.{minor}, {} multiprocessors, {} of memory, {}",
            info.ordinal.0,
            info.name,
            info.multiprocessors,
            format_size(info.total_bytes as u64),
            if info.vmm { "VMM" } else { "no VMM (--pool slab)" },
        ))?;
    }
    match &survey.missing {
        Some(missing) => {
            out.line(format!("  missing  cuda: {missing}\n           to get it: {}", device::advice(missing)))?;
        }
        None => {
            let (major, minor) = survey.driver_version.unwrap_or_default();
            out.line(format!("  ok       cuda driver: speaks CUDA {major}.{minor}"))?;
            if let Some((what, advice)) = survey.devices.iter().find_map(kernels_missing) {
                out.line(format!("  missing  cuda kernels: {what}\n           to get it: {advice}"))?;
            }
        }
    }
    for (library, path) in &libraries {
        let Library { name, does, get, .. } = library;
        match path {
            Some(path) => out.line(format!("  ok       {name}: {} ({does})", path.display()))?,
            None => out.line(format!("  missing  {name}: {does}; only for cuda\n           to get it: {get}"))?,
        }
    }
    Ok(())
}

/// What the host device computes with.
fn processor(sets: &InstructionSets) -> Vec<String> {
    let InstructionSets { floats, integers, integers_of_many, .. } = sets;
    let mut lines = vec![format!(
        "  ok       instruction sets: {floats} for floats, {integers} for integers, {integers_of_many} with many tokens"
    )];
    lines.extend(sets.no_amx.as_ref().map(|why| format!("           amx_int8 is not used: {why}")));
    lines.extend(sets.complaint.as_ref().map(|complaint| format!("  ignored  {complaint}")));
    lines
}

fn document(survey: &Survey, libraries: &[(&Library, Option<PathBuf>)]) -> Value {
    let kernels = survey.devices.iter().find_map(kernels_missing);
    let usable = survey.missing.is_none() && kernels.is_none();
    let sets = InstructionSets::current();
    let mut devices = vec![json!({
        "backend": "host",
        "ordinal": 0,
        "name": "host device (CPU)",
        "usable": true,
        "vmm": true,
        "threads": threads(),
        "memory_bytes": memory_bytes(),
        "instruction_sets": {
            "floats": sets.floats,
            "integers": sets.integers,
            "integers_of_many_tokens": sets.integers_of_many,
            "amx_int8_missing": sets.no_amx,
            "ignored": sets.complaint,
        },
    })];
    devices.extend(survey.devices.iter().map(|info| cuda_device(info, usable)));
    let missing = survey.missing.as_ref().map(|m| (m.to_string(), device::advice(m).to_owned())).or(kernels);
    let mut document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "devices": devices,
        "cuda": {
            "kernel_driver": kernel_driver(),
            "library": find_library("libcuda.so.1"),
            "driver_version": survey.driver_version.map(|(major, minor)| format!("{major}.{minor}")),
            "usable": usable,
            "missing": missing.as_ref().map(|(what, _)| what),
            "advice": missing.as_ref().map(|(_, advice)| advice),
        },
    });
    for (library, path) in libraries {
        document[library.name] = path.as_ref().map_or(Value::Null, |path| json!(path));
    }
    document
}

fn cuda_device(info: &DeviceInfo, usable: bool) -> Value {
    let (major, minor) = info.compute_capability;
    json!({
        "backend": info.backend,
        "ordinal": info.ordinal.0,
        "name": info.name,
        "usable": usable,
        "vmm": info.vmm,
        "compute_capability": format!("{major}.{minor}"),
        "multiprocessors": info.multiprocessors,
        "memory_bytes": info.total_bytes,
    })
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Memory of this machine that is free or can be freed, bytes.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
