#![allow(clippy::unwrap_used)]

use super::*;

fn words(list: &[&str]) -> Vec<String> {
    normalise(list.iter().map(OsString::from)).into_iter().map(|word| word.into_string().unwrap()).collect()
}

#[test]
fn llama_cpps_spellings_become_long_flags() {
    assert_eq!(
        words(&["x", "-ngl", "99", "-ctk=f16", "-n", "4"]),
        ["x", "--n-gpu-layers", "99", "--cache-type-k=f16", "-n", "4"]
    );
    assert_eq!(words(&["-p", "-ngl", "-fa", "on"]), ["-p", "-ngl", "--flash-attn", "on"], "a prompt is no flag");
    assert_eq!(words(&["--", "-ngl"]), ["--", "-ngl"]);
}

#[test]
fn sizes_are_read_as_people_write_them() {
    for (text, bytes) in [
        ("0", 0),
        ("512", 512),
        ("64KiB", 65_536),
        ("1.5 MiB", 1_572_864),
        ("2G", 2 << 30),
        ("10GB", 10_000_000_000),
        ("7.8GiB", 8_375_186_227),
        (" 3 tib ", 3 << 40),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
    for text in ["", "GiB", "-1", "1.2.3", "1XB", "1e9", "99999999999999999999", "20000000TiB", "99999999999.5TiB", "∞"]
    {
        assert!(parse_size(text).is_err(), "{text}");
    }
    assert_eq!(format_size(8_375_186_227), "7.8 GiB");
    assert_eq!(format_size(12), "12 B");
}

#[test]
fn the_grammar_is_sound() {
    Cli::command().debug_assert();
    argv::as_llama_reads(Cli::command()).debug_assert();
}

#[test]
fn a_device_is_chosen_or_named_as_missing() {
    use device::choose;
    assert!(choose(Some("host")).unwrap().is_host());
    for text in ["", "gpu", "cuda:", "cuda:x", "cuda0", "cuda:-1"] {
        assert_eq!(choose(Some(text)).unwrap_err().exit_status(), 2, "{text:?}");
    }
    if let Some(missing) = evergraph_pool::driver::cuda::survey().missing {
        let error = choose(Some("cuda:1")).unwrap_err();
        assert_eq!(error.exit_status(), 3);
        let (what, advice) = error.parts();
        assert!(what.contains("cuda:1") && what.contains(&missing.to_string()), "{error}");
        assert!(advice.is_some_and(|advice| advice.contains("driver") && advice.contains("--device host")), "{error}");
        assert!(choose(None).unwrap().is_host());
    }
}
