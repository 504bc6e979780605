//! The entries that a thread used last, found without a lock.
//!
//! A steady loop launches the same few graphs again and again. Looking each one up in the cache's map would cost more
//! than the check and the lease together: a lock, a hash table, a count of owners. So each thread keeps the entries that
//! it used last in a small table of its own. An entry that was evicted meanwhile says so itself, and the cache's map is
//! asked as for any other.

use std::cell::RefCell;
use std::sync::Arc;

use crate::Request;
use crate::entry::Entry;

/// A power of two. Entries whose keys fall into the same place take turns in it.
const PLACES: usize = 16;

#[derive(Debug)]
struct Near {
    cache: u64,
    entry: Arc<Entry>,
}

thread_local! {
    static NEAR: RefCell<[Option<Near>; PLACES]> = const { RefCell::new([const { None }; PLACES]) };
}

fn place(request: &Request<'_>) -> usize {
    let hash = request.key.hash() ^ request.stream.id().rotate_left(32);
    (hash ^ hash >> 32) as usize % PLACES
}

/// Calls `f` with this thread's entry for a request to the cache of that number, if it has one.
#[inline]
pub(crate) fn find<R>(cache: u64, request: &Request<'_>, f: impl FnOnce(&Entry) -> Option<R>) -> Option<R> {
    // A driver's launch never comes back in here, but `try_borrow` costs nothing and asks nobody to believe it.
    let look = |near: &RefCell<[Option<Near>; PLACES]>| {
        let near = near.try_borrow().ok()?;
        let Some(Near { cache: of, entry }) = &near[place(request)] else { return None };
        if *of == cache && entry.key.is_of(request) { f(entry) } else { None }
    };
    NEAR.try_with(look).ok().flatten()
}

/// Keeps an entry for the next time.
pub(crate) fn keep(cache: u64, request: &Request<'_>, entry: &Arc<Entry>) {
    let _ = NEAR.try_with(|near| {
        let old = near.try_borrow_mut().ok().and_then(|mut near| {
            let place = &mut near[place(request)];
            let same = place.as_ref().is_some_and(|near| near.cache == cache && Arc::ptr_eq(&near.entry, entry));
            if same { None } else { place.replace(Near { cache, entry: Arc::clone(entry) }) }
        });
        // Dropped outside the borrow: it may be the last owner.
        drop(old);
    });
}
