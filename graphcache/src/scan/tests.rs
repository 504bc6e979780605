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
fn words_are_found_by_layout_and_as_packed_words() {
    let layouts = Layouts::default();
    let function = FunctionHandle(7);
    // (u32, pointer, 20-byte struct by value): 0, 8, 16.
    let layout = Arc::new(ParamLayout::c_layout(&[(4, 4), (8, 8), (20, 4)]));
    assert_eq!(layouts.words(function, Some(&layout), 36).offsets, [0, 8, 16, 24]);
    // Parameters at odd offsets are found through the layout only.
    let odd = Arc::new(ParamLayout::c_layout(&[(4, 4), (8, 4)]));
    assert_eq!(layouts.words(function, Some(&odd), 12).offsets, [0, 4]);
    assert_eq!(layouts.words(function, None, 12).offsets, [0]);
    let again = layouts.words(function, None, 12);
    assert!(Arc::ptr_eq(&again, &layouts.words(function, None, 12)), "kept across nodes");
}

#[test]
fn short_arguments_have_no_words() {
    let mut scan = Scan::default();
    scan.word(&[0xff; 7], 0, 0);
    scan.word(&[0xff; 16], 9, 0);
    scan.word(&64u64.to_ne_bytes(), 0, 0);
    assert!(scan.pointers.is_empty());
    scan.word(&0x7f00_0000_0000u64.to_ne_bytes(), 0, 3);
    assert_eq!(scan.pointers[0].node_name(), "node 3 (kernel)");
}
