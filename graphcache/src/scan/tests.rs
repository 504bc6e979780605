#![allow(clippy::unwrap_used)]

use evergraph_pool::driver::host::{HostConfig, HostDevice};

use super::*;

fn kernel(function: u64, threads: u32) -> NodeShape {
    NodeShape::Kernel { function: FunctionHandle(function), config: LaunchConfig::linear(1, threads), bytes: 16 }
}

fn shape(nodes: Vec<NodeShape>, edges: Vec<(u32, u32)>) -> Shape {
    Shape { nodes, edges }
}

#[test]
fn an_update_is_proven_by_handles_attributes_and_edges() {
    let old = shape(vec![kernel(1, 32), NodeShape::Set], vec![(0, 1)]);
    assert!(old.proves_update_to(&old.clone()));
    // Another handle, whatever its name.
    assert!(!old.proves_update_to(&shape(vec![kernel(2, 32), NodeShape::Set], vec![(0, 1)])));
    assert!(!old.proves_update_to(&shape(vec![kernel(1, 64), NodeShape::Set], vec![(0, 1)])));
    assert!(!old.proves_update_to(&shape(vec![kernel(1, 32), NodeShape::Set], vec![])));
    let unread = shape(vec![NodeShape::Unproven], vec![]);
    assert!(!unread.proves_update_to(&unread.clone()));
}

#[test]
fn a_programmatic_launch_is_not_a_plain_one() {
    let early = |programmatic| {
        let config = LaunchConfig { programmatic, ..LaunchConfig::linear(1, 32) };
        shape(vec![NodeShape::Kernel { function: FunctionHandle(1), config, bytes: 16 }], vec![])
    };
    assert!(early(true).proves_update_to(&early(true)));
    assert!(!early(true).proves_update_to(&early(false)));
}

#[test]
fn words_are_found_by_layout_and_without_one_as_packed_words() {
    let mut known = HandleMap::default();
    let function = FunctionHandle(7);
    let mut words =
        |layout: Option<&Arc<ParamLayout>>, bytes| Words::of(&mut known, function, layout, bytes).offsets.to_vec();
    // (two u32 side by side, pointer, 20-byte struct by value): the two numbers are no pointer.
    let layout = Arc::new(ParamLayout::c_layout(&[(4, 4), (4, 4), (8, 8), (20, 4)]));
    assert_eq!(words(Some(&layout), 36), [8, 16, 24]);
    // Parameters at odd offsets are found through the layout only.
    let odd = Arc::new(ParamLayout::c_layout(&[(4, 4), (8, 4)]));
    assert_eq!(words(Some(&odd), 12), [4]);
    assert_eq!(words(None, 12), [0]);
    // An equal layout is as good, another one is not: the handle may have come back.
    assert_eq!(words(Some(&Arc::new(ParamLayout::clone(&layout))), 36), [8, 16, 24]);
    assert_eq!(words(Some(&odd), 12), [4]);
}

#[test]
fn a_word_is_kept_once_and_only_where_somebody_may_be() {
    let driver: DynDriver = HostDevice::new(HostConfig::default().memory(1 << 20)).unwrap();
    let mut known = HandleMap::default();
    let mut scan = Scan::default();
    let mut walk =
        Walk { driver: &driver, known: &mut known, span: 0x1000..=0x3000, seen: HandleMap::default(), scan: &mut scan };
    for (node, address) in [0x2000, 0x1000, 0x2000, 0x3000, 0xfff, 0x3001].into_iter().enumerate() {
        walk.word(address, node as u32, What::Kernel);
    }
    walk.arguments(FunctionHandle(1), None, &[0xff; 7], 9);
    walk.arguments(FunctionHandle(2), None, &[0x20; 12], 9);
    let found: Vec<_> = scan.pointers.iter().map(|f| (f.address, f.node_name())).collect();
    let named = |node: u32| format!("node {node} (kernel)");
    assert_eq!(found, [(0x2000, named(0)), (0x1000, named(1)), (0x3000, named(3))]);
}
