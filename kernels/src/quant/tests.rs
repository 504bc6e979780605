#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde::Deserialize;

use super::codes::{Codes, Format, GROUP, unpack};
use super::half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::{QuantType, decode, dequantize, quantize};
use crate::KernelError;
use crate::cpu::simd::Level;

#[derive(Deserialize)]
struct Index {
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    r#type: String,
    ggml_type: u32,
    block_size: usize,
    type_size: usize,
    n_blocks: usize,
    bytes_offset: usize,
    bytes_len: usize,
    values_offset: usize,
    values_len: usize,
}

#[test]
fn every_format_gives_the_golden_bits() {
    let data = include_bytes!("../../tests/data/quants.bin");
    let index: Index = serde_json::from_str(include_str!("../../tests/data/quants.json")).unwrap();
    let mut checked = 0;
    for e in index.entries {
        let ty = QuantType::from_id(e.ggml_type).unwrap();
        assert_eq!(ty.name(), e.r#type);
        assert_eq!((ty.block_size(), ty.type_bytes()), (e.block_size, e.type_size), "{ty}");
        assert_eq!(e.n_blocks * e.type_size, e.bytes_len);
        let bytes = &data[e.bytes_offset..e.bytes_offset + e.bytes_len];
        let mut out = vec![0.0; e.values_len];
        if !ty.supported() {
            assert_eq!(dequantize(ty, bytes, &mut out), Err(KernelError::UnsupportedType(ty)));
            continue;
        }
        let values = &data[e.values_offset..e.values_offset + 4 * e.values_len];
        let expected: Vec<u32> = values.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        for level in Level::available() {
            out.fill(f32::NAN);
            decode(level, ty, bytes, &mut out);
            for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
                let same = got.to_bits() == *want || (got.is_nan() && f32::from_bits(*want).is_nan());
                assert!(same, "{ty} {level:?} element {i}: {got} for {}", f32::from_bits(*want));
            }
        }
        checked += 1;
    }
    assert_eq!(checked, 21);
}

#[test]
fn codes_stand_for_the_golden_bits_too() {
    let data = include_bytes!("../../tests/data/quants.bin");
    let index: Index = serde_json::from_str(include_str!("../../tests/data/quants.json")).unwrap();
    let mut checked = 0;
    for e in index.entries {
        let ty = QuantType::from_id(e.ggml_type).unwrap();
        assert_eq!(Format::of(ty).is_some(), ty.supported() && ty.block_size() > 1, "{ty}");
        let Some(format) = Format::of(ty) else { continue };
        let bytes = &data[e.bytes_offset..e.bytes_offset + e.bytes_len];
        let mut expected = vec![0.0; e.values_len];
        dequantize(ty, bytes, &mut expected).unwrap();
        for level in Level::available() {
            // Rows of one block, with room behind each that must stay as it is.
            let stride = ty.block_size() + 32;
            let (len, entries) = (e.n_blocks * stride, e.n_blocks * stride / GROUP);
            let (mut codes, mut scales, mut minima) = (vec![55; len], vec![5.5; entries], vec![0.0; entries]);
            let mut to = Codes { stride, codes: &mut codes, scales: &mut scales, minima: &mut minima };
            unpack(level, ty, bytes, ty.type_bytes(), 0, ty.type_bytes(), &mut to);
            for (i, &want) in expected.iter().enumerate() {
                let at = i / ty.block_size() * stride + i % ty.block_size();
                let (code, scale) = (i32::from(codes[at]) - i32::from(format.zero), scales[at / GROUP]);
                let got = scale * code as f32;
                let got = if format.minima { got + minima[at / GROUP] } else { got };
                // A zero has no sign once it is an integer.
                let same = got == want || (got.is_nan() && want.is_nan());
                assert!(same, "{ty} {level:?} element {i}: {got} for {want}");
                assert!(format.zero == 128 || codes[at] <= 128, "{ty}: {}", codes[at]);
                if format.wide {
                    let pair = at / (2 * GROUP) * 2;
                    assert_eq!(
                        (scales[pair].to_bits(), minima[pair].to_bits()),
                        (scales[pair + 1].to_bits(), minima[pair + 1].to_bits()),
                        "{ty}"
                    );
                }
            }
            let behind = |at: usize| at % stride >= ty.block_size();
            assert!((0..len).filter(|&at| behind(at)).all(|at| codes[at] == 55 && scales[at / GROUP] == 5.5), "{ty}");
        }
        checked += 1;
    }
    assert_eq!(checked, 19);
}

