//! Entries by key and by age.

use std::collections::HashMap;
use std::sync::Arc;

use slab::Slab;

use crate::entry::Entry;
use crate::key::{FullKey, Mixer};

const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Node {
    entry: Arc<Entry>,
    bytes: usize,
    newer: usize,
    older: usize,
}

/// A map with a list through it, newest first. Everything but a walk from the old end is O(1).
#[derive(Debug)]
pub(crate) struct Lru {
    map: HashMap<FullKey, usize, Mixer>,
    nodes: Slab<Node>,
    newest: usize,
    oldest: usize,
    bytes: usize,
}

impl Lru {
    pub(crate) fn new() -> Self {
        Self { map: HashMap::with_hasher(Mixer::default()), nodes: Slab::new(), newest: NONE, oldest: NONE, bytes: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// What all entries keep, bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Finds an entry and makes it the newest.
    pub(crate) fn touch(&mut self, key: &FullKey) -> Option<&Arc<Entry>> {
        let index = *self.map.get(key)?;
        if self.newest != index {
            self.unlink(index);
            self.link(index);
        }
        Some(&self.nodes[index].entry)
    }

    /// Finds an entry.
    pub(crate) fn get(&self, key: &FullKey) -> Option<&Arc<Entry>> {
        Some(&self.nodes[*self.map.get(key)?].entry)
    }

    pub(crate) fn insert(&mut self, entry: Arc<Entry>) {
        let key = entry.key.clone();
        let index = self.nodes.insert(Node { entry, bytes: 0, newer: NONE, older: NONE });
        self.link(index);
        if let Some(old) = self.map.insert(key, index) {
            self.take(old);
        }
    }

    pub(crate) fn remove(&mut self, key: &FullKey) -> Option<Arc<Entry>> {
        let index = self.map.remove(key)?;
        Some(self.take(index))
    }

    /// Notes what an entry keeps, bytes.
    pub(crate) fn set_bytes(&mut self, key: &FullKey, bytes: usize) {
        if let Some(&index) = self.map.get(key) {
            let old = std::mem::replace(&mut self.nodes[index].bytes, bytes);
            self.bytes = self.bytes - old + bytes;
        }
    }

    /// Entries, oldest first.
    pub(crate) fn oldest(&self) -> impl Iterator<Item = &Arc<Entry>> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let node = self.nodes.get(next)?;
            next = node.newer;
            Some(&node.entry)
        })
    }

    fn take(&mut self, index: usize) -> Arc<Entry> {
        self.unlink(index);
        let node = self.nodes.remove(index);
        self.bytes -= node.bytes;
        node.entry
    }

    fn link(&mut self, index: usize) {
        let old = std::mem::replace(&mut self.newest, index);
        self.nodes[index].older = old;
        self.nodes[index].newer = NONE;
        match self.nodes.get_mut(old) {
            Some(node) => node.newer = index,
            None => self.oldest = index,
        }
    }

    fn unlink(&mut self, index: usize) {
        let (newer, older) = (self.nodes[index].newer, self.nodes[index].older);
        match self.nodes.get_mut(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use evergraph_pool::driver::DeviceOrdinal;

    use super::*;
    use crate::GraphKey;

    fn key(n: u32) -> FullKey {
        FullKey { key: GraphKey::new(n), device: DeviceOrdinal(0), stream: 1, modules: 0 }
    }

    #[test]
    fn the_list_is_in_order_of_use_and_the_bytes_add_up() {
        let mut lru = Lru::new();
        for n in 0..4 {
            lru.insert(Entry::new(key(n)));
            lru.set_bytes(&key(n), 10);
        }
        lru.touch(&key(0));
        lru.touch(&key(2));
        lru.touch(&key(2));
        let order = |lru: &Lru| lru.oldest().map(|e| e.key.clone()).collect::<Vec<_>>();
        assert_eq!(order(&lru), [key(1), key(3), key(0), key(2)]);
        assert!(lru.remove(&key(3)).is_some() && lru.remove(&key(3)).is_none());
        lru.set_bytes(&key(1), 1);
        assert_eq!((lru.len(), lru.bytes()), (3, 21));
        for n in [1, 0, 2] {
            lru.remove(&key(n));
        }
        assert_eq!((lru.len(), lru.bytes(), lru.oldest().count()), (0, 0, 0));
        lru.insert(Entry::new(key(9)));
        assert_eq!(order(&lru), [key(9)]);
    }
}
