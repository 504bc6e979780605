#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use super::disk::Compiler;
use super::{DiskCache, Nvrtc, NvrtcError, OPTIONS, SOURCES, Source, Target, compile, elf, images};

const SMALL: Source = Source {
    name: "small",
    text: "extern \"C\" __global__ void second(float* x) { *x = 1.0f; }\n\
           extern \"C\" __global__ void first(int* x) { *x = 1; }\n",
};

/// The targets that every kernel must compile for: one of each kind that the sources tell apart.
const TARGETS: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

/// A folder of this test's own, gone at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("evergraph-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }

    fn entries(&self) -> Vec<PathBuf> {
        let list = std::fs::read_dir(&self.0).into_iter().flatten();
        list.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether there is a compiler; says so where there is none.
fn compiler() -> bool {
    match Nvrtc::load() {
        Ok(_) => true,
        Err(why) => {
            assert!(std::env::var_os("EVERGRAPH_REQUIRE_NVRTC").is_none(), "{why}");
            println!("skipped: {why}");
            false
        }
    }
}

/// An ELF file with these sections, as far as the reader looks.
fn elf_with(sections: &[&str]) -> Vec<u8> {
    let mut strings = vec![0];
    let mut headers = vec![[0u8; 64]];
    for name in sections.iter().chain(&[".shstrtab"]) {
        let mut header = [0; 64];
        header[..4].copy_from_slice(&(strings.len() as u32).to_le_bytes());
        strings.extend_from_slice(name.as_bytes());
        strings.push(0);
        headers.push(header);
    }
    let last = headers.len() - 1;
    headers[last][24..32].copy_from_slice(&64u64.to_le_bytes());
    headers[last][32..40].copy_from_slice(&(strings.len() as u64).to_le_bytes());
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[40..48].copy_from_slice(&(64 + strings.len() as u64).to_le_bytes());
    file[58..60].copy_from_slice(&64u16.to_le_bytes());
    file[60..62].copy_from_slice(&(headers.len() as u16).to_le_bytes());
    file[62..64].copy_from_slice(&(last as u16).to_le_bytes());
    file.extend(strings);
    file.extend(headers.concat());
    file
}

#[test]
fn kernels_are_named_by_the_sections_of_their_code() {
    let file = elf_with(&[".text.rope", ".nv.info.rope", ".text.add"]);
    assert_eq!(elf::kernels(&file).unwrap(), ["add", "rope"]);
    assert_eq!(elf::kernels(b"// PTX"), None);
    for cut in 0..file.len() {
        // Whatever is missing, nothing is read past the end; names are only told from a whole file.
        assert_eq!(elf::kernels(&file[..cut]), None, "cut at {cut}");
    }
    let mut far = file;
    far[40..48].fill(0xff);
    assert_eq!(elf::kernels(&far), None);
}

#[test]
fn an_entry_is_told_by_source_options_target_and_compiler() {
    let folder = Folder::new("keys");
    let disk = DiskCache::in_folder(&folder.0);
    let (one, other) = (Compiler::Known("one".into()), Compiler::Known("other".into()));
    let (hopper, ada) = (Target::parse("sm_90a").unwrap(), Target::parse("sm_89").unwrap());
    let key = disk.key(&SMALL, OPTIONS, hopper, &one);
    disk.write(&key, b"image");
    assert_eq!(disk.read(&key).as_deref(), Some(&b"image"[..]));
    let changed = Source { text: "extern \"C\" __global__ void second() {}", ..SMALL };
    for (what, other) in [
        ("source", disk.key(&changed, OPTIONS, hopper, &one)),
        ("options", disk.key(&SMALL, &["--std=c++17"], hopper, &one)),
        ("target", disk.key(&SMALL, OPTIONS, ada, &one)),
        ("compiler", disk.key(&SMALL, OPTIONS, hopper, &other)),
    ] {
        assert_eq!(disk.read(&other), None, "another {what}");
    }
    let without_compiler = disk.key(&SMALL, OPTIONS, hopper, &Compiler::Any);
    assert_eq!(disk.read(&without_compiler).as_deref(), Some(&b"image"[..]), "any compiler's image will do");
}

#[test]
fn a_damaged_entry_counts_as_missing() {
    let folder = Folder::new("damage");
    let disk = DiskCache::in_folder(&folder.0);
    let key = disk.key(&SMALL, OPTIONS, Target::of((9, 0)), &Compiler::Known("one".into()));
    disk.write(&key, &[7; 1000]);
    let path = folder.entries().remove(0);
    let whole = std::fs::read(&path).unwrap();
    for cut in [0, 5, 31, 32, 500, whole.len() - 1] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        assert_eq!(disk.read(&key), None, "cut at {cut}");
    }
    for flip in [0, 9, 20, 40, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[flip] ^= 0x10;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(disk.read(&key), None, "bit of byte {flip}");
    }
    disk.write(&key, &[7; 1000]);
    assert_eq!(disk.read(&key).unwrap(), [7; 1000], "and is written anew");
}

