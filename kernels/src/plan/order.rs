//! What comes after what.

use std::collections::HashMap;
use std::ops::Range;

use smallvec::SmallVec;

use super::Plan;
use crate::ops::{Op, TensorView};

/// The steps that one comes after, ascending: those that write what it reads, and those that read or write what it writes.
pub type After = SmallVec<[usize; 4]>;

/// A step's touch of some bytes.
struct Touch {
    step: usize,
    range: Range<usize>,
    write: bool,
}

/// The bytes of a view that matter for order: of a row write, the whole root, for the rest of it is as before.
fn reach(op: &dyn Op, view: &TensorView, write: bool) -> Range<usize> {
    if write && op.writes_rows() && op.reads().contains(&view) { 0..view.root().bytes } else { view.range() }
}

impl Plan {
    /// What each step comes after. Steps that are in order through others are not named again; a step that says neither what it reads
    /// nor what it writes comes after all before it, and before all after it.
    #[must_use]
    pub fn order(&self) -> Vec<After> {
        let mut touched: HashMap<(u32, u64), Vec<Touch>> = HashMap::new();
        let mut order: Vec<After> = Vec::with_capacity(self.ops.len());
        // The last step that all later ones come after, and the steps since.
        let mut barrier: Option<usize> = None;
        for (step, op) in self.ops.iter().enumerate() {
            let mut after = After::new();
            if op.is_barrier() {
                after.extend(barrier.map_or(0, |before| before)..step);
                // Order through others is order: only the last of each device.
                let mut last: SmallVec<[(u32, usize); 4]> = SmallVec::new();
                for before in after.drain(..) {
                    let device = self.devices[before].0;
                    match last.iter_mut().find(|(known, _)| *known == device) {
                        Some((_, at)) => *at = before,
                        None => last.push((device, before)),
                    }
                }
                after.extend(last.into_iter().map(|(_, before)| before));
                after.sort_unstable();
                touched.clear();
                barrier = Some(step);
                order.push(after);
                continue;
            }
            after.extend(barrier);
            let views = op.reads().into_iter().map(|view| (view, false));
            let views: Vec<_> = views.chain(op.writes().into_iter().map(|view| (view, true))).collect();
            for (view, write) in &views {
                let range = reach(&**op, view, *write);
                for touch in touched.get(&key(view)).into_iter().flatten() {
                    let apart = touch.range.end <= range.start || range.end <= touch.range.start;
                    if !apart && (*write || touch.write) {
                        after.push(touch.step);
                    }
                }
            }
            for (view, write) in &views {
                let range = reach(&**op, view, *write);
                let list = touched.entry(key(view)).or_default();
                if *write {
                    // Whoever comes after this comes after those.
                    list.retain(|touch| touch.range.start < range.start || range.end < touch.range.end);
                }
                list.push(Touch { step, range, write: *write });
            }
            after.sort_unstable();
            after.dedup();
            order.push(after);
        }
        order
    }
}

fn key(view: &TensorView) -> (u32, u64) {
    (view.root().device.0, view.root().ptr.0)
}