#[test]
fn halves_agree_with_the_half_crate_on_every_pattern() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#x}");
        if !ours.is_nan() {
            assert_eq!(f32_to_f16(ours), bits);
        }
        let (ours, theirs) = (bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#x}");
    }
}

#[test]
fn bad_lengths_are_typed_errors() {
    let mut out = [0.0; 32];
    for (bytes, len) in [(17, 32), (19, 32), (18, 31), (36, 32), (0, 32)] {
        let result = dequantize(QuantType::Q4_0, &vec![0; bytes], &mut out[..len]);
        assert!(matches!(result, Err(KernelError::BlockSize { .. })), "{bytes} {len}");
    }
    assert!(matches!(quantize(QuantType::Q8_0, &[0.0; 33]), Err(KernelError::BlockSize { .. })));
    assert_eq!(quantize(QuantType::IQ2_S, &[0.0; 256]), Err(KernelError::UnsupportedType(QuantType::IQ2_S)));
    assert_eq!(
        dequantize(QuantType::IQ1_S, &[0; 50], &mut [0.0; 256]),
        Err(KernelError::UnsupportedType(QuantType::IQ1_S))
    );
    assert_eq!(QuantType::from_id(4), None);
    assert_eq!(QuantType::from_name("q4_k"), Some(QuantType::Q4_K));
    assert!(QuantType::Q4_K.row_bytes(usize::MAX).is_err());
}

#[test]
fn zeros_survive_every_quantiser() {
    for &ty in QuantType::ALL {
        let Ok(bytes) = quantize(ty, &[0.0; 256]) else { continue };
        let mut out = vec![1.0; 256];
        dequantize(ty, &bytes, &mut out).unwrap();
        assert!(out.iter().all(|&v| v == 0.0), "{ty}");
    }
}

proptest! {
    #[test]
    fn quantisers_stay_within_a_step(values in prop::collection::vec(-4.0f32..4.0, 256), shift in 0i32..20) {
        let scale = (shift as f32).exp2() * 1e-2;
        let values: Vec<f32> = values.iter().map(|v| v * scale).collect();
        // Greatest error as a share of the block's greatest magnitude: half a step of the code, or a whole one
        // where the scale itself is rounded coarsely.
        let share = [
            (QuantType::F32, 0.0), (QuantType::F16, 1e-3), (QuantType::BF16, 4e-3), (QuantType::Q4_0, 0.13),
            (QuantType::Q4_1, 0.07), (QuantType::Q5_0, 0.065), (QuantType::Q5_1, 0.035), (QuantType::Q8_0, 0.005),
            (QuantType::Q4_K, 0.12), (QuantType::Q6_K, 0.05), (QuantType::MXFP4, 0.34),
        ];
        for (ty, share) in share {
            let bytes = quantize(ty, &values).unwrap();
            prop_assert_eq!(bytes.len(), ty.row_bytes(values.len()).unwrap());
            let mut out = vec![0.0; values.len()];
            dequantize(ty, &bytes, &mut out).unwrap();
            let greatest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (v, o) in values.iter().zip(&out) {
                // Scales as small as 3e-8 round to nothing; Q6_K multiplies them by up to 4096.
                prop_assert!((v - o).abs() <= share * greatest + 1.3e-4, "{} {} for {}", ty, o, v);
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even(bits: u32) {
        let value = f32::from_bits(bits);
        prop_assume!(!value.is_nan());
        prop_assert_eq!(f32_to_f16(value), half::f16::from_f32(value).to_bits());
        prop_assert_eq!(f32_to_bf16(value), half::bf16::from_f32(value).to_bits());
    }
}
