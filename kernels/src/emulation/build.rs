//! Compiles the CUDA sources with g++, each only when it changed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use rayon::prelude::*;

use super::EmulationError;

fn failed(what: &Path, why: impl std::fmt::Display) -> EmulationError {
    EmulationError::Build(format!("{}: {why}", what.display()))
}

/// The shared library of all kernels in `cuda`.
pub(super) fn library(cuda: &Path) -> Result<PathBuf, EmulationError> {
    let version =
        Command::new("g++").arg("--version").output().map_err(|e| EmulationError::NoCompiler(e.to_string()))?;
    let mut headers = BTreeMap::new();
    let mut sources = BTreeMap::new();
    for folder in [cuda.to_owned(), cuda.join("emulated")] {
        for entry in fs::read_dir(&folder).map_err(|e| failed(&folder, e))? {
            let path = entry.map_err(|e| failed(&folder, e))?.path();
            let list = match path.extension().and_then(|e| e.to_str()) {
                Some("cuh" | "h") => &mut headers,
                Some("cu" | "cpp") => &mut sources,
                _ => continue,
            };
            let text = fs::read_to_string(&path).map_err(|e| failed(&path, e))?;
            list.insert(path, text);
        }
    }
    let mut flags: Vec<String> = ["-O2", "-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall"]
        .into_iter()
        .chain(["-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", "-DEVG_EMULATED"])
        .map(str::to_owned)
        .collect();
    flags.push(format!("-I{}", cuda.display()));
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        flags.extend(["-mavx2".to_owned(), "-mfma".to_owned()]);
    }
    let common = hash(&(&version.stdout, &flags, &headers));
    let out = folder()?;
    let objects = sources
        .par_iter()
        .map(|(path, text)| object(path, hash(&(common, path, text)), &flags, &out))
        .collect::<Result<Vec<_>, _>>()?;
    let library = out.join(format!("kernels-{:016x}.so", hash(&(common, &objects))));
    if !library.exists() {
        let part = unique(&library);
        let mut link = Command::new("g++");
        run(link.arg("-shared").arg("-pthread").arg("-o").arg(&part).args(&objects), &library)?;
        fs::rename(&part, &library).map_err(|e| failed(&library, e))?;
    }
    Ok(library)
}

/// A folder in the target directory; the running program lies there too.
fn folder() -> Result<PathBuf, EmulationError> {
    let program = std::env::current_exe().map_err(|e| EmulationError::Build(e.to_string()))?;
    // target/debug/deps/program
    let target = program.ancestors().nth(3).unwrap_or(&program);
    let folder = target.join("tmp").join("emulated");
    fs::create_dir_all(&folder).map_err(|e| failed(&folder, e))?;
    Ok(folder)
}

/// Several test programs may build at the same time: each writes a file of its own and then renames it.
fn unique(path: &Path) -> PathBuf {
    path.with_extension(format!("{}.part", std::process::id()))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn run(command: &mut Command, what: &Path) -> Result<Vec<u8>, EmulationError> {
    let output = command.output().map_err(|e| EmulationError::NoCompiler(e.to_string()))?;
    if output.status.success() { Ok(output.stdout) } else { Err(failed(what, String::from_utf8_lossy(&output.stderr))) }
}

fn object(path: &Path, key: u64, flags: &[String], out: &Path) -> Result<PathBuf, EmulationError> {
    let stem = path.file_stem().and_then(|s| s.to_str()).unwrap_or("kernel");
    let object = out.join(format!("{stem}-{key:016x}.o"));
    if object.exists() {
        return Ok(object);
    }
    let mut source = path.to_owned();
    if path.extension().is_some_and(|e| e == "cu") {
        // The source with a line per kernel that enters it in the library's list. Names are those after macros.
        let mut list = Command::new("g++");
        let text = run(list.args(flags).args(["-DEVG_LIST", "-E", "-x", "c++"]).arg(path), path)?;
        let mut wrapped = format!("#include \"{}\"\n", path.display());
        let mut words =
            std::str::from_utf8(&text).unwrap_or_default().split(|c: char| !(c.is_alphanumeric() || c == '_'));
        while words.any(|word| word == "evg_kernel_named") {
            if let Some(name) = words.find(|word| !word.is_empty()) {
                let _ = writeln!(wrapped, "EVG_REGISTER({name})");
            }
        }
        source = unique(&object).with_extension("cpp");
        fs::write(&source, wrapped).map_err(|e| failed(&source, e))?;
    }
    let part = unique(&object);
    let mut compile = Command::new("g++");
    run(compile.args(flags).arg("-c").arg(&source).arg("-o").arg(&part), path)?;
    fs::rename(&part, &object).map_err(|e| failed(&object, e))?;
    if source != path {
        let _ = fs::remove_file(&source);
    }
    Ok(object)
}
