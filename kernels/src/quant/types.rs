//! The element types of GGUF tensors.

use std::fmt;

use crate::KernelError;

macro_rules! types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $block:literal, $bytes:literal, $supported:literal;)*) => {
        /// Element type of a tensor, with its number in GGUF files. Some are known by name and size only:
        /// [`supported`](Self::supported) tells.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[allow(non_camel_case_types)]
        #[repr(u32)]
        #[non_exhaustive]
        pub enum QuantType {
            $($(#[$doc])* $name = $id,)*
        }

        impl QuantType {
            /// Every known type.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The type with this number in GGUF files.
            #[must_use]
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its name in GGUF tools.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Elements in a block.
            #[must_use]
            pub const fn block_size(self) -> usize {
                match self {
                    $(Self::$name => $block,)*
                }
            }

            /// Bytes of a block.
            #[must_use]
            pub const fn type_bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }

            /// Whether there is code that turns it into `f32`.
            #[must_use]
            pub const fn supported(self) -> bool {
                match self {
                    $(Self::$name => $supported,)*
                }
            }
        }
    };
}

types! {
    /// 32-bit float.
    F32 = 0, 1, 4, true;
    /// IEEE half.
    F16 = 1, 1, 2, true;
    /// 4 bits, one scale for 32.
    Q4_0 = 2, 32, 18, true;
    /// 4 bits, scale and minimum for 32.
    Q4_1 = 3, 32, 20, true;
    /// 5 bits, one scale for 32.
    Q5_0 = 6, 32, 22, true;
    /// 5 bits, scale and minimum for 32.
    Q5_1 = 7, 32, 24, true;
    /// 8 bits, one scale for 32.
    Q8_0 = 8, 32, 34, true;
    /// 2 bits in blocks of 256.
    Q2_K = 10, 256, 84, true;
    /// 3 bits in blocks of 256.
    Q3_K = 11, 256, 110, true;
    /// 4 bits in blocks of 256.
    Q4_K = 12, 256, 144, true;
    /// 5 bits in blocks of 256.
    Q5_K = 13, 256, 176, true;
    /// 6 bits in blocks of 256.
    Q6_K = 14, 256, 210, true;
    /// 8 bits in blocks of 256, for activations.
    Q8_K = 15, 256, 292, true;
    /// 2.1 bits and grids of eight magnitudes, in blocks of 256.
    IQ2_XXS = 16, 256, 66, true;
    /// 2.3 bits and grids of eight magnitudes, in blocks of 256.
    IQ2_XS = 17, 256, 74, true;
    /// 3.1 bits and grids of four magnitudes, in blocks of 256.
    IQ3_XXS = 18, 256, 98, true;
    /// Grid codebook.
    IQ1_S = 19, 256, 50, false;
    /// 4 bits through a codebook of 16, one scale for 32.
    IQ4_NL = 20, 32, 18, true;
    /// 3.4 bits and grids of four magnitudes, in blocks of 256.
    IQ3_S = 21, 256, 110, true;
    /// 2.6 bits and grids of eight magnitudes, in blocks of 256.
    IQ2_S = 22, 256, 82, true;
    /// 4 bits through a codebook of 16, in blocks of 256.
    IQ4_XS = 23, 256, 136, true;
    /// 8-bit integer.
    I8 = 24, 1, 1, false;
    /// 16-bit integer.
    I16 = 25, 1, 2, false;
    /// 32-bit integer.
    I32 = 26, 1, 4, false;
    /// 64-bit integer.
    I64 = 27, 1, 8, false;
    /// 64-bit float.
    F64 = 28, 1, 8, false;
    /// Grid codebook.
    IQ1_M = 29, 256, 56, false;
    /// The upper half of a 32-bit float.
    BF16 = 30, 1, 2, true;
    /// Ternary.
    TQ1_0 = 34, 256, 54, false;
    /// Ternary.
    TQ2_0 = 35, 256, 66, false;
    /// 4-bit floats (E2M1), one power of two for 32.
    MXFP4 = 39, 32, 17, true;
}

impl QuantType {
    /// Its number in GGUF files.
    #[must_use]
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type of this name, upper or lower case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of a row of `cols` elements; an error if that is no whole number of blocks.
    ///
    /// # Errors
    /// [`KernelError::BlockSize`].
    pub fn row_bytes(self, cols: usize) -> Result<usize, KernelError> {
        if cols.is_multiple_of(self.block_size())
            && let Some(bytes) = (cols / self.block_size()).checked_mul(self.type_bytes())
        {
            return Ok(bytes);
        }
        Err(self.block_error("columns", cols))
    }

    /// Alignment that its elements need, bytes. Blocks are read byte by byte.
    #[must_use]
    pub const fn align_bytes(self) -> usize {
        if self.block_size() == 1 { self.type_bytes() } else { 1 }
    }

    /// The error for a length that does not fit.
    pub(crate) fn block_error(self, what: &'static str, found: usize) -> KernelError {
        KernelError::BlockSize { what, found, ty: self, block_size: self.block_size(), type_bytes: self.type_bytes() }
    }
}

impl fmt::Display for QuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
