use super::*;

fn devices(placement: &Placement, blocks: usize, devices: usize) -> Vec<usize> {
    (0..=blocks).map(|index| placement.device(index, blocks, devices)).collect()
}

/// The numbers are those of llama.cpp's loop: the first device whose part of the sum of shares lies behind
/// (block - first block) / (layers on devices).
#[test]
fn blocks_go_to_devices_as_in_llama_cpp() {
    let mut placement = Placement::default();
    assert_eq!(devices(&placement, 5, 1), [0; 6]);
    assert_eq!(devices(&placement, 5, 2), [0, 0, 0, 1, 1, 1]);
    assert_eq!(devices(&placement, 6, 3), [0, 0, 0, 1, 1, 2, 2]);
    placement.shares = vec![3.0, 1.0];
    assert_eq!(devices(&placement, 7, 2), [0, 0, 0, 0, 0, 0, 1, 1]);
    placement.shares = vec![0.0, 1.0];
    assert_eq!(devices(&placement, 3, 2), [1; 4]);
    placement.shares = vec![1.0];
    assert_eq!(devices(&placement, 3, 2), [0; 4]);
    placement.shares = vec![0.0, 0.0];
    assert_eq!(devices(&placement, 3, 2), [0, 0, 1, 1]);
    // Two of four blocks on the host: the other two and the output share the devices.
    placement = Placement { device_layers: Some(3), ..Placement::default() };
    assert_eq!(devices(&placement, 4, 2)[2..], [0, 0, 1]);
    // The output alone.
    placement.device_layers = Some(1);
    assert_eq!(placement.device(4, 4, 2), 0);
    placement.device_layers = Some(0);
    assert_eq!(placement.device(4, 4, 2), 0);
}

/// A cache that later blocks read is never on another device than they are, and blocks stay in order.
#[test]
fn blocks_are_where_the_cache_is_that_they_read() {
    let follows = (15..35).map(|block| (block, if block % 5 == 4 { 14 } else { 13 })).collect();
    let placement = Placement { follows, ..Placement::default() };
    for count in 2..=4 {
        let devices = devices(&placement, 35, count);
        assert!(devices[13..35].iter().all(|device| *device == devices[13]), "{devices:?}");
        assert!(devices.is_sorted(), "{devices:?}");
        assert!(devices[0] != devices[34], "{devices:?}");
    }
}

#[test]
fn experts_stay_by_device() {
    let placement = Placement { host_experts: vec![2, 1], ..Placement::default() };
    assert_eq!(devices(&placement, 7, 2), [0, 0, 0, 0, 1, 1, 1, 1]);
    let stay: Vec<bool> = (0..7).map(|index| placement.experts_stay(index, 7, 2)).collect();
    assert_eq!(stay, [true, true, false, false, true, false, false]);
}
