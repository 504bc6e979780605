//! Entries by key and by age.

use std::collections::HashMap;
use std::sync::Arc;

use crate::entry::Entry;
use crate::key::{FullKey, Mixer};

#[derive(Debug)]
struct Node {
    entry: Arc<Entry>,
    bytes: usize,
}

/// A map whose entries say themselves when they were last used, so that a use need not lock it. Only a walk by age
/// looks at all of them.
#[derive(Debug)]
pub(crate) struct Lru {
    map: HashMap<FullKey, Node, Mixer>,
    bytes: usize,
}

impl Lru {
    pub(crate) fn new() -> Self {
        Self { map: HashMap::with_hasher(Mixer::default()), bytes: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// What all entries keep, bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Finds an entry.
    pub(crate) fn get(&self, key: &FullKey) -> Option<&Arc<Entry>> {
        self.map.get(key).map(|node| &node.entry)
    }

    pub(crate) fn insert(&mut self, entry: Arc<Entry>) {
        if let Some(old) = self.map.insert(entry.key.clone(), Node { entry, bytes: 0 }) {
            self.bytes -= old.bytes;
        }
    }

    pub(crate) fn remove(&mut self, key: &FullKey) -> Option<Arc<Entry>> {
        let node = self.map.remove(key)?;
        self.bytes -= node.bytes;
        Some(node.entry)
    }

    /// Notes what an entry keeps, bytes.
    pub(crate) fn set_bytes(&mut self, key: &FullKey, bytes: usize) {
        if let Some(node) = self.map.get_mut(key) {
            let old = std::mem::replace(&mut node.bytes, bytes);
            self.bytes = self.bytes - old + bytes;
        }
    }

    /// Entries, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.map.values().map(|node| &node.entry)
    }

    /// The `count` entries that were not used for the longest time, oldest first.
    pub(crate) fn oldest(&self, count: usize) -> Vec<Arc<Entry>> {
        let mut list: Vec<_> = self.all().map(|entry| (entry.last_used(), entry)).collect();
        if list.len() > count && count > 0 {
            list.select_nth_unstable_by_key(count - 1, |(used, _)| *used);
            list.truncate(count);
        }
        list.sort_unstable_by_key(|(used, _)| *used);
        list.into_iter().map(|(_, entry)| Arc::clone(entry)).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use evergraph_pool::driver::DeviceOrdinal;

    use super::*;
    use crate::GraphKey;

    fn key(n: u32) -> FullKey {
        FullKey { key: GraphKey::new(n), device: DeviceOrdinal(0), stream: 1, modules: 0 }
    }

    #[test]
    fn age_is_the_order_of_use_and_the_bytes_add_up() {
        let mut lru = Lru::new();
        for n in 0..4 {
            lru.insert(Entry::new(key(n)));
            lru.set_bytes(&key(n), 10);
        }
        for (now, n) in [0, 1, 2, 3, 0, 2, 2].into_iter().enumerate() {
            lru.get(&key(n)).unwrap().note_use(now as u64 + 1);
        }
        let order = |lru: &Lru, count| lru.oldest(count).iter().map(|e| e.key.clone()).collect::<Vec<_>>();
        assert_eq!(order(&lru, 9), [key(1), key(3), key(0), key(2)]);
        assert_eq!(order(&lru, 2), [key(1), key(3)]);
        assert!(lru.remove(&key(3)).is_some() && lru.remove(&key(3)).is_none());
        lru.set_bytes(&key(1), 1);
        assert_eq!((lru.len(), lru.bytes()), (3, 21));
        for n in [1, 0, 2] {
            lru.remove(&key(n));
        }
        assert_eq!((lru.len(), lru.bytes(), lru.all().count()), (0, 0, 0));
        lru.insert(Entry::new(key(9)));
        assert_eq!(order(&lru, 1), [key(9)]);
    }
}
