#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// A file built byte by byte, so that every field can lie.
struct Raw(Vec<u8>);

impl Raw {
    fn header(version: u32, tensors: u64, keys: u64) -> Self {
        let mut raw = Self(b"GGUF".to_vec());
        raw.u32(version).u64(tensors).u64(keys);
        raw
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn string(&mut self, text: &[u8]) -> &mut Self {
        self.u64(text.len() as u64).bytes(text)
    }
    fn key(&mut self, name: &str, ty: u32) -> &mut Self {
        self.string(name.as_bytes()).u32(ty)
    }
    fn info(&mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> &mut Self {
        self.string(name.as_bytes()).u32(dims.len() as u32);
        for &dim in dims {
            self.u64(dim);
        }
        self.u32(ty).u64(offset)
    }
    /// Pads to the data section and adds data.
    fn data(&mut self, bytes: usize) -> &mut Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 0);
        self
    }
    fn parse(&self) -> Result<Gguf> {
        Gguf::parse(Bytes::copy_of(&self.0))
    }
    #[track_caller]
    fn refused(&self) -> Check {
        match self.parse() {
            Err(Error::BadFile(bad)) => {
                let text = Error::BadFile(bad.clone()).to_string();
                assert!(text.contains("expected") && text.contains("found") && text.contains("try"), "{text}");
                bad.check
            }
            other => panic!("not refused: {other:?}"),
        }
    }
}

fn with_key(fill: impl FnOnce(&mut Raw)) -> Raw {
    let mut raw = Raw::header(3, 0, 1);
    fill(&mut raw);
    raw.data(0);
    raw
}

fn with_tensors(infos: &[(&str, &[u64], u32, u64)], data: usize) -> Raw {
    let mut raw = Raw::header(3, infos.len() as u64, 0);
    for (name, dims, ty, offset) in infos {
        raw.info(name, dims, *ty, *offset);
    }
    raw.data(data);
    raw
}

