//! Writing a file of any size, from several threads, piece by piece.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::blocks;
use super::random::Random;
use super::shapes::{Tensor, Values};
use crate::error::{Error, Result};
use crate::gguf::QuantType;

/// About how large a piece is, bytes.
const PIECE_BYTES: usize = 4 << 20;

/// What is written.
#[derive(Debug)]
pub(super) struct Work<'a> {
    pub(super) header: &'a [u8],
    /// Where each tensor begins, and its bytes.
    pub(super) places: &'a [(u64, u64)],
    pub(super) tensors: &'a [Tensor],
    pub(super) seed: u64,
}

/// Where it is written.
pub(super) trait Target: Sync {
    /// Writes all bytes at a place.
    fn put(&self, bytes: &[u8], at: u64) -> io::Result<()>;
}

impl Target for File {
    fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }
}

/// Removes an unfinished file.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes the file beside its name, then gives it its name.
pub(super) fn file(
    path: &Path,
    work: &Work<'_>,
    bytes: u64,
    threads: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<()> {
    let Some(name) = path.file_name() else {
        return Err(Error::argument("-o", "the name of a file", path.display()));
    };
    if path.is_dir() {
        return Err(Error::argument("-o", "the name of a file", format!("the folder {}", path.display())));
    }
    // A device or a pipe would be replaced by a file of its name.
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        return Err(Error::argument(
            "-o",
            "a new file, or one to replace",
            format!("{}, which is no file", path.display()),
        ));
    }
    let mut beside = name.to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let beside = path.with_file_name(beside);
    let file =
        OpenOptions::new().write(true).create_new(true).open(&beside).map_err(Error::io("can not create", path))?;
    let unfinished = Unfinished(beside);
    let written = file.set_len(bytes).and_then(|()| all(&file, work, threads, progress));
    written.and_then(|()| std::fs::rename(&unfinished.0, path)).map_err(|source| {
        let short = matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        let what = if short { "no room (free some, or take fewer --layers) for" } else { "can not write" };
        Error::Io { what, path: path.to_owned(), source }
    })
}

/// Writes header and tensors; the first error ends it.
pub(super) fn all(
    target: &impl Target,
    work: &Work<'_>,
    threads: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> io::Result<()> {
    target.put(work.header, 0)?;
    let pieces: Vec<u64> =
        work.places.iter().zip(work.tensors).map(|((_, bytes), t)| bytes.div_ceil(piece_bytes(t.ty))).collect();
    // Work is handed out in the order of the file, so that the disk sees it grow.
    let (next, failed, done) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let total: u64 = pieces.iter().sum();
    let whole: u64 = work.places.iter().map(|(_, bytes)| bytes).sum();
    let error: Mutex<Option<io::Error>> = Mutex::new(None);
    let starts: Vec<u64> = pieces.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n))).collect();
    let worker = || {
        let mut buffer = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed) as u64;
            if number >= total {
                return;
            }
            let index = starts.partition_point(|start| *start <= number) - 1;
            let (tensor, (begin, bytes)) = (&work.tensors[index], work.places[index]);
            let piece = number - starts[index];
            let skip = piece * piece_bytes(tensor.ty);
            let length = (bytes - skip).min(piece_bytes(tensor.ty)) as usize;
            buffer.resize(length, 0);
            let mut random = Random::of(work.seed, index as u64, piece);
            values(tensor, &mut random, skip, &mut buffer);
            if let Err(found) = target.put(&buffer, begin + skip) {
                failed.store(true, Ordering::Relaxed);
                error.lock().get_or_insert(found);
                return;
            }
            progress(done.fetch_add(length as u64, Ordering::Relaxed) + length as u64, whole);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, 64) {
            scope.spawn(worker);
        }
        worker();
    });
    error.into_inner().map_or(Ok(()), Err)
}

/// Bytes of a piece: whole blocks.
fn piece_bytes(ty: QuantType) -> u64 {
    (PIECE_BYTES / ty.type_bytes() * ty.type_bytes()) as u64
}

/// Fills a piece of a tensor that begins `skip` bytes into it.
fn values(tensor: &Tensor, random: &mut Random, skip: u64, bytes: &mut [u8]) {
    match tensor.values {
        Values::Random(deviation) => blocks::fill(tensor.ty, random, bytes, deviation),
        Values::All(value) => bytes.chunks_exact_mut(4).for_each(|place| place.copy_from_slice(&value.to_le_bytes())),
        Values::Experts { used, count } => {
            for (i, place) in bytes.chunks_exact_mut(4).enumerate() {
                let (token, k) = ((skip / 4 + i as u64) / used, (skip / 4 + i as u64) % used);
                let expert = (token.wrapping_mul(7919) + k * (count / used)) % count;
                place.copy_from_slice(&(expert as u32).to_le_bytes());
            }
        }
        Values::RopeFactors { turned } => {
            for (i, place) in bytes.chunks_exact_mut(4).enumerate() {
                let factor: f32 = if skip / 4 + (i as u64) < turned { 1.0 } else { 1e30 };
                place.copy_from_slice(&factor.to_le_bytes());
            }
        }
    }
}
