//! The driver's numbers as our errors.

use std::ffi::CStr;

use cudarc::driver::sys;

use crate::driver::{DeviceOrdinal, DevicePtr, DriverError, DriverErrorKind as Kind, DriverResult, Fault};

/// The name of a status. Only called once the library is known to be there.
fn name(status: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the symbol is in `REQUIRED` and was found before any call could fail; `text` is live.
    let found = unsafe { sys::cuGetErrorName(status, &raw mut text) };
    if found as u32 != 0 || text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the driver's own static, NUL-terminated string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What killed the context.
fn died_of(code: u32) -> &'static str {
    match code {
        700 | 721 => "illegal address",
        714 => "hardware stack error",
        715 => "illegal instruction",
        716 => "misaligned address",
        717 => "address of another space",
        718 => "invalid program counter",
        _ => "launch failure",
    }
}

/// What a status means.
fn kind(call: &str, code: u32, name: impl FnOnce() -> String) -> Kind {
    match code {
        1 => Kind::InvalidValue("refused by the driver"),
        2 => Kind::OutOfMemory,
        101 => Kind::InvalidValue("no such device"),
        200 => Kind::InvalidValue("not code for this device"),
        201 => Kind::InvalidContext,
        400 => Kind::InvalidHandle("refused by the driver"),
        401 if matches!(call, "begin_capture" | "end_capture") => Kind::CaptureState,
        500 => Kind::NotFound,
        // Illegal address, hardware stack, illegal instruction, misaligned address, address space, program counter,
        // launch failure, illegal address of a contained context: the context is lost.
        700 | 714..=719 | 721 => Kind::Fault(Fault {
            address: DevicePtr::NULL,
            bytes: 0,
            write: false,
            op: "unknown".to_owned(),
            owner: format!("{} ({})", died_of(code), name()),
        }),
        705 | 217 => Kind::PeerAccess,
        712 => Kind::InvalidValue("host memory that is registered already"),
        713 => Kind::InvalidValue("host memory that is not registered"),
        800 => Kind::NotSupported("driver calls from a host function"),
        801 => Kind::NotSupported("by this driver or device"),
        // Unsupported, merge, isolation, implicit.
        900 | 902 | 905 | 906 => Kind::CaptureUnsupported,
        901 => Kind::CaptureInvalidated,
        903 => Kind::CaptureState,
        904 => Kind::CaptureUnjoined,
        907 => Kind::CapturedEvent,
        908 => Kind::CaptureWrongThread,
        _ => Kind::Other { code, name: name() },
    }
}

/// A status as a result.
pub(super) fn check(call: &'static str, device: DeviceOrdinal, status: sys::CUresult) -> DriverResult<()> {
    match status as u32 {
        0 => Ok(()),
        code => Err(DriverError::new(call, device, kind(call, code, || name(status)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_keep_their_meaning() {
        let of = |code| kind("launch", code, || "NAME".to_owned());
        assert_eq!(of(2), Kind::OutOfMemory);
        assert_eq!(of(901), Kind::CaptureInvalidated);
        assert_eq!(of(904), Kind::CaptureUnjoined);
        assert_eq!(of(907), Kind::CapturedEvent);
        assert!(matches!(of(700), Kind::Fault(Fault { owner, .. }) if owner == "illegal address (NAME)"));
        assert_eq!(of(600), Kind::Other { code: 600, name: "NAME".to_owned() });
    }
}
