use super::*;

#[test]
fn weights_use_every_byte() {
    assert_eq!(WEIGHTS.iter().map(|(weight, _)| usize::from(*weight)).sum::<usize>(), 256);
}

#[test]
fn the_same_seed_gives_the_same_steps() {
    let steps = |seed| {
        let mut bytes = Seeded::new(seed);
        (0..500).map(|_| Op::decode(&mut bytes)).collect::<Vec<_>>()
    };
    assert_eq!(steps(7), steps(7));
    assert_ne!(steps(7), steps(8));
}

#[test]
fn a_prefix_of_bytes_is_a_prefix_of_steps() {
    let bytes: Vec<u8> = Seeded::new(3).take(400).collect();
    let decode = |bytes: &[u8]| {
        let mut bytes = bytes.iter().copied();
        std::iter::from_fn(|| Op::decode(&mut bytes)).collect::<Vec<_>>()
    };
    let (all, part) = (decode(&bytes), decode(&bytes[..200]));
    assert!(part.len() > 20 && part.len() < all.len());
    assert_eq!(part[..], all[..part.len()]);
}

#[test]
fn every_kind_of_step_comes() {
    let mut bytes = Seeded::new(1);
    let kinds: std::collections::HashSet<_> =
        (0..4000).filter_map(|_| Op::decode(&mut bytes)).map(|op| std::mem::discriminant(&op)).collect();
    assert_eq!(kinds.len(), WEIGHTS.len());
}
