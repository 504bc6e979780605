//! Files that hold together, weights of the size that was meant, and disks that fill up.
#![allow(clippy::unwrap_used)]

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::random::Random;
use super::*;
use crate::engine::{ExpertTally, Runtime, RuntimeConfig, Session, SessionConfig};
use crate::gguf::{Bytes, Gguf};
use crate::models;
use crate::placement::{Home, Names, Placement, Rule};
use crate::sampling::Sampling;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("evergraph-synth-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn entries(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn weights_of_every_type_are_centred_and_of_the_deviation_asked_for() {
    for ty in QuantType::ALL.iter().copied().filter(|ty| blocks::can_make(*ty)) {
        let (elements, wanted) = (1 << 17, 0.02f32);
        let mut bytes = vec![0; ty.row_bytes(elements).unwrap()];
        blocks::fill(ty, &mut Random::of(3, 1, 4), &mut bytes, wanted);
        let mut values = vec![0f32; elements];
        evergraph_kernels::quant::dequantize(ty, &bytes, &mut values).unwrap();
        assert!(values.iter().all(|x| x.is_finite()), "{ty}");
        let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / elements as f64;
        let square = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / elements as f64;
        let deviation = square.sqrt() / f64::from(wanted);
        assert!((deviation - 1.0).abs() < 0.05, "{ty}: {deviation} times what was asked for");
        assert!(mean.abs() < 0.02 * f64::from(wanted), "{ty}: a mean of {mean}");
    }
}

#[test]
fn the_plans_are_those_of_the_published_models() {
    // Weights in billions, as the models' names and cards say: 270 M, 26 B (25.2), 31 B (30.7), E2B (5.1 with all embeddings).
    for (name, tensors, billions) in [
        ("gemma3-270m", 2 + 18 * 13, 0.268),
        ("gemma4-26b-a4b", 3 + 30 * 22 - 5, 25.2),
        ("gemma4-31b", 3 + 60 * 14 - 10, 30.7),
        ("gemma4-e2b", 6 + 35 * 17 - 20 * 3, 4.65),
        ("deepseek-v2-lite", 3 + 27 * 8 + 3 + 26 * 7, 15.7),
        ("deepseek-v3", 3 + 61 * 10 + 3 * 3 + 58 * 8, 671.0),
        ("deepseek-v4-flash", 6 + 43 * 24 + 21 * 10 + 20 * 4, 284.0),
    ] {
        let (_, _, writer, list) = plan(&Options::new(name)).unwrap();
        let weights: u64 = list.iter().map(|tensor| tensor.dims.iter().product::<u64>()).sum();
        assert_eq!(list.len(), tensors, "{name}");
        assert!((weights as f64 / 1e9 / billions - 1.0).abs() < 0.02, "{name}: {weights}");
        assert!(writer.plan().unwrap().bytes > weights / 2);
    }
    assert!(
        matches!(plan(&Options::new("gemma9")), Err(Error::Argument { expected, .. }) if expected.contains("gemma4-31b"))
    );
    assert!(plan(&Options { layers: Some(0), ..Options::new("gemma4-e2b") }).is_err());
    assert!(plan(&Options { quant: QuantType::IQ1_S, ..Options::new("gemma4-e2b") }).is_err());
    assert!(quant("q4_k").is_ok_and(|ty| ty == QuantType::Q4_K) && quant("Q9").is_err());
}

#[test]
fn every_number_of_layers_and_every_type_makes_a_plan() {
    for name in names() {
        for layers in [1, 2, 4, 5, 6, 11, 12, 34, 36, 60] {
            let options = Options { layers: Some(layers), ..Options::new(name) };
            let (_, _, writer, list) = plan(&options).unwrap();
            assert!(writer.plan().is_ok(), "{name}, {layers} layers");
            if name.starts_with("deepseek") {
                continue;
            }
            // Layers with another's keys and values find some of each kind before them.
            let own =
                (0..layers).filter(|layer| list.iter().any(|t| t.name == format!("blk.{layer}.attn_k.weight"))).count();
            assert!(own == layers || own % 5 == 0 && own > 0, "{name}, {layers} layers, {own} with keys");
        }
        for ty in QuantType::ALL.iter().copied().filter(|ty| blocks::can_make(*ty)) {
            let (_, _, writer, _) = plan(&Options { quant: ty, ..Options::new(name) }).unwrap();
            assert!(writer.plan().is_ok(), "{name} of {ty}");
        }
    }
}

/// A file in memory.
fn written(mut writer: Writer, tensors: &[Tensor], threads: usize, seed: u64) -> Vec<u8> {
    #[derive(Debug)]
    struct Memory(Mutex<Vec<u8>>);
    impl write::Target for Memory {
        fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
            self.0.lock().unwrap()[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }
    }
    for tensor in tensors {
        writer.tensor_apart(&*tensor.name, tensor.ty, &tensor.dims);
    }
    let plan = writer.plan().unwrap();
    let memory = Memory(Mutex::new(vec![0; plan.bytes as usize]));
    let work = write::Work { header: &plan.header, places: &plan.places, tensors, seed };
    write::all(&memory, &work, threads, &|_, _| ()).unwrap();
    memory.0.into_inner().unwrap()
}

