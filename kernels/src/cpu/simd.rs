//! Instruction sets and the dispatch between bodies compiled for them.

use std::sync::OnceLock;

use super::sets::Limit;

/// The widest instruction set that a body may use. One is chosen per process, so that results do not vary
/// from launch to launch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Level {
    /// What every machine of the target has.
    Plain = 0,
    /// AVX2, FMA and F16C.
    Avx2 = 1,
    /// AVX-512 F, BW, DQ and VL.
    Avx512 = 2,
}

impl Level {
    /// The levels that may be used here, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Plain, Self::Avx2, Self::Avx512].into_iter().filter(|&level| level <= Self::current()).collect()
    }

    /// The level in use: the widest of this machine, or what [`VARIABLE`](super::VARIABLE) says.
    #[must_use]
    pub fn current() -> Self {
        static CURRENT: OnceLock<Level> = OnceLock::new();
        *CURRENT.get_or_init(|| Self::widest().min(Limit::current().level()))
    }

    #[cfg(target_arch = "x86_64")]
    fn widest() -> Self {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx2 = avx2 && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        let avx512 = avx512 && is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) => Self::Avx512,
            (true, false) => Self::Avx2,
            _ => Self::Plain,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn widest() -> Self {
        Self::Plain
    }
}

/// Makes a function that runs `$body`, compiled once per level. `$body` is an `#[inline(always)]` function whose
/// first generic argument is the level as a number.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::cpu::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body::<1>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body::<2>($($arg),*)
                }
                // A `Level` above plain comes from `Level::current` or `Level::available` only.
                #[allow(unsafe_code)]
                match level {
                    // SAFETY: the features were found at run time.
                    $crate::cpu::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: the features were found at run time.
                    $crate::cpu::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::simd::Level::Plain => {}
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = level;
            $body::<0>($($arg),*)
        }
    };
}
pub(crate) use per_level;

/// `a * b + c`, fused where that is one instruction.
#[inline(always)]
pub(crate) fn fma<const L: u8>(a: f32, b: f32, c: f32) -> f32 {
    if L > 0 { a.mul_add(b, c) } else { a * b + c }
}
