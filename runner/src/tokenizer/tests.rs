#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::gguf::{Bytes, Writer};

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn tiny() -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::open(&data("gemma3.gguf")).unwrap()).unwrap()
}

fn tiny_pairs() -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::open(&data("gemma4-moe.gguf")).unwrap()).unwrap()
}

/// Checks every text of one vocabulary of the reference file; returns how many there were.
fn check_all(tokenizer: &Tokenizer, vocab: &str) -> usize {
    let reference: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(data("tokenizer.json")).unwrap()).unwrap();
    let vocabs = reference["vocabs"].as_array().unwrap();
    let cases = vocabs.iter().find(|entry| entry["vocab"] == vocab).unwrap()["cases"].as_array().unwrap();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
        let how = |add_special, parse_special| Encode { add_special, parse_special };
        assert_eq!(tokenizer.encode(text, how(false, true)).unwrap(), ids("ids"), "{text:?}");
        assert_eq!(tokenizer.encode(text, how(true, true)).unwrap(), ids("ids_with_bos"), "{text:?} with bos");
        assert_eq!(tokenizer.encode(text, how(false, false)).unwrap(), ids("ids_no_special"), "{text:?} plain");
        // U+2581 itself reads back as a space, but for bytes: the vocabulary can not tell them apart.
        let back = if tokenizer.bytes { text.to_owned() } else { text.replace('\u{2581}', " ") };
        assert_eq!(tokenizer.decode(&ids("ids"), true).unwrap(), back, "{text:?} back");
    }
    cases.len()
}

#[test]
fn the_tiny_vocabulary_gives_llama_cpps_ids() {
    assert_eq!(check_all(&tiny(), "gemma3 (tiny)"), 55);
}

#[test]
fn the_tiny_vocabulary_of_pairs_gives_llama_cpps_ids() {
    assert_eq!(check_all(&tiny_pairs(), "gemma4-moe (tiny)"), 55);
}

