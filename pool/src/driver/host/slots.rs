//! Handle tables that give a destroyed object's handle to the next object at once, as drivers do.

/// Live objects by handle. Handles of different tables differ, so a handle of the wrong kind is not live.
#[derive(Debug)]
pub(super) struct Slots<T> {
    base: u64,
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

/// Distance between two handles: they look like the pointers they are elsewhere.
const STRIDE: u64 = 0x40;

impl<T> Slots<T> {
    pub(super) fn new(kind: u64) -> Self {
        Self { base: kind << 32, items: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, item: T) -> u64 {
        let reused = if crate::mutant::is("host.fresh-handles") { None } else { self.free.pop() };
        let index = reused.unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() - 1
        });
        self.items[index] = Some(item);
        self.base + index as u64 * STRIDE
    }

    fn index(&self, handle: u64) -> Option<usize> {
        let offset = handle.checked_sub(self.base)?;
        (offset % STRIDE == 0).then_some((offset / STRIDE) as usize)
    }

    pub(super) fn get(&self, handle: u64) -> Option<&T> {
        self.items.get(self.index(handle)?)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let index = self.index(handle)?;
        self.items.get_mut(index)?.as_mut()
    }

    pub(super) fn remove(&mut self, handle: u64) -> Option<T> {
        let index = self.index(handle)?;
        let item = self.items.get_mut(index)?.take()?;
        self.free.push(index);
        Some(item)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.items
            .iter()
            .enumerate()
            .filter_map(|(index, item)| Some((self.base + index as u64 * STRIDE, item.as_ref()?)))
    }
}
