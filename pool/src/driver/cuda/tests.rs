#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use super::*;

#[test]
fn without_a_driver_opening_is_a_typed_error() {
    if is_present() {
        println!("skipped: there is a driver");
        return;
    }
    assert_eq!(device_count(), 0);
    let error = CudaDevice::open(0).unwrap_err();
    let DriverErrorKind::Other { name, .. } = &error.kind else { panic!("found {error:?}") };
    assert!(name.contains("libcuda"), "{error}");
    assert!(CudaDevice::open(u32::MAX).is_err());
}

/// A function that is called but not looked for at opening would panic on an older driver.
#[test]
fn every_driver_function_is_looked_for() {
    let sources = [
        include_str!("mod.rs"),
        include_str!("error.rs"),
        include_str!("flight.rs"),
        include_str!("graph.rs"),
        include_str!("interop.rs"),
        include_str!("memory.rs"),
        include_str!("module.rs"),
        include_str!("stream.rs"),
    ];
    let mut called = BTreeSet::new();
    for (at, _) in sources.iter().flat_map(|source| source.match_indices("cu").map(move |(at, _)| (&source[at..], ())))
    {
        let name: String = at.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if at[name.len()..].starts_with('(') && name[2..].starts_with(char::is_uppercase) {
            called.insert(name);
        }
    }
    let listed: BTreeSet<String> = REQUIRED.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(listed, called);
}