#[test]
fn the_tiny_vocabularies_of_bytes_give_llama_cpps_ids() {
    for name in ["deepseek-v3", "deepseek-v2-lite"] {
        let file = Gguf::open(&data(&format!("{name}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_gguf(&file).unwrap();
        assert_eq!(check_all(&tokenizer, &format!("{name} (tiny)")), 55);
    }
}

#[test]
fn the_real_vocabularies_of_bytes_give_llama_cpps_ids() {
    for name in ["deepseek-llm", "deepseek-coder"] {
        let Some(path) = crate::models::find_file(&format!("ggml-vocab-{name}.gguf")) else {
            eprintln!("skipped: no vocabulary of {name} (ggml-vocab-{name}.gguf, among llama.cpp's models)");
            continue;
        };
        let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
        assert_eq!(check_all(&tokenizer, name), 55);
    }
}

#[test]
fn bytes_are_written_in_an_alphabet_and_read_back() {
    let all: Vec<String> = (0..=255u8).map(|byte| alphabet::written(&char::from(byte).to_string())).collect();
    assert_eq!(alphabet::written(" a\n\u{7F}~¡"), "\u{120}a\u{10A}\u{121}~\u{C2}\u{A1}");
    for (byte, written) in all.iter().enumerate() {
        assert_eq!(alphabet::read(written), char::from(byte as u8).to_string().as_bytes());
    }
    // What stands for no byte stays what it is.
    assert_eq!(alphabet::read("\u{144}一"), "\u{144}一".as_bytes());
    let file = |pre: &str| {
        let mut writer = Writer::new();
        writer
            .put("tokenizer.ggml.model", "gpt2")
            .put("tokenizer.ggml.pre", pre)
            .put("tokenizer.ggml.tokens", vec!["a".to_owned()])
            .put("tokenizer.ggml.merges", Vec::<String>::new());
        Tokenizer::from_gguf(&Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap())
    };
    assert!(file("deepseek-v3").is_ok());
    let error = file("qwen2").unwrap_err().to_string();
    assert!(error.contains("qwen2") && error.contains("deepseek-llm"), "{error}");
}

#[test]
fn the_real_vocabulary_of_pairs_gives_llama_cpps_ids() {
    let Some(path) = crate::models::find_file("ggml-vocab-gemma-4.gguf") else {
        eprintln!("skipped: no vocabulary of Gemma 4 (ggml-vocab-gemma-4.gguf, among llama.cpp's models)");
        return;
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    assert_eq!(check_all(&tokenizer, "gemma-4"), 55);
    assert!(tokenizer.is_end(tokenizer.id("<turn|>").unwrap()));
    assert!(tokenizer.is_end(tokenizer.id("<eos>").unwrap()));
}

#[test]
fn the_real_vocabulary_gives_llama_cpps_ids() {
    let Some(path) = crate::models::find_file("gemma-3-270m-q4_k_m.gguf") else {
        eprintln!("skipped: no Gemma 3 270M (tools/get-gemma3-270m fetches it)");
        return;
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).unwrap()).unwrap();
    assert_eq!(check_all(&tokenizer, "gemma3-270m"), 55);
    assert!(tokenizer.is_end(tokenizer.vocab.id("<end_of_turn>").unwrap()));
    assert!(tokenizer.is_end(1), "<eos>");
    assert!(!tokenizer.is_end(2), "<bos>");
}

/// A vocabulary of given tokens and scores, with all bytes.
fn made(tokens: &[(&str, f32, i32)]) -> Tokenizer {
    let mut all: Vec<(String, f32, i32)> =
        vec![("<unk>".into(), 0.0, 2), ("<s>".into(), 0.0, 3), ("</s>".into(), 0.0, 1)];
    all.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6)));
    all.extend(tokens.iter().map(|&(text, score, kind)| (text.to_owned(), score, kind)));
    let mut writer = Writer::new();
    writer
        .put("tokenizer.ggml.model", "llama")
        .put("tokenizer.ggml.tokens", all.iter().map(|token| token.0.clone()).collect::<Vec<_>>())
        .put("tokenizer.ggml.scores", all.iter().map(|token| token.1).collect::<Vec<_>>())
        .put("tokenizer.ggml.token_type", all.iter().map(|token| token.2).collect::<Vec<_>>())
        .put("tokenizer.ggml.bos_token_id", 1u32)
        .put("tokenizer.ggml.eos_token_id", 2u32)
        .put("tokenizer.ggml.unknown_token_id", 0u32)
        .put("tokenizer.ggml.add_space_prefix", false);
    Tokenizer::from_gguf(&Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()).unwrap()
}

/// A byte-pair vocabulary of all bytes, these tokens and these merges.
fn paired(tokens: &[&str], merges: &[&str]) -> Result<Tokenizer> {
    let mut all: Vec<String> = ["<unk>", "<bos>", "<eos>"].map(str::to_owned).to_vec();
    all.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    all.extend(tokens.iter().map(|&text| text.to_owned()));
    let kinds = (0..all.len()).map(|id| if id < 3 { 3 } else { 1 + 5 * i32::from(id < 259) }).collect::<Vec<_>>();
    let mut writer = Writer::new();
    writer
        .put("tokenizer.ggml.model", "gemma4")
        .put("tokenizer.ggml.tokens", all)
        .put("tokenizer.ggml.token_type", kinds)
        .put("tokenizer.ggml.merges", merges.iter().map(|&merge| merge.to_owned()).collect::<Vec<_>>())
        .put("tokenizer.ggml.bos_token_id", 1u32)
        .put("tokenizer.ggml.eos_token_id", 2u32)
        .put("tokenizer.ggml.unknown_token_id", 0u32)
        .put("tokenizer.ggml.add_bos_token", false);
    Tokenizer::from_gguf(&Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap())
}

fn pieces(tokenizer: &Tokenizer, text: &str, parse_special: bool) -> Vec<String> {
    let ids = tokenizer.encode(text, Encode { add_special: false, parse_special }).unwrap();
    ids.iter().map(|&id| tokenizer.token(id).to_owned()).collect()
}

