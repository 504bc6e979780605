use super::*;
use crate::ops::{Copy, GetRows};

#[test]
fn rows_of_every_type_come_out_scaled() {
    for ty in [QuantType::F32, QuantType::BF16, QuantType::Q8_0, QuantType::Q5_0, QuantType::Q4_K, QuantType::Q6_K] {
        let (rows, cols) = (6, 512);
        let mut memory = Memory::default();
        let (table, exact) = memory.weights(ty, &[rows, cols], &random(1, rows * cols));
        let ids = [5, 0, 0, 3];
        let (ids_view, wide) = (memory.ints(&[4], &ids), memory.output(&[4, cols + 9]));
        let out = wide.narrow(1, 4, cols).unwrap();
        memory.run(&GetRows { table, ids: ids_view, out: out.clone(), scale: 2.5 }).unwrap();
        let want: Vec<f64> = ids
            .iter()
            .flat_map(|&id| exact[id as usize * cols..][..cols].iter().map(|&v| 2.5 * f64::from(v)))
            .collect();
        close(&read(&out), &want, 1e-7);
        assert!(read(&wide.narrow(1, 0, 4).unwrap()).iter().all(|v| v.is_nan()));
    }
}

#[test]
fn integer_tables_keep_their_integers() {
    let mut memory = Memory::default();
    let table = memory.ints(&[3, 2], &[1, -2, 3, i32::MIN, 5, 6]);
    let (ids, out) = (memory.ints(&[2], &[1, 0]), memory.ints(&[2, 2], &[0; 4]));
    memory.run(&GetRows { table, ids, out: out.clone(), scale: 1.0 }).unwrap();
    assert_eq!(read_ints(&out), [3, i32::MIN, 1, -2]);
}

#[test]
fn an_id_outside_the_table_is_a_fault() {
    for id in [-1, 6, i32::MAX] {
        let mut memory = Memory::default();
        let table = memory.floats(&[6, 3], &random(1, 18));
        let (ids, out) = (memory.ints(&[2], &[0, id]), memory.output(&[2, 3]));
        let fault = memory.run(&GetRows { table, ids, out, scale: 1.0 }).unwrap_err();
        assert!(fault.owner.contains("row number"), "{fault}");
    }
}

#[test]
fn copies_convert_and_follow_strides() {
    let values: Vec<f32> = random(1, 60).iter().map(|v| v * 100.0).collect();
    for ty in [QuantType::F32, QuantType::F16, QuantType::BF16] {
        for other in [QuantType::F32, QuantType::F16, QuantType::BF16] {
            let mut memory = Memory::default();
            let (src, exact) = memory.weights(ty, &[3, 2, 10], &values);
            let (dst, _) = memory.weights(other, &[3, 2, 14], &[0.0; 84]);
            let dst = dst.narrow(2, 2, 10).unwrap();
            memory.run(&Copy { src, dst: dst.clone() }).unwrap();
            let back = memory.output(&[3, 2, 10]);
            memory.run(&Copy { src: dst, dst: back.clone() }).unwrap();
            let want: Vec<f32> = exact
                .iter()
                .map(|&v| match other {
                    QuantType::F16 => half::f16::from_f32(v).to_f32(),
                    QuantType::BF16 => half::bf16::from_f32(v).to_f32(),
                    _ => v,
                })
                .collect();
            assert_eq!(bits(&read(&back)), bits(&want), "{ty} to {other}");
        }
    }
    let mut memory = Memory::default();
    let (src, dst) = (memory.ints(&[4], &[1, 2, 3, -4]), memory.ints(&[4], &[0; 4]));
    memory.run(&Copy { src, dst: dst.clone() }).unwrap();
    assert_eq!(read_ints(&dst), [1, 2, 3, -4]);
}
