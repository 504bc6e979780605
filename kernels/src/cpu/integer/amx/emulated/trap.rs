//! Where the processor has no tiles, their instructions are invalid ones, and Linux tells the process so. Here they are
//! decoded and done by the [`Machine`], so that the very bytes that the assembler made are tried on any machine.

use std::sync::OnceLock;

use super::{MACHINE, Machine};

/// Lets invalid instructions of this process be looked at, unless the processor knows those of tiles. Returns whether they
/// are.
pub(in crate::cpu) fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = invalid;
        // SAFETY: all zeros is a valid value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the handler touches nothing but its arguments and this thread's machine, which no instruction of tiles has
        // in use, and what the instruction names.
        unsafe { libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) == 0 }
    })
}

/// An instruction of tiles, with the operands of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Instruction {
    Configure(Address),
    Release,
    Load(usize, Address),
    Store(usize, Address),
    Zero(usize),
    Multiply(usize, usize, usize),
}

/// Base register, index register with its factor, constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Address {
    base: usize,
    index: Option<(usize, usize)>,
    constant: i32,
}

/// Bytes of the longest of these instructions, and of a page.
const MOST: usize = 10;
const PAGE: usize = 4096;

/// Registers by their numbers in instructions.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Decodes one instruction, and says how long it is. None for all others, and for forms that the assembler does not make of
/// ours. Intel's manual, volume 2: VEX prefixes in section 2.3, opcodes with the instructions.
fn decode(b: &[u8]) -> Option<(Instruction, usize)> {
    let &[0xC4, second, third, opcode, modrm, ref rest @ ..] = b else { return None };
    // Bits of registers' numbers are stored inverted. Map 0F38, W 0, 128 bits.
    let (r, x, base_bit) = (!second >> 7 & 1, !second >> 6 & 1, !second >> 5 & 1);
    if second & 0x1F != 2 || third & 0x84 != 0 || r != 0 {
        return None;
    }
    let (third_operand, prefix) = (usize::from(!third >> 3 & 15), third & 3);
    let (kind, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), modrm & 7);
    const NONE: u8 = 0;
    const P66: u8 = 1;
    const F3: u8 = 2;
    const F2: u8 = 3;
    if kind == 3 {
        let instruction = match (prefix, opcode, modrm) {
            (NONE, 0x49, 0xC0) if third_operand == 0 => Instruction::Release,
            (F2, 0x49, _) if rm == 0 && third_operand == 0 => Instruction::Zero(reg),
            (P66, 0x5E, _) if third_operand < 8 => Instruction::Multiply(reg, usize::from(rm), third_operand),
            _ => return None,
        };
        return Some((instruction, 5));
    }
    let (base, index, rest, mut len) = match (rm, rest) {
        (4, &[sib, ref rest @ ..]) => {
            let index = usize::from(sib >> 3 & 7 | x << 3);
            (usize::from(sib & 7 | base_bit << 3), (index != 4).then_some((index, 1 << (sib >> 6))), rest, 6)
        }
        _ => (usize::from(rm | base_bit << 3), None, rest, 5),
    };
    let constant = match (kind, rest) {
        (0, _) if base & 7 != 5 => 0,
        (1, &[constant, ..]) => {
            len += 1;
            i32::from(constant as i8)
        }
        (2, &[a, b, c, d, ..]) => {
            len += 4;
            i32::from_le_bytes([a, b, c, d])
        }
        _ => return None,
    };
    let address = Address { base, index, constant };
    let instruction = match (prefix, opcode) {
        (NONE, 0x49) if reg == 0 && third_operand == 0 => Instruction::Configure(address),
        // These have the byte of index and base always.
        (F2, 0x4B) if rm == 4 && third_operand == 0 => Instruction::Load(reg, address),
        (F3, 0x4B) if rm == 4 && third_operand == 0 => Instruction::Store(reg, address),
        _ => return None,
    };
    Some((instruction, len))
}

impl Machine {
    /// # Safety
    /// The instruction's memory is there.
    unsafe fn step(&mut self, instruction: Instruction, register: impl Fn(usize) -> usize) {
        let start = |a: Address| register(a.base).wrapping_add_signed(a.constant as isize);
        let stride = |a: Address| a.index.map_or(0, |(index, factor)| register(index) * factor);
        match instruction {
            // SAFETY: by the caller.
            Instruction::Configure(a) => self.configure(unsafe { &*(start(a) as *const [u8; 64]) }),
            Instruction::Release => *self = Self::new(),
            // SAFETY: by the caller.
            Instruction::Load(tile, a) => unsafe { self.load(tile, start(a) as *const u8, stride(a)) },
            // SAFETY: by the caller.
            Instruction::Store(tile, a) => unsafe { self.store(tile, start(a) as *mut u8, stride(a)) },
            Instruction::Zero(tile) => self.zero(tile),
            Instruction::Multiply(c, a, b) => self.multiply(c, a, b),
        }
    }
}

extern "C" fn invalid(signal: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: Linux gives the registers of the thread as they were.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let rip = registers[libc::REG_RIP as usize] as usize;
    // What is left of its page; all of an instruction's most bytes only where it goes on in the next.
    let bytes = |len: usize| {
        // SAFETY: the instruction was fetched from there.
        unsafe { std::slice::from_raw_parts(rip as *const u8, len) }
    };
    match decode(bytes(MOST.min(PAGE - rip % PAGE))).or_else(|| decode(bytes(MOST))) {
        Some((instruction, len)) => {
            let register = |number: usize| registers[REGISTERS[number] as usize] as usize;
            // SAFETY: the processor would touch the same bytes.
            MACHINE.with_borrow_mut(|machine| unsafe { machine.step(instruction, register) });
            registers[libc::REG_RIP as usize] += len as i64;
        }
        // Another one: it comes again, and the process ends.
        // SAFETY: the default is what it was.
        None => unsafe {
            libc::signal(signal, libc::SIG_DFL);
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as GNU as makes them.
    #[test]
    fn instructions_are_decoded() {
        let at = |base, index, constant| Address { base, index, constant };
        let cases: [(&[u8], Instruction); 8] = [
            (&[0xC4, 0xE2, 0x78, 0x49, 0x00], Instruction::Configure(at(0, None, 0))),
            (&[0xC4, 0xE2, 0x78, 0x49, 0xC0], Instruction::Release),
            (&[0xC4, 0xE2, 0x7B, 0x49, 0xC8], Instruction::Zero(1)),
            (&[0xC4, 0xE2, 0x7B, 0x4B, 0x24, 0x90], Instruction::Load(4, at(0, Some((2, 4)), 0))),
            (&[0xC4, 0xE2, 0x7B, 0x4B, 0x04, 0x21], Instruction::Load(0, at(1, None, 0))),
            (&[0xC4, 0xA2, 0x7B, 0x4B, 0x6C, 0x15, 0x00], Instruction::Load(5, at(5, Some((10, 1)), 0))),
            (&[0xC4, 0xC2, 0x7A, 0x4B, 0x8C, 0x17, 0, 4, 0, 0], Instruction::Store(1, at(15, Some((2, 1)), 1024))),
            (&[0xC4, 0xE2, 0x51, 0x5E, 0xC4], Instruction::Multiply(0, 4, 5)),
        ];
        for (bytes, want) in cases {
            assert_eq!(decode(&[bytes, &[0x90; 5]].concat()), Some((want, bytes.len())), "{bytes:02x?}");
        }
        assert_eq!(decode(&[0x0F, 0x0B, 0, 0, 0, 0, 0, 0, 0, 0]), None, "ud2");
    }
}