#[test]
fn equal_scores_merge_from_the_left() {
    // With one rank a pair, "a"+"aa" and "aa"+"a" could not both go leftmost.
    let tokenizer = made(&[("a", -1.0, 1), ("aa", -2.0, 1), ("aaa", -2.0, 1), ("b", -1.0, 1), ("ab", -2.0, 1)]);
    assert_eq!(pieces(&tokenizer, "aaaaa", true), ["aaa", "aa"]);
    assert_eq!(pieces(&tokenizer, "aab", true), ["aa", "b"]);
    assert_eq!(pieces(&tokenizer, "bab", true), ["b", "ab"]);
}

#[test]
fn pairs_merge_in_the_order_of_the_list_and_only_if_they_stand_in_it() {
    let tokenizer = paired(&["a", "b", "c", "ab", "bc", "abc", "\u{2581}a"], &["b c", "a b", "a bc"]).unwrap();
    assert_eq!(pieces(&tokenizer, "abc", true), ["abc"]);
    assert_eq!(pieces(&tokenizer, "abab", true), ["ab", "ab"]);
    // A token that no pair of the list makes is not reached.
    assert_eq!(pieces(&tokenizer, " a", true), ["<0xE2>", "<0x96>", "<0x81>", "a"]);
    let other = paired(&["a", "b", "c", "ab", "bc", "abc"], &["a b", "b c", "a bc"]).unwrap();
    assert_eq!(pieces(&other, "abc", true), ["ab", "c"]);
    // A merge may make a text that is no token, on the way to one.
    let way = paired(&["x", "y", "z", "xyz"], &["x y", "xy z"]).unwrap();
    assert_eq!(pieces(&way, "xyz", true), ["xyz"]);
    assert_eq!(pieces(&way, "xy", true), ["<0x78>", "<0x79>"]);
}

#[test]
fn runs_of_newlines_are_apart_from_text_and_taken_whole() {
    let tokenizer = paired(&["a", "\n", "\n\n", "a\n", "\na"], &["a \n", "\n a"]).unwrap();
    assert_eq!(pieces(&tokenizer, "a\na", true), ["a", "\n", "a"]);
    assert_eq!(pieces(&tokenizer, "\n\n", true), ["\n\n"]);
    assert_eq!(pieces(&tokenizer, "\n\n\n", true), ["\n", "\n", "\n"]);
    assert_eq!(tokenizer.encode("a", Encode::default()).unwrap()[0], 1, "the begin token, whatever the file says");
}

#[test]
fn merges_without_a_space_between_two_texts_are_refused() {
    for bad in ["ab", "", " ", "a"] {
        assert!(matches!(paired(&["a", "b"], &["a b", bad]), Err(Error::Metadata { .. })), "{bad:?}");
    }
    assert!(paired(&["a"], &[]).is_ok());
}

#[test]
fn a_pair_merges_even_if_its_parts_are_no_tokens() {
    let tokenizer = made(&[("xy", -1.0, 1), ("xyz", -3.0, 1)]);
    assert_eq!(pieces(&tokenizer, "xyz", true), ["xyz"]);
    assert_eq!(pieces(&tokenizer, "xz", true), ["<0x78>", "<0x7A>"]);
    assert_eq!(pieces(&tokenizer, "é", true), ["<0xC3>", "<0xA9>"]);
}

#[test]
fn control_text_in_plain_text_stays_text() {
    let tokenizer = made(&[("<go>", 0.0, 3), ("<mine>", 0.0, 4)]);
    assert_eq!(pieces(&tokenizer, "<go>", true), ["<go>"]);
    assert_eq!(pieces(&tokenizer, "<go>", false).len(), 4);
    assert_eq!(pieces(&tokenizer, "<mine>", false), ["<mine>"], "user-defined tokens are always split off");
    // marked normal in the vocabulary, but it looks like an end marker
    assert_eq!(pieces(&tokenizer, "</s>", true), ["</s>"]);
    assert_eq!(pieces(&tokenizer, "</s>", false).len(), 4);
    assert_eq!(tokenizer.decode(&[2], false).unwrap(), "");
    assert_eq!(tokenizer.decode(&[2], true).unwrap(), "</s>");
}

