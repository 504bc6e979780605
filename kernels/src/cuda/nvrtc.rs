//! NVRTC, loaded at run time.
//!
//! cudarc's binding looks for the library of the CUDA version that it was built for; any NVRTC from 12 on will do here,
//! and it is often there without its development link (PyPI's wheel has `libnvrtc.so.13` alone). So the library is
//! opened by name.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use super::source::HEADERS;
use super::{Source, Target};

/// Environment variable with the path of the library to use instead of the one that the loader finds.
const OVERRIDE: &str = "EVERGRAPH_NVRTC";
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Why a source was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvrtcError {
    /// The library is not there.
    #[error(
        "NVRTC was not found ({tried}): install CUDA's nvrtc package or PyPI's nvidia-cuda-nvrtc and put its lib folder \
         on LD_LIBRARY_PATH, or name the library in EVERGRAPH_NVRTC"
    )]
    Missing {
        /// What was looked for.
        tried: String,
    },
    /// The library lacks a function: it is older than 12.
    #[error("{library} has no {symbol}: an NVRTC of 12 or later is needed")]
    TooOld {
        /// The library.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The compiler does not know the chip.
    #[error("NVRTC {version} does not know {target}; it knows {known}: a newer NVRTC is needed")]
    Target {
        /// The compiler's version.
        version: String,
        /// What was asked for.
        target: String,
        /// What it knows.
        known: String,
    },
    /// The compiler refused the source.
    #[error("{source_name}.cu for {target}: {log}")]
    Compile {
        /// The source.
        source_name: &'static str,
        /// What it was compiled for.
        target: String,
        /// What the compiler said.
        log: String,
    },
    /// Another call failed.
    #[error("NVRTC: {call} failed with {status}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its status.
        status: i32,
    },
    /// What came out is no image with kernels.
    #[error("{source_name}.cu: the compiler's output is not a cubin")]
    NotACubin {
        /// The source.
        source_name: &'static str,
    },
}

type Program = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        /// The functions that are used, with the library that they are in.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
            _library: Library,
        }

        impl Functions {
            fn of(library: Library, name: &str) -> Result<Self, NvrtcError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is the one of the function's declaration in nvrtc.h, unchanged since 12.0.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol) };
                        let symbol = str::from_utf8($symbol).unwrap_or_default();
                        *found.map_err(|_| NvrtcError::TooOld { library: name.to_owned(), symbol })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    version = b"nvrtcVersion": fn(*mut c_int, *mut c_int);
    arch_count = b"nvrtcGetNumSupportedArchs": fn(*mut c_int);
    archs = b"nvrtcGetSupportedArchs": fn(*mut c_int);
    create = b"nvrtcCreateProgram":
        fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    destroy = b"nvrtcDestroyProgram": fn(*mut Program);
    compile = b"nvrtcCompileProgram": fn(Program, c_int, *const *const c_char);
    cubin_bytes = b"nvrtcGetCUBINSize": fn(Program, *mut usize);
    cubin = b"nvrtcGetCUBIN": fn(Program, *mut c_char);
    log_bytes = b"nvrtcGetProgramLogSize": fn(Program, *mut usize);
    log = b"nvrtcGetProgramLog": fn(Program, *mut c_char);
}

