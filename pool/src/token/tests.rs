#![allow(clippy::unwrap_used)]
use super::*;

#[test]
fn an_id_knows_its_pool() {
    let id = AllocationId::new(PoolId(513), 77);
    assert_eq!(id.pool(), PoolId(513));
    assert_eq!(id.to_string(), "513.77");
    assert_ne!(id, AllocationId::new(PoolId(514), 77));
}

#[test]
fn a_place_survives_the_round_trip() {
    for heap in 0..3 {
        for index in [0, 1, 77, (1 << 29) - 1] {
            assert_eq!(Place::block(heap, index).kind(), PlaceKind::Block { heap, index });
        }
    }
    assert_eq!(Place::outside(12).kind(), PlaceKind::Outside(12));
    assert_eq!(Place::NOWHERE.kind(), PlaceKind::Nowhere);
}
