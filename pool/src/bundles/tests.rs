use super::*;

fn laid(spare: &[u64], stretches: &[Stretch]) -> (u64, Vec<u64>, Vec<u64>) {
    let mut spare = spare.to_vec();
    let laid = lay(&mut spare, stretches, 2);
    (laid.lack_bytes, laid.misfits, spare)
}

#[test]
fn the_largest_chunk_that_fits_goes_first() {
    assert_eq!(laid(&[2, 32, 2, 4], &[(0..20, true)]), (0, vec![], vec![]));
    assert_eq!(laid(&[2, 32, 8], &[(0..20, true)]), (0, vec![], vec![2]));
    assert_eq!(laid(&[32], &[(0..3, true), (5..25, true)]), (14, vec![], vec![]));
    assert_eq!(laid(&[], &[]), (0, vec![], vec![]));
}

#[test]
fn a_chunk_too_large_for_every_gap_goes_back_in_place_of_new_ones() {
    assert_eq!(laid(&[32, 16, 64], &[(0..5, true)]), (10, vec![16], vec![32, 64]), "just enough");
    assert_eq!(laid(&[16, 32], &[(0..5, true), (9..14, true)]), (20, vec![16, 32], vec![]));
    assert_eq!(laid(&[4, 2], &[(0..1, true)]), (0, vec![], vec![4]), "nothing is made, so nothing goes");
    // Where no bundle may lie.
    assert_eq!(laid(&[8, 2], &[(0..4, false)]), (6, vec![8], vec![]));
}
