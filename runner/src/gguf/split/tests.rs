#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::gguf::Writer;

/// A split model of three parts in a folder of its own; `change` may spoil a part before it is written.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Folder {
    fn new(change: &dyn Fn(usize, &mut Writer)) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("evergraph-{}-split-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = Self(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&folder.0).unwrap();
        for number in 0..3 {
            let mut writer = Writer::new();
            if number == 0 {
                writer.put("general.architecture", "gemma4");
            }
            writer.put("split.no", number as u32).put("split.count", 3u32).put("split.tensors.count", 4i32).tensor_f32(
                format!("t{number}"),
                &[2],
                &[number as f32, 0.5],
            );
            if number == 2 {
                writer.tensor_f32("last", &[1], &[9.0]);
            }
            change(number, &mut writer);
            writer.write_file(&folder.part(number)).unwrap();
        }
        folder
    }

    fn part(&self, number: usize) -> PathBuf {
        self.0.join(format!("a-model-{:05}-of-00003.gguf", number + 1))
    }

    fn open(&self) -> Result<Gguf> {
        Gguf::open(&self.part(0))
    }

    /// Opening fails, and the error tells these.
    #[track_caller]
    fn refused(&self, words: &[&str]) {
        let text = self.open().unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} in: {text}");
        assert!(text.contains("try: "), "{text}");
    }
}

fn whole(_: usize, _: &mut Writer) {}

#[test]
fn all_parts_are_one_model() {
    let folder = Folder::new(&whole);
    for file in [folder.open().unwrap(), Gguf::read(&folder.part(0)).unwrap()] {
        let names: Vec<&str> = file.tensors().iter().map(|tensor| tensor.name()).collect();
        assert_eq!(names, ["t0", "t1", "t2", "last"]);
        assert_eq!((file.parts().count(), file.architecture().unwrap()), (3, "gemma4"));
        for (name, first) in [("t0", 0.0f32), ("t1", 1.0), ("t2", 2.0), ("last", 9.0)] {
            assert_eq!(file.data(file.tensor(name).unwrap())[..4], first.to_le_bytes(), "{name}");
        }
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = Folder::new(&whole);
    std::fs::remove_file(folder.part(1)).unwrap();
    folder.refused(&["a-model-00002-of-00003.gguf", "part 2 of 3", "no such file"]);
}

#[test]
fn only_the_first_part_opens_a_model() {
    let folder = Folder::new(&whole);
    let text = Gguf::open(&folder.part(2)).unwrap_err().to_string();
    assert!(text.contains("a-model-00001-of-00003.gguf") && text.contains("part 3"), "{text}");
    let renamed = folder.0.join("model.gguf");
    std::fs::copy(folder.part(0), &renamed).unwrap();
    let text = Gguf::open(&renamed).unwrap_err().to_string();
    assert!(text.contains("NAME-00001-of-00003.gguf"), "{text}");
    let lying = folder.0.join("a-model-00001-of-00004.gguf");
    std::fs::copy(folder.part(0), &lying).unwrap();
    let text = Gguf::open(&lying).unwrap_err().to_string();
    assert!(text.contains("1 of 3 inside"), "{text}");
    // Bytes alone do not tell where the others are.
    assert!(matches!(Gguf::parse(Bytes::read(&folder.part(0)).unwrap()), Err(Error::BadFile(_))));
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let spoil = |part: usize, change: &'static dyn Fn(&mut Writer)| {
        Folder::new(&move |number, writer| {
            if number == part {
                change(writer);
            }
        })
    };
    spoil(1, &|writer| _ = writer.put("split.no", 2u32)).refused(&["00002-of", "part 2 of 3", "part 3 of 3"]);
    spoil(2, &|writer| _ = writer.put("split.count", 4u32)).refused(&["00003-of", "part 3 of 4"]);
    spoil(2, &|writer| _ = writer.put("split.count", 1u32)).refused(&["00003-of", "one file"]);
    spoil(1, &|writer| _ = writer.put("split.tensors.count", 5i32)).refused(&["00002-of", "4 tensors", "5 tensors"]);
    spoil(1, &|writer| _ = writer.put("general.architecture", "llama")).refused(&["00002-of", "gemma4", "llama"]);
    spoil(2, &|writer| _ = writer.tensor_f32("t1", &[1], &[0.0])).refused(&["00003-of", "t1 a second time"]);
    spoil(2, &|writer| _ = writer.tensor_f32("more", &[1], &[0.0])).refused(&["4 tensors", "5"]);
    spoil(0, &|writer| _ = writer.put("split.no", 3u32)).refused(&["split.no"]);
    spoil(0, &|writer| _ = writer.put("split.count", 70_000u32)).refused(&["split.count"]);
    let short = Folder::new(&whole);
    std::fs::write(short.part(1), b"GGUF").unwrap();
    short.refused(&["a-model-00002-of-00003.gguf", "version"]);
}
