#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn names_limit_and_other_words_are_complained_of() {
    for (name, limit) in NAMES {
        assert_eq!(Limit::named(name), Ok(limit));
    }
    let complaint = Limit::named("AVX9").unwrap_err();
    assert!(complaint.contains("EVERGRAPH_CPU is \"AVX9\"") && complaint.contains("avx512_vnni"), "{complaint}");
    assert_eq!(NAMES.map(|(_, limit)| limit.level() as u8), [0, 1, 2, 2, 2]);
}

#[test]
fn sets_in_use_are_those_of_the_machine() {
    let sets = InstructionSets::current();
    let floats = ["plain", "avx2", "avx512"];
    assert_eq!(floats[Level::current() as usize], sets.floats);
    assert_eq!(sets.integers == "avx512_vnni", Way::current() >= Way::Vnni, "{sets:?}");
    assert!(sets.integers == sets.integers_of_many || sets.integers_of_many == "amx_int8", "{sets:?}");
    assert_eq!(sets.no_amx.is_none(), sets.integers_of_many == "amx_int8", "{sets:?}");
}