/// A tiny model: few weights, and no metadata.
fn small(threads: usize, seed: u64) -> Vec<u8> {
    let tensors: Vec<Tensor> = [(QuantType::Q4_0, 10 << 20), (QuantType::F32, 2 << 20), (QuantType::Q6_K, 9 << 20)]
        .into_iter()
        .map(|(ty, weights)| Tensor {
            name: format!("{ty}"),
            ty,
            dims: vec![1 << 10, weights >> 10],
            values: shapes::Values::Random(0.1),
        })
        .collect();
    written(Writer::new(), &tensors, threads, seed)
}

/// Runs a model with its experts on the host; gives the last logits, and how many of the chosen experts were of the half that
/// the device keeps.
fn run(architecture: &str, mut writer: Writer, tensors: &[Tensor]) -> (Vec<f32>, ExpertTally) {
    writer.put("general.architecture", architecture);
    let file = Arc::new(Gguf::parse(Bytes::copy_of(&written(writer, tensors, 2, 1))).unwrap());
    let runtime = Arc::new(Runtime::host(RuntimeConfig::default()).unwrap());
    let rules = vec![Rule { names: Names::ExpertsBelow(usize::MAX), home: Home::Host }];
    let placement = Placement { rules, ..Placement::default() };
    let model = Arc::new(models::load_placed(file, &runtime, &placement).unwrap());
    let experts = tensors.iter().filter(|tensor| tensor.name.contains("_exps"));
    let bytes: usize = experts.map(|tensor| (tensor.dims.iter().product::<u64>() / 32 * 18) as usize).sum();
    let mut settings = SessionConfig::default();
    (settings.context, settings.ubatch, settings.expert_cache) = (Some(300), 64, Some(bytes / 2));
    let mut session = Session::new(runtime, model, settings).unwrap();
    session.set_sampling(&Sampling::greedy(), &[]).unwrap();
    session.feed(&(0..150).map(|id| id * 7 % 512).collect::<Vec<_>>(), |_, _, _| Ok(())).unwrap();
    session.pick().unwrap();
    for id in 0..130 {
        session.take_next(id * 37 % 512).unwrap();
        session.decode().unwrap();
    }
    (session.last_logits().unwrap(), session.expert_tally().unwrap().unwrap_or_default())
}

#[test]
fn deepseeks_of_few_layers_run_and_their_tokens_go_to_all_experts() {
    let check = |name: &str, layers: usize, moe: usize, (logits, tally): (Vec<f32>, ExpertTally)| {
        let what = format!("{name}, {layers} layers: {tally:?}");
        assert!(logits.iter().all(|logit| logit.is_finite()), "{what}");
        let deviation = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
        assert!((0.3..10.0).contains(&deviation), "{what}: logits have a deviation of {deviation}");
        assert_eq!(tally.chosen as usize, 130 * 3 * moe, "{what}");
        // Half of the experts are there. Where all tokens took the same ones, all would be, and soon.
        let share = tally.hits as f64 / tally.chosen.max(1) as f64;
        assert!(moe == 0 || (0.42..0.57).contains(&share), "{what}");
    };
    for model in deepseek2::tiny() {
        for layers in [1, 4] {
            let (mut writer, mut tensors) = (Writer::new(), Vec::new());
            model.metadata(layers, &mut writer);
            model.tensors(layers, QuantType::Q4_0, &mut tensors);
            let dense = tensors.iter().filter(|tensor| tensor.name.ends_with(".ffn_up.weight")).count();
            check(model.name, layers, layers - dense, run(deepseek2::ARCHITECTURE, writer, &tensors));
        }
    }
    for layers in [1, 4] {
        let (mut writer, mut tensors) = (Writer::new(), Vec::new());
        deepseek4::TINY.metadata(layers, &mut writer);
        deepseek4::TINY.tensors(layers, QuantType::Q4_0, &mut tensors);
        check(deepseek4::NAME, layers, layers, run(deepseek4::ARCHITECTURE, writer, &tensors));
    }
}

#[test]
fn the_seed_alone_decides() {
    let one = small(1, 5);
    assert!(one == small(7, 5), "threads must not matter");
    assert!(one != small(1, 6), "seeds must");
}

#[test]
fn a_file_is_whole_or_not_there() {
    let folder = Folder::new("whole");
    let path = folder.0.join("model.gguf");
    // The vocabulary alone is 178 MB, so this one is a fake disk that fills up.
    let (_, _, writer, tensors) = plan(&Options { layers: Some(1), ..Options::new("gemma3-270m") }).unwrap();
    let planned = writer.plan().unwrap();
    struct Full;
    impl write::Target for Full {
        fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
            if at + bytes.len() as u64 > 9 << 20 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }
    let work = write::Work { header: &planned.header, places: &planned.places, tensors: &tensors, seed: 1 };
    let error = write::all(&Full, &work, 2, &|_, _| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    // A real one.
    let made = make(&path, &Options { layers: Some(1), ..Options::new("gemma3-270m") }, &|_, _| ()).unwrap();
    assert_eq!(made.bytes, std::fs::metadata(&path).unwrap().len());
    assert_eq!(folder.entries(), 1, "no part of it is left");
    let file = Gguf::open(&path).unwrap();
    assert_eq!((file.architecture().unwrap(), file.tensors().len()), ("gemma3", made.tensors));
    // Names that can not be written.
    for name in [folder.0.clone(), folder.0.join("nowhere/model.gguf"), PathBuf::from("/")] {
        assert!(
            make(&name, &Options { layers: Some(1), ..Options::new("gemma3-270m") }, &|_, _| ()).is_err(),
            "{name:?}"
        );
    }
    assert_eq!(folder.entries(), 1);
}
