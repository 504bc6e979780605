//! Sources that come from other devices.

use std::ops::Range;
use std::sync::Arc;

use evergraph_pool::driver::DeviceOrdinal;

use super::{Land, PeerCopy, Plan};
use crate::KernelError;
use crate::ops::{Root, TensorView};
use crate::quant::QuantType;

/// Bytes of a root that came to another device.
#[derive(Debug)]
pub(super) struct Arrived {
    source: Arc<Root>,
    range: Range<usize>,
    /// Where they are now.
    root: Arc<Root>,
    /// The step that brought them.
    at: usize,
}

fn covers(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

impl Plan {
    /// A source as `device` reads it: what came there before, unless it was written since, or a copy that comes now. What one
    /// op wrote comes as a whole, so that all views of it are served at once.
    pub(super) fn bring<E: From<KernelError>>(
        &mut self,
        source: &TensorView,
        device: DeviceOrdinal,
        land: &mut Land<'_, E>,
    ) -> Result<TensorView, E> {
        let there = |arrived: &&Arrived| {
            arrived.source == *source.root()
                && arrived.root.device == device
                && covers(&arrived.range, &source.range())
                && self.last_write(source.root(), &arrived.range).is_none_or(|(write, _)| write < arrived.at)
        };
        if let Some(arrived) = self.arrived.iter().rev().find(there) {
            return Ok(source.moved_to(&arrived.root, arrived.range.start)?);
        }
        let range = match self.last_write(source.root(), &source.range()) {
            Some((_, Some(whole))) => whole,
            _ => source.range(),
        };
        let bytes = |root: &Arc<Root>, offset| TensorView::at(root, offset, QuantType::I8, &[range.len()]);
        let root = land(&source.root().name, range.len(), device)?;
        let copy = PeerCopy { src: bytes(source.root(), range.start)?, dst: bytes(&root, 0)? };
        let at = self.ops.len();
        self.push(copy)?;
        let view = source.moved_to(&root, range.start)?;
        self.arrived.push(Arrived { source: Arc::clone(source.root()), range, root, at });
        Ok(view)
    }

    /// The last op that writes any of these bytes, and, where it writes all of them without gaps and nothing else of what is
    /// kept from step to step, all that it writes there.
    fn last_write(&self, root: &Arc<Root>, range: &Range<usize>) -> Option<(usize, Option<Range<usize>>)> {
        self.ops.iter().enumerate().rev().find_map(|(index, op)| {
            let writes = op.writes().into_iter().filter(|view| view.root() == root);
            let touched = |view: &&TensorView| {
                let there = view.range();
                op.writes_rows() || there.start < range.end && range.start < there.end
            };
            let mut writes = writes.filter(touched);
            let first = writes.next()?;
            let whole = !op.writes_rows() && first.is_contiguous() && covers(&first.range(), range);
            Some((index, whole.then(|| first.range())))
        })
    }
}
