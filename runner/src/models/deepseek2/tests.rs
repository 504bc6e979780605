//! What files say, and heads that are taken apart.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::gguf::{MetaValue, Writer};

/// Numbers of a small model, with some changed: a key without a value is left out.
fn file(changes: &[(&str, Option<MetaValue>)]) -> Gguf {
    let mut keys: Vec<(&str, MetaValue)> = vec![
        ("block_count", 4u32.into()),
        ("context_length", 1024u32.into()),
        ("embedding_length", 32u32.into()),
        ("feed_forward_length", 64u32.into()),
        ("attention.head_count", 4u32.into()),
        ("attention.layer_norm_rms_epsilon", 1e-6f32.into()),
        ("attention.kv_lora_rank", 16u32.into()),
        ("attention.key_length", 24u32.into()),
        ("attention.value_length", 16u32.into()),
        ("attention.key_length_mla", 20u32.into()),
        ("attention.value_length_mla", 12u32.into()),
        ("rope.dimension_count", 8u32.into()),
        ("leading_dense_block_count", 1u32.into()),
        ("expert_count", 8u32.into()),
        ("expert_used_count", 2u32.into()),
        ("expert_feed_forward_length", 24u32.into()),
        ("expert_shared_count", 2u32.into()),
    ];
    for (key, value) in changes {
        keys.retain(|(known, _)| known != key);
        keys.extend(value.clone().map(|value| (*key, value)));
    }
    let mut writer = Writer::new();
    writer.put("general.architecture", "deepseek2");
    for (key, value) in keys {
        writer.put(format!("deepseek2.{key}"), value);
    }
    writer.tensor("token_embd.weight", QuantType::F32, &[32, 10], vec![0; 4 * 320]);
    let path = std::env::temp_dir().join(format!(
        "evergraph-deepseek2-{}-{:?}.gguf",
        std::process::id(),
        std::thread::current().id()
    ));
    writer.write_file(&path).unwrap();
    let file = Gguf::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn shape(changes: &[(&str, Option<MetaValue>)]) -> Shape {
    Shape::read(&file(changes)).unwrap()
}

#[test]
fn heads_are_as_long_as_newer_and_older_files_say() {
    let new = shape(&[]);
    assert_eq!((new.own, new.turned, new.value_dim, new.rank, new.q_rank), (12, 8, 12, 16, 0));
    let old = shape(&[
        ("attention.key_length_mla", None),
        ("attention.value_length_mla", None),
        ("attention.key_length", Some(20u32.into())),
        ("attention.value_length", Some(12u32.into())),
    ]);
    assert_eq!(old, new);
    for (key, value) in [
        ("attention.key_length_mla", 8u32),
        ("rope.dimension_count", 7),
        ("attention.kv_lora_rank", 0),
        ("nextn_predict_layers", 4),
    ] {
        let error = Shape::read(&file(&[(key, Some(value.into()))])).unwrap_err();
        assert!(matches!(&error, Error::Metadata { .. }), "{key}: {error}");
    }
}

#[test]
fn blocks_for_further_tokens_and_heads_in_one_tensor_are_not_read() {
    let shape = shape(&[("nextn_predict_layers", Some(1u32.into()))]);
    assert_eq!(shape.blocks, 3);
    assert!(shape.reads("token_embd.weight") && shape.reads("blk.2.attn_k_b.weight"));
    assert!(!shape.reads("blk.3.nextn.eh_proj.weight") && !shape.reads("blk.3.ffn_up_exps.weight"));
    assert!(!shape.reads("blk.0.attn_kv_b.weight"));
}

#[test]
fn positions_turn_and_flatten_as_the_file_says() {
    assert_eq!(shape(&[]).position, Position { base: 1e4, scale: 1.0, yarn: None, magnitude: 1.0, attention: 1.0 });
    let yarn = [
        ("rope.scaling.type", Some("yarn".into())),
        ("rope.scaling.factor", Some(40f32.into())),
        ("rope.scaling.original_context_length", Some(4096u32.into())),
    ];
    let with = |more: &[(&str, Option<MetaValue>)]| shape(&[&yarn[..], more].concat()).position;
    let known = with(&[("rope.scaling.yarn_log_multiplier", Some(0.1f32.into()))]);
    let expected = Yarn { factor: 40.0, original_context: 4096, beta_fast: 32.0, beta_slow: 1.0 };
    assert_eq!((known.yarn, known.magnitude), (Some(expected), 1.0));
    // (0.1 * ln 40 + 1)^2
    assert!((known.attention - 1.873_87).abs() < 1e-4, "{known:?}");
    let other = with(&[]);
    assert!((other.magnitude - 1.368_89).abs() < 1e-4 && other.attention == 1.0, "{other:?}");
    let linear = shape(&[("rope.scaling.type", Some("linear".into())), ("rope.scaling.factor", Some(4f32.into()))]);
    assert_eq!((linear.position.scale, linear.position.yarn), (0.25, None));
    let strange = Shape::read(&file(&[("rope.scaling.type", Some("longrope".into()))]));
    assert!(matches!(strange, Err(Error::Unsupported { .. })));
}

#[test]
fn experts_are_chosen_as_the_file_says() {
    let experts = |changes: &[(&str, Option<MetaValue>)]| shape(changes).experts.unwrap();
    let plain = experts(&[]);
    assert_eq!((plain.scoring, plain.groups, plain.norm, plain.scale), (Scoring::Softmax, None, false, 1.0));
    let v3 = experts(&[
        ("expert_gating_func", Some(2u32.into())),
        ("expert_group_count", Some(4u32.into())),
        ("expert_group_used_count", Some(2u32.into())),
        ("expert_weights_norm", Some(true.into())),
        ("expert_weights_scale", Some(2.5f32.into())),
    ]);
    assert_eq!((v3.scoring, v3.groups, v3.norm, v3.scale), (Scoring::Sigmoid, Some((4, 2)), true, 2.5));
    assert_eq!(experts(&[("expert_weights_scale", Some(0f32.into()))]).scale, 1.0);
    assert_eq!(shape(&[("expert_count", None)]).experts, None);
    for changes in [
        [("expert_gating_func", Some(3u32.into())), ("expert_group_count", None)],
        [("expert_group_count", Some(3u32.into())), ("expert_group_used_count", None)],
        [("expert_group_count", Some(8u32.into())), ("expert_group_used_count", Some(4u32.into()))],
        [("expert_group_count", Some(4u32.into())), ("expert_group_used_count", Some(5u32.into()))],
        [("expert_used_count", Some(3u32.into())), ("expert_group_count", Some(4u32.into()))],
    ] {
        let mut changes = changes.to_vec();
        if changes[0].0 == "expert_used_count" {
            changes.push(("expert_group_used_count", Some(1u32.into())));
        }
        assert!(Shape::read(&file(&changes)).is_err(), "{changes:?}");
    }
}

#[test]
fn keys_are_transposed_and_values_keep_their_type() {
    let [heads, own, value_dim, rank] = [2usize, 3, 2, 32];
    let rows = heads * (own + value_dim);
    let values: Vec<f32> = (0..rows * rank).map(|i| ((i * 37) % 255) as f32 - 127.0).collect();
    for (ty, key_ty) in
        [(QuantType::F32, QuantType::F32), (QuantType::BF16, QuantType::BF16), (QuantType::Q8_0, QuantType::F16)]
    {
        let bytes = quantize(ty, &values).unwrap();
        let mut exact = vec![0.0; values.len()];
        dequantize(ty, &bytes, &mut exact).unwrap();
        let (keys, made) = split(ty, &bytes, [heads, own, value_dim, rank]).unwrap();
        assert_eq!((keys.0, made.0), (key_ty, ty));
        let floats = |(ty, bytes): &Made, len: usize| {
            let mut out = vec![0.0; len];
            dequantize(*ty, bytes, &mut out).unwrap();
            out
        };
        let (k, v) = (floats(&keys, heads * own * rank), floats(&made, heads * value_dim * rank));
        for head in 0..heads {
            let row = |row: usize, column: usize| exact[(head * (own + value_dim) + row) * rank + column];
            for column in 0..rank {
                for i in 0..own {
                    let found = k[(head * rank + column) * own + i];
                    assert!((found - row(i, column)).abs() <= 1e-3 * row(i, column).abs(), "{ty}");
                }
                for i in 0..value_dim {
                    assert_eq!(v[(head * value_dim + i) * rank + column], row(own + i, column), "{ty}");
                }
            }
        }
    }
}
