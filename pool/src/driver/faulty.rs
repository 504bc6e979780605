//! An adaptor that fails the n-th call of a kind and logs every call.

/// Wraps a driver.
#[derive(Debug)]
pub struct Faulty<D>(D);
