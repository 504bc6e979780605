//! A model file of arbitrary bytes: every answer is a value or a typed error, and what parses can be walked.
#![no_main]

use evergraph_runner::gguf::{Bytes, Gguf, Value};
use evergraph_runner::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(file) = Gguf::parse(Bytes::copy_of(data)) else { return };
    for (key, value) in file.metadata() {
        assert!(file.get(key).is_some());
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in file.tensors() {
        assert_eq!(file.data(tensor).len() as u64, tensor.bytes());
    }
    let _ = file.architecture();
    if let Ok(tokenizer) = Tokenizer::from_gguf(&file) {
        let ids: Vec<u32> = (0..tokenizer.vocabulary().min(64) as u32).collect();
        let _ = tokenizer.decode(&ids, true);
    }
});