#[test]
fn many_writers_leave_one_whole_entry() {
    let folder = Folder::new("writers");
    let disk = DiskCache::in_folder(&folder.0);
    let key = disk.key(&SMALL, OPTIONS, Target::of((9, 0)), &Compiler::Known("one".into()));
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let (disk, key) = (&disk, &key);
            scope.spawn(move || {
                for _ in 0..50 {
                    disk.write(key, &vec![writer; 10_000]);
                    let read = disk.read(key).unwrap();
                    assert!(read.len() == 10_000 && read.iter().all(|&byte| byte == read[0]), "never a mixture");
                }
            });
        }
    });
    assert_eq!(folder.entries().len(), 1, "nothing is left aside");
}

#[test]
fn a_cache_that_can_not_be_written_costs_time_only() {
    let folder = Folder::new("blocked");
    std::fs::write(&folder.0, b"a file where the folder should be").unwrap();
    let disk = DiskCache::in_folder(&folder.0);
    let key = disk.key(&SMALL, OPTIONS, Target::of((9, 0)), &Compiler::Known("one".into()));
    disk.write(&key, b"image");
    assert_eq!(disk.read(&key), None);
    std::fs::remove_file(&folder.0).unwrap();
}

#[test]
fn targets_are_spelled_as_the_compiler_spells_them() {
    for name in TARGETS {
        assert_eq!(Target::parse(name).unwrap().name(), name);
    }
    assert_eq!(Target::of((12, 1)).name(), "sm_121");
    for bad in ["", "sm_", "90", "sm_x", "sm_9", "sm_99999", "sm_-1"] {
        assert_eq!(Target::parse(bad), None, "{bad}");
    }
}

#[test]
fn an_image_is_compiled_once_and_rebuilt_when_damaged() {
    if !compiler() {
        return;
    }
    let folder = Folder::new("compile");
    let disk = DiskCache::in_folder(&folder.0);
    let target = Target::of((9, 0));
    let load = || images(&[SMALL], target, &disk).unwrap().remove(0);
    let first = load();
    assert!(first.compiled);
    assert_eq!(first.kernels, ["first", "second"]);
    let second = load();
    assert!(!second.compiled && second.cubin == first.cubin);
    let path = folder.entries().remove(0);
    std::fs::write(&path, b"rubbish").unwrap();
    assert!(load().compiled);
    assert!(!load().compiled);
}

#[test]
fn a_refused_source_comes_with_the_compilers_words() {
    if !compiler() {
        return;
    }
    let broken = Source { name: "broken", text: "__global__ void f() { undeclared(); }" };
    let error = compile(&broken, Target::of((8, 0))).unwrap_err().to_string();
    assert!(error.contains("broken.cu") && error.contains("undeclared"), "{error}");
    let foreign = Source { name: "foreign", text: "#include <cuda_fp8.h>\n" };
    assert!(matches!(compile(&foreign, Target::of((8, 0))), Err(NvrtcError::Compile { .. })), "own headers only");
    assert!(matches!(compile(&SMALL, Target::of((1, 0))), Err(NvrtcError::Target { .. })));
}

#[test]
fn every_source_compiles_for_every_target() {
    if !compiler() {
        return;
    }
    for target in TARGETS {
        for image in images(SOURCES, Target::parse(target).unwrap(), &DiskCache::none()).unwrap() {
            assert!(!image.kernels.is_empty(), "{}", image.source);
            println!("{target} {}: {} kernels, {} bytes", image.source, image.kernels.len(), image.cubin.len());
        }
    }
}
