#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn lists_and_ranges_are_llama_benchs() {
    for (text, values) in [
        ("512", vec![512]),
        ("1,2,3", vec![1, 2, 3]),
        ("1, 2,", vec![1, 2]),
        ("3-6", vec![3, 4, 5, 6]),
        ("0-128+64", vec![0, 64, 128]),
        ("0-100+64", vec![0, 64]),
        ("1-100*2", vec![1, 2, 4, 8, 16, 32, 64]),
        ("5-5*2", vec![5]),
        ("7,10-30+10,1-4*2", vec![7, 10, 20, 30, 1, 2, 4]),
        ("-1", vec![-1]),
        ("-1-1", vec![-1, 0, 1]),
        ("9223372036854775806-9223372036854775807*2", vec![9_223_372_036_854_775_806]),
    ] {
        assert_eq!(parse(text).as_deref(), Ok(values.as_slice()), "{text}");
    }
}

#[test]
fn what_is_no_list_is_said() {
    for text in [
        "", ",", "1,,2", "x", "1-", "-", "--1", "1--2", "1-2-3", "1+2", "1-9+", "1-9*-2", "1e3", "1.5", "+1", "½",
        "1-9+1+1",
    ] {
        assert!(parse(text).unwrap_err().contains("is no number or range"), "{text:?}");
    }
    for text in ["99999999999999999999", "0-99999999999999999999"] {
        assert!(parse(text).is_err(), "{text}");
    }
    assert!(parse("9-1").unwrap_err().contains("smaller number first"));
    for text in ["0-64*2", "1-9+0", "3-9*1", "-4-4*2"] {
        assert!(parse(text).unwrap_err().contains("does not go on"), "{text}");
    }
    assert!(parse("0-2000000000").unwrap_err().contains("more than 1024"));
    assert!(parse("1-2000000000*2").is_ok());
}

proptest::proptest! {
    #[test]
    fn no_text_panics_and_what_is_read_is_in_bounds(text in "[-+*,0-9 ]{0,24}") {
        if let Ok(values) = parse(&text) {
            proptest::prop_assert!(!values.is_empty() && values.len() <= MOST);
        }
    }
}
