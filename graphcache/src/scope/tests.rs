#![allow(clippy::unwrap_used)]

use evergraph_pool::driver::host::{HostConfig, HostDevice};
use evergraph_pool::{Bad, PoolConfig};

use super::*;
use crate::GraphKey;

/// Pages can be lost under a buffer that its owner still has. Capturing again would read whatever the new pages hold.
#[test]
fn lost_state_is_refused_until_somebody_says_that_it_was_filled() {
    let driver: DynDriver = HostDevice::new(HostConfig::default()).unwrap();
    let pool = Pool::new(driver.clone(), PoolConfig::vmm()).unwrap();
    driver.bind().unwrap();
    let stream = Stream::new(&driver).unwrap();
    let (state, scratch) = (pool.alloc::<u8>(64, &stream).unwrap(), pool.alloc::<u8>(64, &stream).unwrap());
    let key = GraphKey::new(1);
    let request = Request::new(&key, &pool, &stream);
    let bad = |slice: &DeviceSlice<u8>, use_| Bad {
        index: 0,
        dependency: Dependency { token: slice.token(), use_, offset_bytes: 0, bytes: 64, hold: Hold::Weak },
        reason: BadReason::ContentLost,
    };
    let mut lost = Lost::default();
    let found = Stale {
        pool: pool.id(),
        evicted: false,
        asleep: None,
        bad: vec![bad(&state, Use::State), bad(&scratch, Use::Scratch)],
    };
    lost.note(std::slice::from_ref(&found));
    lost.note(&[found]);
    let notes = Notes::default();
    {
        let scope = Scope::new(&request, &[], &notes, Hold::Weak, &lost);
        for use_ in [Use::Input, Use::State, Use::Weight] {
            let error = scope.declare(&state, use_).unwrap_err();
            assert!(matches!(&error, CacheError::ContentLost(stale) if stale.bad.len() == 1), "{error}");
        }
        // What is written before it is read may lose its bytes.
        scope.declare(&state, Use::Scratch).unwrap();
        scope.declare(&scratch, Use::Input).unwrap();
    }
    lost.clear();
    Scope::new(&request, &[], &notes, Hold::Weak, &lost).declare(&state, Use::State).unwrap();
}