#[test]
fn streamed_text_never_cuts_a_character() {
    let tokenizer = tiny();
    let text = "héllo 你好 🎉 end";
    let ids = tokenizer.encode(text, Encode { add_special: false, parse_special: false }).unwrap();
    let mut stream = TextStream::new();
    let parts: Vec<String> = ids.iter().map(|&id| stream.push(&tokenizer.piece(id, false).unwrap())).collect();
    assert!(parts.iter().all(|part| !part.contains('\u{fffd}')), "{parts:?}");
    assert!(parts.iter().any(String::is_empty), "some byte had to wait: {parts:?}");
    assert_eq!(parts.concat() + &stream.finish(), text);
}

#[test]
fn broken_bytes_become_replacement_characters() {
    let mut stream = TextStream::new();
    assert_eq!(stream.push(b"a\xffb\xe4\xbd"), "a\u{fffd}b");
    assert_eq!(stream.push(b"\xa0"), "\u{4f60}");
    assert_eq!(stream.push(b"\xe4"), "");
    assert_eq!(stream.push(b"x"), "\u{fffd}x");
    assert_eq!(stream.push(b"\xf0\x9f"), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn ids_past_the_end_are_refused() {
    let tokenizer = tiny();
    assert!(matches!(tokenizer.decode(&[512], false), Err(Error::TokenId { id: 512, vocabulary: 512 })));
    assert_eq!(tokenizer.token(u32::MAX), "");
}

#[test]
fn descriptions_that_do_not_hold_together_are_refused() {
    let refused = |change: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new();
        writer
            .put("tokenizer.ggml.model", "llama")
            .put("tokenizer.ggml.tokens", vec!["a".to_owned(), "b".to_owned()])
            .put("tokenizer.ggml.scores", vec![0.0f32, 1.0])
            .put("tokenizer.ggml.token_type", vec![1i32, 1]);
        change(&mut writer);
        let file = Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap();
        Tokenizer::from_gguf(&file).map(|_| ()).err()
    };
    assert!(refused(&|_| {}).is_none());
    let metadata: &[&dyn Fn(&mut Writer)] = &[
        &|writer| _ = writer.put("tokenizer.ggml.tokens", Vec::<String>::new()),
        &|writer| _ = writer.put("tokenizer.ggml.tokens", 5u32),
        &|writer| _ = writer.put("tokenizer.ggml.scores", vec![0.0f32]),
        &|writer| _ = writer.put("tokenizer.ggml.scores", vec![0.0f32, f32::NAN]),
        &|writer| _ = writer.put("tokenizer.ggml.token_type", vec![1i32, 7]),
        &|writer| _ = writer.put("tokenizer.ggml.token_type", vec![1i32]),
        &|writer| _ = writer.put("tokenizer.ggml.bos_token_id", 2u32),
        &|writer| _ = writer.put("tokenizer.ggml.eos_token_id", -1i32),
        &|writer| _ = writer.put("tokenizer.ggml.add_bos_token", 2u32),
        &|writer| _ = writer.put("tokenizer.ggml.model", 3u32),
    ];
    for (number, change) in metadata.iter().enumerate() {
        assert!(matches!(refused(change), Some(Error::Metadata { .. })), "change {number}");
    }
    assert!(matches!(
        refused(&|writer| _ = writer.put("tokenizer.ggml.model", "gpt2")),
        Some(Error::Unsupported { .. })
    ));
}

proptest! {
    #[test]
    fn any_text_survives_the_round_trip(text in "\\PC{0,40}|[ \\n<>/s▁a-e]{0,60}") {
        let tokenizer = tiny();
        let text = text.replace('\u{2581}', "_");
        let ids = tokenizer.encode(&text, Encode { add_special: false, parse_special: false }).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }

    #[test]
    fn any_text_survives_the_round_trip_in_bytes(text in "\\PC{0,40}|[ \\r\n\t0-9!é一▁<|a-e]{0,60}") {
        // Expressions take a while to compile.
        static BYTES: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(|| {
            Tokenizer::from_gguf(&Gguf::open(&data("deepseek-v3.gguf")).unwrap()).unwrap()
        });
        let tokenizer = &*BYTES;
        let ids = tokenizer.encode(&text, Encode { add_special: false, parse_special: false }).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
}
