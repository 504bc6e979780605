//! Arbitrary text through a small vocabulary with byte fallback: it always encodes, and decodes to itself.
#![no_main]

use std::sync::OnceLock;

use evergraph_runner::gguf::{Bytes, Gguf, Writer};
use evergraph_runner::tokenizer::{Encode, Tokenizer};
use libfuzzer_sys::fuzz_target;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let mut tokens: Vec<String> = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"].map(String::from).to_vec();
        let mut kinds = vec![3i32, 3, 3, 2, 3];
        for byte in 0..=255u8 {
            tokens.push(format!("<0x{byte:02X}>"));
            kinds.push(6);
        }
        for piece in ["\u{2581}", "a", "b", "e", "t", "h", "\u{2581}t", "he", "th", "the", "\u{2581}the", "\n", "\n\n", "\u{2581}\u{2581}"] {
            tokens.push(piece.to_owned());
            kinds.push(1);
        }
        let scores: Vec<f32> = (0..tokens.len()).map(|index| -(index as f32)).collect();
        let mut writer = Writer::new();
        writer.put("general.architecture", "gemma3");
        writer.put("tokenizer.ggml.model", "llama");
        writer.put("tokenizer.ggml.tokens", tokens);
        writer.put("tokenizer.ggml.scores", scores);
        writer.put("tokenizer.ggml.token_type", kinds);
        writer.put("tokenizer.ggml.bos_token_id", 2u32);
        writer.put("tokenizer.ggml.eos_token_id", 1u32);
        writer.put("tokenizer.ggml.unknown_token_id", 3u32);
        writer.put("tokenizer.ggml.add_space_prefix", false);
        let bytes = writer.to_bytes().expect("a well-formed file");
        let file = Gguf::parse(Bytes::copy_of(&bytes)).expect("a well-formed file");
        Tokenizer::from_gguf(&file).expect("a well-formed vocabulary")
    })
}

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let tokenizer = tokenizer();
    let plain = Encode { add_special: false, parse_special: false };
    let ids = tokenizer.encode(text, plain).expect("any text encodes");
    // U+2581 stands for a space inside a vocabulary, so it comes back as one.
    assert_eq!(tokenizer.decode(&ids, false).expect("own ids decode"), text.replace('\u{2581}', " "));
    let special = Encode { add_special: true, parse_special: true };
    let ids = tokenizer.encode(text, special).expect("any text encodes");
    assert_eq!(ids.first(), Some(&2));
});
