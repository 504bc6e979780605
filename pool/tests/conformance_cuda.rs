//! The driver's rules, told over a CUDA device: `cargo test -p evergraph-pool --features gpu --test conformance_cuda`.
//!
//! One story after the other, each in a process of its own: a story that faults loses its context, and a wrong handle
//! may end the process. Stories that this machine can not tell are skipped by name and reason. Without a device nothing
//! runs and nothing passes. NVRTC compiles the kernels; where it is not to be had, `EVERGRAPH_CONFORMANCE_IMAGES` names
//! two cubin or PTX files, of `kernels.cu` and `other_kernels.cu`, separated by a colon.
//!
//! Arguments that are not options are parts of names of the stories to tell (`body::story`).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use cudarc::nvrtc;
use evergraph_pool::driver::conformance::{self, Body, Rig, SOURCES, Story};
use evergraph_pool::driver::cuda::{self, CudaDevice};
use evergraph_pool::driver::{Args, Driver, Node, NodeArgs};

const BODIES: [(&str, Body); 3] =
    [("cuda", Body::Cuda), ("faulty_cuda", Body::FaultyCuda), ("virtual_cuda", Body::VirtualCuda)];
const STORY: &str = "EVERGRAPH_CONFORMANCE_STORY";
const IMAGES: &str = "EVERGRAPH_CONFORMANCE_IMAGES";
/// Stories of what only hardware has.
const OWN: [Story; 1] = [("packed_arguments_can_be_read_back", packed_arguments_can_be_read_back)];
/// A story takes a second; one that hangs has failed.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    if let Ok(story) = std::env::var(STORY) {
        tell(&story);
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if std::env::args().any(|arg| arg == "--list") {
        return ExitCode::SUCCESS;
    }
    if cuda::device_count() == 0 {
        println!("skipped: no device; 0 stories told");
        return ExitCode::SUCCESS;
    }
    let info = CudaDevice::open(0).unwrap().info().clone();
    println!("{} GPU(s), the first: {info:?}", cuda::device_count());
    let folder = std::env::temp_dir().join(format!("evergraph-conformance-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let images = std::env::var(IMAGES).unwrap_or_else(|_| compile(&folder, info.compute_capability));
    let all_well = tell_all(&wanted, &images, &folder);
    let _ = std::fs::remove_dir_all(&folder);
    if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compiles both sources to PTX files; returns their names.
fn compile(folder: &Path, (major, minor): (u32, u32)) -> String {
    // SAFETY: loads and drops the library; its initialisers are the vendor's.
    #[allow(unsafe_code)]
    let present = unsafe { nvrtc::sys::is_culib_present() };
    assert!(present, "NVRTC is not on the loader's path: set {IMAGES}");
    let names = SOURCES.iter().enumerate().map(|(index, source)| {
        let options = vec![format!("--gpu-architecture=compute_{major}{minor}"), "--std=c++17".to_owned()];
        let options = nvrtc::CompileOptions { options, ..Default::default() };
        let compiled = nvrtc::compile_ptx_with_opts(source, options).unwrap();
        let path = folder.join(format!("{index}.ptx"));
        std::fs::write(&path, compiled.as_bytes().unwrap()).unwrap();
        path.to_str().unwrap().to_owned()
    });
    names.collect::<Vec<_>>().join(":")
}

/// In the child: one story.
fn tell(story: &str) {
    let (body, name) = story.split_once("::").unwrap();
    let (_, body) = BODIES.into_iter().find(|(known, _)| *known == body).unwrap();
    let (_, told) = stories().find(|(known, _)| *known == name).unwrap();
    let images = std::env::var(IMAGES).unwrap();
    let mut images = images.split(':').map(|path| std::fs::read(PathBuf::from(path)).unwrap());
    conformance::set_cuda_images(images.next().unwrap(), images.next().unwrap());
    told(&Rig::new(body));
}

fn stories() -> impl Iterator<Item = Story> {
    conformance::all_stories().chain(OWN)
}

/// Libraries launch with one packed buffer (`extra`); a node read back has that buffer, without a layout.
#[allow(unsafe_code)]
fn packed_arguments_can_be_read_back(rig: &Rig) {
    let (stream, ptr) = (rig.stream(), rig.words(4, 0));
    let mut args = Args::new();
    args.ptr(ptr).u32(4).u32(77);
    let function: sys::CUfunction = std::ptr::with_exposed_provenance_mut(rig.function("fill").0 as usize);
    let raw: sys::CUstream = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
    let graph = rig.capture(stream, || {
        let mut size = args.as_bytes().len();
        let key = std::ptr::without_provenance_mut;
        let buffer = args.as_bytes().as_ptr().cast_mut().cast();
        let mut extra = [key(1), buffer, key(2), (&raw mut size).cast(), key(0)];
        // SAFETY: live handles; the list and what it names live through the call, which copies the buffer.
        let status = unsafe {
            sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, raw, std::ptr::null_mut(), extra.as_mut_ptr())
        };
        assert_eq!(status as u32, 0);
    });
    let read = rig.driver.node(rig.driver.graph_nodes(graph).unwrap()[0]).unwrap();
    let Node::Kernel { function, args: NodeArgs::Packed { bytes, layout: None }, .. } = read else {
        panic!("a packed kernel, found {read:?}")
    };
    assert_eq!((function, bytes.as_slice()), (rig.function("fill"), args.as_bytes()));
    let exec = rig.driver.instantiate(graph).unwrap();
    rig.replay(exec, stream);
    assert_eq!(rig.read(ptr, 4), [77; 4]);
}

fn tell_all(wanted: &[String], images: &str, folder: &Path) -> bool {
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), 0);
    for (body, kind) in BODIES {
        for (name, _) in stories() {
            let full = format!("{body}::{name}");
            if !wanted.is_empty() && !wanted.iter().any(|part| full.contains(part)) {
                continue;
            }
            if let Some(why) = conformance::untold(kind, name, cuda::device_count()) {
                println!("{full} ... skipped: {why}");
                skipped += 1;
                continue;
            }
            let (verdict, text) = in_a_child(&full, images, folder);
            println!("{full} ... {verdict}");
            if verdict == "ok" {
                passed += 1;
            } else {
                println!("{text}");
                failed.push(full);
            }
        }
    }
    println!("{passed} passed, {} failed, {skipped} skipped", failed.len());
    failed.iter().for_each(|name| println!("failed: {name}"));
    failed.is_empty()
}

fn in_a_child(story: &str, images: &str, folder: &Path) -> (String, String) {
    let log = folder.join("log");
    let file = std::fs::File::create(&log).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(STORY, story)
        .env(IMAGES, images)
        // A function loaded lazily would wait for the device, which a story may hold.
        .env("CUDA_MODULE_LOADING", "EAGER")
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let verdict = loop {
        match child.try_wait().unwrap() {
            Some(status) if status.success() => break "ok".to_owned(),
            Some(status) => break format!("FAILED ({status})"),
            None if start.elapsed() > LIMIT => {
                let _ = child.kill();
                let _ = child.wait();
                break "FAILED (hangs)".to_owned();
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    (verdict, std::fs::read_to_string(&log).unwrap_or_default())
}
