#![allow(clippy::unwrap_used)]

use super::tables;
use crate::cuda::header;

/// The numbers of an array in a CUDA header.
fn array(text: &str, name: &str) -> Vec<u16> {
    let (_, rest) = text.split_once(&format!("{name}[")).unwrap();
    let (_, rest) = rest.split_once('{').unwrap();
    let (list, _) = rest.split_once('}').unwrap();
    let words = list.split(',').map(str::trim).filter(|word| !word.is_empty());
    words.map(|word| u16::from_str_radix(word.strip_prefix("0x").unwrap(), 16).unwrap()).collect()
}

#[test]
fn both_bodies_have_the_same_grids() {
    let text = header("grids.cuh").unwrap();
    assert_eq!(array(text, "GRID_IQ2_XXS"), tables::GRID_IQ2_XXS);
    assert_eq!(array(text, "GRID_IQ2_XS"), tables::GRID_IQ2_XS);
    assert_eq!(array(text, "GRID_IQ2_S"), tables::GRID_IQ2_S);
    assert_eq!(array(text, "GRID_IQ3_XXS"), tables::GRID_IQ3_XXS);
    assert_eq!(array(text, "GRID_IQ3_S"), tables::GRID_IQ3_S);
}

#[test]
fn entries_name_magnitudes_that_are_there() {
    for entry in tables::GRID_IQ2_XXS.iter().chain(&tables::GRID_IQ2_XS).chain(&tables::GRID_IQ2_S) {
        assert!((0..8).all(|place| entry >> (2 * place) & 3 < 3), "{entry:#x}");
    }
    for entry in tables::GRID_IQ3_XXS.iter().chain(&tables::GRID_IQ3_S) {
        assert!((0..4).all(|place| entry >> (4 * place) & 15 < 8), "{entry:#x}");
    }
}
