#![allow(clippy::unwrap_used)]

use super::*;

fn rule(text: &str) -> Rule {
    text.parse().unwrap()
}

#[test]
fn layers_count_from_the_last_and_the_output_is_one_more() {
    let homes = |layers| {
        let placement = Placement { device_layers: layers, ..Placement::default() };
        (0..=4).map(|index| placement.block(index, 4) == Home::Device).collect::<Vec<_>>()
    };
    assert_eq!(homes(None), [true; 5]);
    assert_eq!(homes(Some(99)), [true; 5]);
    assert_eq!(homes(Some(5)), [true; 5]);
    assert_eq!(homes(Some(4)), [false, true, true, true, true]);
    assert_eq!(homes(Some(1)), [false, false, false, false, true]);
    assert_eq!(homes(Some(0)), [false; 5]);
}

#[test]
fn the_first_rule_that_fits_counts_and_a_host_block_keeps_all() {
    let rules =
        vec![rule(r"blk\.1\..*=CUDA0"), Rule { names: Names::ExpertsBelow(3), home: Home::Host }, rule("attn_q=CPU")];
    let placement = Placement { rules, ..Placement::default() };
    let home = |name| placement.matrix(name, Home::Device);
    assert_eq!(home("blk.0.ffn_gate_up_exps.weight"), Home::Host);
    assert_eq!(home("blk.1.ffn_gate_up_exps.weight"), Home::Device);
    assert_eq!(home("blk.2.ffn_down_exps.weight"), Home::Host);
    assert_eq!(home("blk.3.ffn_down_exps.weight"), Home::Device);
    assert_eq!(home("blk.7.attn_q.weight"), Home::Host);
    assert_eq!(home("output.weight"), Home::Device);
    assert_eq!(placement.matrix("blk.1.attn_q.weight", Home::Host), Home::Host);
}

#[test]
fn experts_are_told_by_their_names() {
    let all = Names::ExpertsBelow(usize::MAX);
    for name in [
        "ffn_up_exps.weight",
        "ffn_down_exps.weight",
        "ffn_gate_exps.weight",
        "ffn_gate_up_exps.weight",
        "ffn_up_chexps.weight",
    ] {
        assert!(all.contain(&format!("blk.17.{name}")), "{name}");
    }
    for name in [
        "blk.1.ffn_up.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.ffn_up_shexp.weight",
        "ffn_up_exps.weight",
        "blk.x.ffn_up_exps.weight",
    ] {
        assert!(!all.contain(name), "{name}");
    }
    // Scales of experts are vectors, and stay with the block.
    assert!(!all.contain("blk.1.ffn_down_exps.scale"));
}

#[test]
fn rules_that_make_no_sense_say_what_does() {
    for (text, word) in [("blk", "PATTERN=DEVICE"), ("blk=moon", "CUDA0"), ("(=CPU", "no pattern")] {
        let error = text.parse::<Rule>().unwrap_err();
        assert!(error.contains(word), "{text}: {error}");
    }
    // The last `=` is the one that counts.
    assert!(rule("a=b=CPU").names.contain("xa=by"));
}