fn sample() -> Vec<u8> {
    let mut writer = Writer::new();
    writer
        .put("general.architecture", "gemma3")
        .put("n", 7u32)
        .put("minus", -7i32)
        .put("half", 0.5f32)
        .put("yes", true)
        .put("big", u64::MAX)
        .put("words", vec!["a".to_owned(), "βγ".to_owned(), String::new()])
        .put("floats", vec![1.0f32, -2.0])
        .put("ints", vec![3i32, -4])
        .put("bools", vec![true, false])
        .tensor_f32("x", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        .tensor("y", QuantType::Q8_0, &[32], vec![1; 34])
        .tensor_with("z", QuantType::F16, &[4], |out| out.write_all(&[9; 8]));
    writer.to_bytes().unwrap()
}

#[test]
fn what_is_written_is_read() {
    let file = Gguf::parse(Bytes::copy_of(&sample())).unwrap();
    assert_eq!(file.version(), 3);
    assert_eq!(file.architecture().unwrap(), "gemma3");
    assert_eq!(file.get_u64("n").unwrap(), Some(7));
    assert_eq!(file.get("minus").unwrap().as_i64(), Some(-7));
    assert_eq!(file.get_f32("half").unwrap(), Some(0.5));
    assert_eq!(file.get_bool("yes").unwrap(), Some(true));
    assert_eq!(file.get_u64("big").unwrap(), Some(u64::MAX));
    let words = file.get_strings("words").unwrap().unwrap();
    assert_eq!(words.iter().filter_map(Value::as_str).collect::<Vec<_>>(), ["a", "βγ", ""]);
    let spans: Vec<_> = words.spans().collect();
    assert!(spans.iter().all(|&(at, text)| &words.bytes()[at..at + text.len()] == text.as_bytes()), "{spans:?}");
    let ints = file.get_array("ints").unwrap().unwrap();
    assert_eq!(ints.get(1).and_then(Value::as_i64), Some(-4));
    assert_eq!(ints.get(2), None);
    assert_eq!(file.get_array("bools").unwrap().unwrap().get(0).and_then(Value::as_bool), Some(true));
    let x = file.tensor("x").unwrap();
    assert_eq!((x.dims(), x.shape(), x.bytes()), (&[2, 3][..], vec![3, 2], 24));
    assert_eq!(file.data(x)[20..], 6f32.to_le_bytes());
    assert_eq!(file.data(file.tensor("y").unwrap()), [1; 34]);
    assert_eq!(file.data(file.tensor("z").unwrap()), [9; 8]);
    assert_eq!(file.get_u64("absent").unwrap(), None);
    for (key, wrong) in [("half", file.get_u64("half").is_err()), ("minus", file.get_u64("minus").is_err())] {
        assert!(wrong, "{key} is no unsigned integer");
    }
    assert!(file.require_in("n", 8..=9).unwrap_err().to_string().contains("from 8 to 9"));
    assert!(file.require_in("absent", 0..=1).unwrap_err().to_string().contains("no such key"));
}

#[test]
fn versions_2_and_3_are_read_and_no_others() {
    for (version, reads) in [(0, false), (1, false), (2, true), (3, true), (4, false), (3u32.swap_bytes(), false)] {
        let mut raw = Raw::header(version, 0, 0);
        raw.data(0);
        if reads {
            raw.parse().unwrap();
        } else {
            assert_eq!(raw.refused(), Check::Version, "version {version}");
        }
    }
}

#[test]
fn the_start_must_be_gguf() {
    assert_eq!(Raw(b"GGML\x03\0\0\0".to_vec()).refused(), Check::Magic);
    assert_eq!(Raw(vec![]).refused(), Check::Magic);
    assert_eq!(Raw(b"GG".to_vec()).refused(), Check::Magic);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = sample();
    for cut in 0..whole.len() - 24 {
        // the last tensor's padding is 24 bytes that nobody needs
        assert!(Raw(whole[..cut].to_vec()).parse().is_err(), "cut at {cut} of {}", whole.len());
    }
    Raw(whole[..whole.len() - 24].to_vec()).parse().unwrap();
}

#[test]
fn counts_are_checked_against_the_bytes_left_before_anything_is_taken() {
    for huge in [1, 1 << 20, 1 << 40, u64::MAX / 2, u64::MAX] {
        assert_eq!(Raw::header(3, huge, 0).refused(), Check::Count, "{huge} tensors in 24 bytes");
        assert_eq!(Raw::header(3, 0, huge).refused(), Check::Count, "{huge} keys in 24 bytes");
    }
    for length in [100, 1 << 33, u64::MAX - 7, u64::MAX] {
        let raw = with_key(|raw| {
            raw.u64(length).bytes(b"k").u32(4).u32(0);
        });
        assert_eq!(raw.refused(), Check::Count, "a key of {length} bytes");
        let raw = with_key(|raw| {
            raw.key("k", 8).u64(length).bytes(b"v");
        });
        assert_eq!(raw.refused(), Check::Count, "a string of {length} bytes");
        for (element, name) in [(0, "u8"), (8, "string"), (10, "u64")] {
            let raw = with_key(|raw| {
                raw.key("k", 9).u32(element).u64(length).bytes(&[0; 16]);
            });
            assert_eq!(raw.refused(), Check::Count, "{length} of {name}");
        }
    }
}

#[test]
fn caps_hold_even_where_the_bytes_are_there() {
    // 2^16 keys of 13 bytes and one more: each could be true, together they are absurd.
    let mut raw = Raw::header(3, 0, (1 << 16) + 1);
    raw.bytes(&vec![0; 13 * ((1 << 16) + 1)]);
    assert_eq!(raw.refused(), Check::Count);
}

#[test]
fn keys_are_named_and_unique() {
    let empty = with_key(|raw| {
        raw.key("", 4).u32(1);
    });
    assert_eq!(empty.refused(), Check::KeyName);
    let mut twice = Raw::header(3, 0, 2);
    twice.key("k", 4).u32(1).key("k", 4).u32(1).data(0);
    assert_eq!(twice.refused(), Check::DuplicateKey);
    let latin = with_key(|raw| {
        raw.string(b"k\xff").u32(4).u32(1);
    });
    assert_eq!(latin.refused(), Check::Utf8);
    let latin = with_key(|raw| {
        raw.key("k", 8).string(b"v\xff");
    });
    assert_eq!(latin.refused(), Check::Utf8);
}

#[test]
fn value_types_exist() {
    for ty in [13, 255, u32::MAX] {
        let raw = with_key(|raw| {
            raw.key("k", ty).u64(0);
        });
        assert_eq!(raw.refused(), Check::ValueType, "type {ty}");
    }
    for element in [9, 13, u32::MAX] {
        let raw = with_key(|raw| {
            raw.key("k", 9).u32(element).u64(0);
        });
        assert_eq!(raw.refused(), Check::ElementType, "element type {element}");
    }
}

#[test]
fn a_bool_is_0_or_1() {
    let raw = with_key(|raw| {
        raw.key("k", 7).bytes(&[2]);
    });
    assert_eq!(raw.refused(), Check::Bool);
    let raw = with_key(|raw| {
        raw.key("k", 9).u32(7).u64(3).bytes(&[0, 1, 7]);
    });
    assert_eq!(raw.refused(), Check::Bool);
}

#[test]
fn the_alignment_is_a_sane_power_of_two() {
    for align in [0u32, 3, 31, 33, 1 << 21, u32::MAX] {
        let raw = with_key(|raw| {
            raw.key("general.alignment", 4).u32(align);
        });
        assert_eq!(raw.refused(), Check::Alignment, "alignment {align}");
    }
    let wide = with_key(|raw| {
        raw.key("general.alignment", 10).u64(32);
    });
    assert_eq!(wide.refused(), Check::Alignment, "a u64");
    let mut raw = Raw::header(3, 1, 1);
    raw.key("general.alignment", 4).u32(1024).info("t", &[1], 0, 0);
    let start = raw.0.len().next_multiple_of(1024);
    raw.0.resize(start + 4, 0);
    let file = raw.parse().unwrap();
    assert_eq!((file.alignment_bytes(), file.data_start_bytes()), (1024, start as u64));
}

#[test]
fn tensor_names_are_short_and_unique() {
    let long = "n".repeat(64);
    assert_eq!(with_tensors(&[(&long, &[1], 0, 0)], 4).refused(), Check::TensorName);
    assert_eq!(with_tensors(&[("", &[1], 0, 0)], 4).refused(), Check::TensorName);
    with_tensors(&[(&long[..63], &[1], 0, 0)], 4).parse().unwrap();
    assert_eq!(with_tensors(&[("t", &[1], 0, 0), ("t", &[1], 0, 32)], 64).refused(), Check::DuplicateTensor);
    let mut raw = Raw::header(3, 1, 0);
    raw.string(b"t\xff").u32(1).u64(1).u32(0).u64(0).data(4);
    assert_eq!(raw.refused(), Check::Utf8);
}

#[test]
fn shapes_have_1_to_4_dimensions_and_do_not_overflow() {
    let most = i64::MAX as u64;
    for (dims, check) in [
        (&[][..], Check::DimensionCount),
        (&[1, 1, 1, 1, 1], Check::DimensionCount),
        (&[0], Check::Dimensions),
        (&[1, 0], Check::Dimensions),
        (&[most + 1], Check::Dimensions),
        (&[1 << 32, 1 << 32], Check::Dimensions),
        (&[1 << 32, 1 << 31], Check::Dimensions),
        (&[u64::MAX, u64::MAX, 2], Check::Dimensions),
        (&[most], Check::TensorBytes),
        (&[1 << 61], Check::TensorBytes),
        (&[1 << 40], Check::TensorRange),
    ] {
        assert_eq!(with_tensors(&[("t", dims, 0, 0)], 64).refused(), check, "{dims:?}");
    }
}

#[test]
fn tensor_types_are_known_and_rows_are_whole_blocks() {
    for ty in [4, 5, 31, 32, 33, 36, 37, 38, 40, 1000, u32::MAX] {
        assert_eq!(with_tensors(&[("t", &[256], ty, 0)], 2048).refused(), Check::TensorType, "type {ty}");
    }
    for ty in QuantType::ALL {
        let elements = ty.block_size() as u64;
        let raw = with_tensors(&[("t", &[elements, 2], *ty as u32, 0)], 2048);
        assert_eq!(raw.parse().unwrap().tensors()[0].bytes(), 2 * ty.type_bytes() as u64, "{ty}");
        if elements > 1 {
            let raw = with_tensors(&[("t", &[elements / 2, 2], *ty as u32, 0)], 2048);
            assert_eq!(raw.refused(), Check::RowBlocks, "{ty}");
        }
    }
}

#[test]
fn tensors_lie_in_the_file_aligned_and_apart() {
    assert_eq!(with_tensors(&[("t", &[8], 0, 16)], 64).refused(), Check::OffsetAlignment);
    assert_eq!(with_tensors(&[("t", &[8], 0, 32)], 63).refused(), Check::TensorRange);
    with_tensors(&[("t", &[8], 0, 32)], 64).parse().unwrap();
    for offset in [64, 1 << 40, u64::MAX - 31, 1 << 63] {
        assert_eq!(with_tensors(&[("t", &[8], 0, offset)], 64).refused(), Check::TensorRange, "offset {offset}");
    }
    // any order is fine, overlap is not
    with_tensors(&[("b", &[8], 0, 32), ("a", &[8], 0, 0)], 64).parse().unwrap();
    assert_eq!(with_tensors(&[("a", &[9], 0, 0), ("b", &[8], 0, 32)], 64).refused(), Check::Overlap);
    assert_eq!(with_tensors(&[("a", &[8], 0, 0), ("b", &[8], 0, 0)], 64).refused(), Check::Overlap);
}

#[test]
fn a_part_of_a_split_model_is_refused_by_name() {
    let mut raw = Raw::header(3, 0, 1);
    raw.key("split.count", 2).bytes(&2u16.to_le_bytes()).data(0);
    assert_eq!(raw.refused(), Check::Split);
    let mut raw = Raw::header(3, 0, 1);
    raw.key("split.count", 2).bytes(&1u16.to_le_bytes()).data(0);
    raw.parse().unwrap();
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let mut writer = Writer::new();
    writer.tensor("t", QuantType::Q8_0, &[33], vec![0; 34]);
    assert!(writer.to_bytes().is_err());
    let mut writer = Writer::new();
    writer.tensor("t", QuantType::Q8_0, &[32], vec![0; 33]);
    assert!(writer.to_bytes().is_err());
}

/// Reads everything that a file offers.
fn read_all(file: &Gguf) -> usize {
    let mut seen = 0;
    for (key, value) in file.metadata() {
        seen += key.len() + value.to_string().len() + value.to_json(4).to_string().len();
        if let Some(array) = value.as_array() {
            seen += array.iter().count() + array.spans().count();
        }
    }
    file.tensors().iter().map(|tensor| file.data(tensor).len()).sum::<usize>() + seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(file) = Gguf::parse(Bytes::copy_of(&bytes)) {
            read_all(&file);
        }
    }

    #[test]
    fn damaged_words_never_panic(at in any::<prop::sample::Index>(), value in prop::sample::select(vec![
        0, 1, 0x7fff_ffff, 0xffff_ffff, 1 << 32, i64::MAX as u64, u64::MAX - 7, u64::MAX,
    ])) {
        let mut bytes = sample();
        let at = at.index(bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        if let Ok(file) = Gguf::parse(Bytes::copy_of(&bytes)) {
            read_all(&file);
        }
    }

    #[test]
    fn random_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        if let Ok(file) = Gguf::parse(Bytes::copy_of(&bytes)) {
            read_all(&file);
        }
    }
}

#[test]
fn a_real_file_is_mapped_and_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gemma3.gguf");
    let file = Gguf::open(&path).unwrap();
    assert!(file.bytes().is_mapped());
    assert_eq!(file.architecture().unwrap(), "gemma3");
    assert_eq!(file.tensor("token_embd.weight").unwrap().shape(), [512, 64]);
    assert_eq!(read_all(&file), read_all(&Gguf::parse(Bytes::read(&path).unwrap()).unwrap()));
    assert!(matches!(Gguf::open(Path::new("/nowhere/x.gguf")), Err(Error::Io { .. })));
    assert!(matches!(Gguf::open(Path::new("/")), Err(Error::Io { .. })));
}