/// The compiler.
pub struct Nvrtc {
    functions: Functions,
    name: String,
    version: (u32, u32),
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Nvrtc {
    /// Loads the library, once a process.
    ///
    /// # Errors
    /// [`NvrtcError::Missing`] and [`NvrtcError::TooOld`].
    pub fn load() -> Result<&'static Self, NvrtcError> {
        static LOADED: OnceLock<Result<Nvrtc, NvrtcError>> = OnceLock::new();
        LOADED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, NvrtcError> {
        let names = candidates();
        preload_builtins(&names);
        // SAFETY: runs the library's initialisers, which are the vendor's.
        let found = names.iter().find_map(|name| Some((name.clone(), unsafe { Library::new(name) }.ok()?)));
        let Some((name, library)) = found else {
            return Err(NvrtcError::Missing { tried: names.join(", ") });
        };
        let functions = Functions::of(library, &name)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are live.
        status("nvrtcVersion", unsafe { (functions.version)(&raw mut major, &raw mut minor) })?;
        Ok(Self { functions, name, version: (major.unsigned_abs(), minor.unsigned_abs()) })
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The name under which the library was opened.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The architectures that it knows, as numbers (`90` for `sm_90`).
    ///
    /// # Errors
    /// [`NvrtcError::Call`].
    pub fn architectures(&self) -> Result<Vec<u32>, NvrtcError> {
        let mut count = 0;
        // SAFETY: the place is live.
        status("nvrtcGetNumSupportedArchs", unsafe { (self.functions.arch_count)(&raw mut count) })?;
        let mut list = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the list has room for as many numbers as were announced.
        status("nvrtcGetSupportedArchs", unsafe { (self.functions.archs)(list.as_mut_ptr()) })?;
        Ok(list.into_iter().map(c_int::unsigned_abs).collect())
    }

    pub(super) fn compile(&self, source: &Source, target: Target, options: &[&str]) -> Result<Vec<u8>, NvrtcError> {
        let known = self.architectures()?;
        if !known.contains(&(target.major * 10 + target.minor)) {
            let known: Vec<String> = known.iter().map(|number| format!("sm_{number}")).collect();
            let version = format!("{}.{}", self.version.0, self.version.1);
            return Err(NvrtcError::Target { version, target: target.name(), known: known.join(" ") });
        }
        let program = Compilation::new(&self.functions, source)?;
        let arch = format!("--gpu-architecture={}", target.name());
        let options: Vec<CString> =
            options.iter().copied().chain([arch.as_str()]).filter_map(|option| CString::new(option).ok()).collect();
        let list: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: a live program; the options are NUL-terminated and live for the call.
        let compiled = unsafe { (self.functions.compile)(program.program, list.len() as c_int, list.as_ptr()) };
        if compiled != 0 {
            let log = String::from_utf8_lossy(&program.log().unwrap_or_default()).trim_end_matches('\0').to_owned();
            return Err(NvrtcError::Compile { source_name: source.name, target: target.name(), log });
        }
        program.cubin()
    }
}

/// A program of the compiler, destroyed on drop.
struct Compilation<'a> {
    functions: &'a Functions,
    program: Program,
}

impl<'a> Compilation<'a> {
    fn new(functions: &'a Functions, source: &Source) -> Result<Self, NvrtcError> {
        const CALL: &str = "nvrtcCreateProgram";
        let owned = |text: &str| CString::new(text).map_err(|_| NvrtcError::Call { call: CALL, status: -1 });
        let (text, name) = (owned(source.text)?, owned(&format!("{}.cu", source.name))?);
        let texts = HEADERS.iter().map(|(_, text)| owned(text)).collect::<Result<Vec<_>, _>>()?;
        let names = HEADERS.iter().map(|(name, _)| owned(name)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (text_list, name_list) = (pointers(&texts), pointers(&names));
        let mut program = ptr::null_mut();
        // SAFETY: all texts are NUL-terminated and live for the call, which copies them; the lists are as long as said.
        let created = unsafe {
            (functions.create)(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                texts.len() as c_int,
                text_list.as_ptr(),
                name_list.as_ptr(),
            )
        };
        status(CALL, created)?;
        Ok(Self { functions, program })
    }

    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        self.text(("nvrtcGetCUBINSize", self.functions.cubin_bytes), ("nvrtcGetCUBIN", self.functions.cubin))
    }

    fn log(&self) -> Result<Vec<u8>, NvrtcError> {
        self.text(("nvrtcGetProgramLogSize", self.functions.log_bytes), ("nvrtcGetProgramLog", self.functions.log))
    }

    fn text(
        &self,
        (size_name, size): (&'static str, unsafe extern "C" fn(Program, *mut usize) -> c_int),
        (name, copy): (&'static str, unsafe extern "C" fn(Program, *mut c_char) -> c_int),
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: a live program and place.
        status(size_name, unsafe { size(self.program, &raw mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        // SAFETY: the buffer is as long as the size that was just asked for.
        status(name, unsafe { copy(self.program, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once. There is nobody to tell of a failure.
        unsafe { (self.functions.destroy)(&raw mut self.program) };
    }
}

fn status(call: &'static str, status: c_int) -> Result<(), NvrtcError> {
    if status == 0 { Ok(()) } else { Err(NvrtcError::Call { call, status }) }
}

/// NVRTC opens its builtins by name when it compiles. A library that was named by its path may lie where the loader does
/// not look, so its builtins are loaded from beside it; the loader then finds them by name.
fn preload_builtins(names: &[String]) {
    static KEPT: OnceLock<Vec<Library>> = OnceLock::new();
    KEPT.get_or_init(|| {
        let folders = names.iter().filter_map(|name| Some(PathBuf::from(name).parent()?.to_owned()));
        let files = folders.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().filter_map(Result::ok);
        let builtins = files.filter(|file| file.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so"));
        // SAFETY: runs the library's initialisers, which are the vendor's.
        builtins.filter_map(|file| unsafe { Library::new(file.path()) }.ok()).collect()
    });
}

/// What to look for, in this order.
pub(super) fn candidates() -> Vec<String> {
    match std::env::var(OVERRIDE) {
        Ok(path) if !path.is_empty() => vec![path],
        _ => NAMES.map(str::to_owned).to_vec(),
    }
}

/// The file that the loader would most likely take: found without loading it.
pub(super) fn library_file() -> Option<PathBuf> {
    let listed = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let usual =
        ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let folders: Vec<&str> = listed.split(':').filter(|folder| !folder.is_empty()).chain(usual).collect();
    candidates().iter().find_map(|name| {
        let given = PathBuf::from(name);
        if given.is_absolute() {
            return given.canonicalize().ok();
        }
        folders.iter().find_map(|folder| PathBuf::from(folder).join(name).canonicalize().ok())
    })
}
