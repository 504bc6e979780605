//! Compiled images on disk.
//!
//! An entry is one file, `SOURCE.TARGET.KEY.COMPILER.cubin`: a header (magic, length, checksum) and the image. It is
//! written under a name of its own and renamed, so readers see all of it or none of it, also while other processes
//! write the same entry. What does not match its header counts as missing.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::nvrtc;
use super::source::HEADERS;
use super::{Source, Target};

/// Environment variable with the folder to use; empty means no cache on disk.
const FOLDER: &str = "EVERGRAPH_KERNEL_CACHE";
/// Changes with the layout of entries.
const MAGIC: &[u8; 8] = b"EVGKRN01";
const HEADER_BYTES: usize = 8 + 8 + 16;

/// A folder of compiled images.
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: Option<PathBuf>,
}

/// Which compiler an entry is from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Compiler {
    /// This one. Told by its file (path, length, time) so that a cached image needs no compiler to be loaded; by its
    /// version where the file was not found.
    Known(String),
    /// There is none here: an entry of any compiler will do.
    Any,
}

impl Compiler {
    pub(super) fn find() -> Self {
        let file = nvrtc::library_file().and_then(|path| {
            let data = fs::metadata(&path).ok()?;
            let time = data.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
            Some(format!("{}|{}|{}", path.display(), data.len(), time.as_nanos()))
        });
        let identity = file.or_else(|| {
            let compiler = nvrtc::Nvrtc::load().ok()?;
            Some(format!("{}|{:?}", compiler.name(), compiler.version()))
        });
        identity.map_or(Self::Any, |text| Self::Known(format!("{:016x}", xxh3_128(text.as_bytes()) as u64)))
    }
}

/// Names one entry.
#[derive(Clone, Debug)]
pub(super) struct Key {
    /// Everything but the compiler.
    stem: String,
    compiler: Compiler,
}

impl DiskCache {
    /// The user's cache: `$EVERGRAPH_KERNEL_CACHE`, or `evergraph/kernels` in `$XDG_CACHE_HOME` or `~/.cache`.
    #[must_use]
    pub fn of_user() -> Self {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return Self { folder: (!folder.is_empty()).then(|| folder.into()) };
        }
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        Self { folder: base.map(|base| base.join("evergraph").join("kernels")) }
    }

    /// A cache in `folder`, which is made when needed.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// No cache: every load compiles.
    #[must_use]
    pub fn none() -> Self {
        Self { folder: None }
    }

    /// Where entries are.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    pub(super) fn key(&self, source: &Source, options: &[&str], target: Target, compiler: &Compiler) -> Key {
        let mut hash = Xxh3::new();
        let texts = [source.name, source.text].into_iter();
        let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
        for text in texts.chain(headers).chain(options.iter().copied()) {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        let stem = format!("{}.{}.{:032x}", source.name, target.name(), hash.digest128());
        Key { stem, compiler: compiler.clone() }
    }

    /// The image of an entry, if it is there and whole.
    pub(super) fn read(&self, key: &Key) -> Option<Vec<u8>> {
        let folder = self.folder.as_deref()?;
        match &key.compiler {
            Compiler::Known(compiler) => read(&folder.join(format!("{}.{compiler}.cubin", key.stem))),
            Compiler::Any => {
                let prefix = format!("{}.", key.stem);
                let entries = fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
                let ours = |path: &PathBuf| {
                    let name = path.file_name().and_then(|name| name.to_str());
                    name.is_some_and(|name| name.starts_with(&prefix) && name.ends_with(".cubin"))
                };
                entries.filter(ours).find_map(|path| read(&path))
            }
        }
    }

    /// Keeps an image. A failure costs the next process a compilation, so it is only logged.
    pub(super) fn write(&self, key: &Key, image: &[u8]) {
        let (Some(folder), Compiler::Known(compiler)) = (self.folder.as_deref(), &key.compiler) else { return };
        if let Err(error) = write(folder, &format!("{}.{compiler}.cubin", key.stem), image) {
            tracing::warn!(folder = %folder.display(), %error, "compiled kernels are not kept on disk");
        }
    }
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut entry = fs::read(path).ok()?;
    let whole = entry.len() >= HEADER_BYTES && {
        let (header, image) = entry.split_at(HEADER_BYTES);
        header == self::header(image)
    };
    if !whole {
        tracing::warn!(path = %path.display(), "a damaged entry of the kernel cache is compiled anew");
        return None;
    }
    entry.drain(..HEADER_BYTES);
    Some(entry)
}

fn write(folder: &Path, name: &str, image: &[u8]) -> std::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(folder)?;
    let aside = folder.join(format!("{name}.{}.{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let written = (|| {
        let mut file = fs::File::create_new(&aside)?;
        file.write_all(&header(image))?;
        file.write_all(image)?;
        fs::rename(&aside, folder.join(name))
    })();
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

fn header(image: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&(image.len() as u64).to_le_bytes());
    header[16..].copy_from_slice(&xxh3_128(image).to_le_bytes());
    header
}
