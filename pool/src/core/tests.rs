#![allow(clippy::unwrap_used)]
//! Stories of bugs that allocators had, told to the core alone.

mod machine;
mod measure;

use super::*;

const A: StreamKey = StreamKey(0);
const B: StreamKey = StreamKey(1);
const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7f00_0000_0000;

fn slab_heap(bytes: u64) -> Heap {
    let mut heap = Heap::new(HeapConfig::SLAB);
    heap.add_segment(BASE, bytes).unwrap();
    heap
}

fn vmm_heap(bytes: u64, chunk_bytes: u64) -> Heap {
    let mut heap = Heap::new(HeapConfig::VMM);
    heap.reserve_segment(BASE, bytes, chunk_bytes).unwrap();
    heap
}

/// What the runtime does: hand out, or map the fewest chunks and hand out.
fn alloc(heap: &mut Heap, bytes: u64, stream: StreamKey) -> BlockKey {
    let request = heap.request(bytes, 0).unwrap();
    if let Some(block) = heap.alloc(&request, stream) {
        return block;
    }
    let growth = heap.plan_growth(&request, stream).unwrap();
    for chunks in growth.chunks {
        heap.back(growth.segment, chunks).unwrap();
    }
    heap.alloc(&request, stream).unwrap()
}

fn free(heap: &mut Heap, block: BlockKey, stream: StreamKey, now: u64) {
    heap.free(block, Uses::one(stream), Stamp(now)).unwrap();
    heap.check().unwrap();
}

#[test]
fn a_just_freed_block_comes_back_to_its_stream_at_once_and_to_no_other() {
    let mut heap = slab_heap(2 * MIB);
    let block = alloc(&mut heap, 1000, A);
    let span = heap.span(block).unwrap();
    free(&mut heap, block, A, 1);
    let request = heap.request(1000, 0).unwrap();
    let other = heap.alloc(&request, B).map(|b| heap.span(b).unwrap());
    assert_ne!(other, Some(span), "stream B was handed what A may still write");
    let again = heap.alloc(&request, A).unwrap();
    assert_eq!(heap.span(again).unwrap(), span);
    heap.check().unwrap();
}
