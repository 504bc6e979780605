#![allow(clippy::unwrap_used)]

use super::*;
use crate::engine::RuntimeConfig;
use crate::gguf::{Bytes, Writer};

#[test]
fn a_tensor_of_a_type_without_kernels_is_named_with_it() {
    let mut writer = Writer::new();
    let types = QuantType::ALL.iter().filter(|ty| ty.block_size() > 1);
    for ty in types.clone() {
        writer.tensor(format!("blk.0.{ty}"), *ty, &[256, 1], vec![0; ty.row_bytes(256).unwrap()]);
    }
    let file = Arc::new(Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap());
    let runtime = Runtime::host(RuntimeConfig::default()).unwrap();
    let weights = Weights::load(file, &runtime, &Placement::default(), 1).unwrap();
    let mut refused = Vec::new();
    for &ty in types {
        match weights.get(&format!("blk.0.{ty}"), &[1, 256]) {
            Ok(view) => assert_eq!(view.ty(), ty),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(&format!("{ty} in blk.0.{ty}")), "{text}");
                assert_eq!(error.exit_status(), 1);
                refused.push(ty.name());
            }
        }
    }
    assert_eq!(refused, ["IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"]);
}
