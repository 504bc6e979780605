//! The printable alphabet that byte-level vocabularies write bytes in (GPT-2's `bytes_to_unicode`): printable bytes of Latin-1
//! stand for themselves, the other 68 for U+0100 and on.

/// Whether a byte stands for itself.
const fn is_printable(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// The character of each byte.
const CHARS: [char; 256] = {
    let (mut chars, mut byte, mut next) = (['\0'; 256], 0usize, 0u8);
    while byte < 256 {
        chars[byte] = if is_printable(byte as u8) {
            byte as u8 as char
        } else {
            next += 1;
            // U+0100 and on: far from where no characters are.
            match char::from_u32(0xFF + next as u32) {
                Some(char) => char,
                None => '\0',
            }
        };
        byte += 1;
    }
    chars
};

/// Text as its bytes are written.
pub(super) fn written(text: &str) -> String {
    text.bytes().map(|byte| CHARS[usize::from(byte)]).collect()
}

/// The bytes that are written so. A character that stands for no byte stands for its own.
pub(super) fn read(written: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(written.len());
    for char in written.chars() {
        let byte = match u32::from(char) {
            code @ ..=255 if is_printable(code as u8) => Some(code as u8),
            0x100..=0x143 => CHARS.iter().position(|known| *known == char).map(|byte| byte as u8),
            _ => None,
        };
        match byte {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    bytes
}
