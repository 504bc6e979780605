#![allow(clippy::unwrap_used)]

use super::*;

/// The model is to go on, without thinking.
const OPEN: Render = Render { generate: true, think: false };

fn template(source: &str) -> Result<ChatTemplate> {
    ChatTemplate::new(source, "<bos>".to_owned(), "<eos>".to_owned(), false)
}

fn render(source: &str) -> Result<String> {
    template(source)?.render(&[Message::new("user", "Hi <there> & \"you\"")], OPEN)
}

#[test]
fn gemmas_own_format() {
    let gemma = template(GEMMA3).unwrap();
    let turns = [
        Message::new("system", " Be brief. "),
        Message::new("user", "  One?\n"),
        Message::new("assistant", "1"),
        Message::new("user", "Two?"),
    ];
    assert_eq!(
        gemma.render(&turns, OPEN).unwrap(),
        "<bos><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n\
         <start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n"
    );
    assert_eq!(gemma.render(&turns[1..2], Render::default()).unwrap(), "<bos><start_of_turn>user\nOne?<end_of_turn>\n");
}

#[test]
fn gemma_4s_format_keeps_thoughts_out_of_earlier_turns() {
    let gemma = template(GEMMA4).unwrap();
    let turns = [
        Message::new("system", " Be brief. "),
        Message::new("user", "  One?\n"),
        Message::new("assistant", "<|channel>thought\nhm<channel|> 1 "),
        Message::new("user", "Two?"),
    ];
    let asked = "<|turn>user\nOne?<turn|>\n";
    let rest = "<|turn>model\n1<turn|>\n<|turn>user\nTwo?<turn|>\n<|turn>model\n";
    assert_eq!(
        gemma.render(&turns, OPEN).unwrap(),
        format!("<bos><|turn>system\nBe brief.<turn|>\n{asked}{rest}<|channel>thought\n<channel|>")
    );
    assert_eq!(
        gemma.render(&turns, Render { think: true, ..OPEN }).unwrap(),
        format!("<bos><|turn>system\n<|think|>Be brief.<turn|>\n{asked}{rest}")
    );
    assert_eq!(gemma.render(&turns[1..2], Render::default()).unwrap(), format!("<bos>{asked}"));
    let thinking = gemma.render(&turns[1..2], Render { generate: false, think: true }).unwrap();
    assert_eq!(thinking, format!("<bos><|turn>system\n<|think|><turn|>\n{asked}"));
}

#[test]
fn deepseeks_formats() {
    let turns = [
        Message::new("system", "Be brief."),
        Message::new("user", "One?"),
        Message::new("assistant", "<think>\nhm\n</think>1"),
        Message::new("user", "Two?"),
    ];
    let two = template(DEEPSEEK2).unwrap();
    let plain = [Message::new("user", "One?"), Message::new("assistant", "1"), Message::new("user", "Two?")];
    assert_eq!(two.render(&plain, OPEN).unwrap(), "<bos>User: One?\n\nAssistant: 1<eos>User: Two?\n\nAssistant:");
    assert!(two.render(&turns, OPEN).unwrap().starts_with("<bos>Be brief.\n\nUser: One?\n\n"));
    let three = "<bos>Be brief.<｜User｜>One?<｜Assistant｜>1<eos><｜User｜>Two?";
    for (source, think, end) in [
        (DEEPSEEK3, false, "<｜Assistant｜>"),
        (DEEPSEEK3, true, "<｜Assistant｜>"),
        (DEEPSEEK_R1, false, "<｜Assistant｜></think>"),
        (DEEPSEEK_R1, true, "<｜Assistant｜><think>\n"),
    ] {
        let rendered = template(source).unwrap().render(&turns, Render { generate: true, think }).unwrap();
        assert_eq!(rendered, format!("{three}{end}"));
        assert_eq!(template(source).unwrap().render(&turns, Render::default()).unwrap(), three);
    }
}

/// A file of an architecture without a template, whose byte-level vocabulary has these tokens too.
fn deepseek(tokens: &[&str]) -> Gguf {
    use crate::gguf::{Bytes, Writer};
    let mut all: Vec<String> = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"].map(str::to_owned).to_vec();
    all.extend(tokens.iter().map(|&token| token.to_owned()));
    let mut kinds = vec![3i32; all.len()];
    all.extend((0x21..0x7F).chain(0xA1..0xAD).chain(0xAE..0x144).filter_map(char::from_u32).map(String::from));
    kinds.resize(all.len(), 1);
    let mut writer = Writer::new();
    writer
        .put("general.architecture", "deepseek2")
        .put("tokenizer.ggml.model", "gpt2")
        .put("tokenizer.ggml.pre", "deepseek-v3")
        .put("tokenizer.ggml.tokens", all)
        .put("tokenizer.ggml.token_type", kinds)
        .put("tokenizer.ggml.merges", Vec::<String>::new())
        .put("tokenizer.ggml.bos_token_id", 0u32)
        .put("tokenizer.ggml.eos_token_id", 1u32);
    Gguf::parse(Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()
}

#[test]
fn thoughts_of_a_deepseek_model_are_kept_apart() {
    let turns = ["<｜User｜>", "<｜Assistant｜>"];
    let thinks = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"];
    for (tokens, format) in [(&[][..], DEEPSEEK2), (&turns, DEEPSEEK3), (&thinks, DEEPSEEK_R1)] {
        let file = deepseek(tokens);
        let tokenizer = Tokenizer::from_gguf(&file).unwrap();
        let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
        assert!(template.is_built_in());
        let (bos, eos) = ("<｜begin▁of▁sentence｜>".to_owned(), "<｜end▁of▁sentence｜>".to_owned());
        let wanted = ChatTemplate::new(format, bos, eos, true).unwrap();
        let think = Render { generate: true, think: true };
        let messages = [Message::new("user", "2 + 2?")];
        let text = template.render(&messages, think).unwrap();
        assert_eq!(text, wanted.render(&messages, think).unwrap());
        if tokens.len() < 4 {
            continue;
        }
        let ids = |text: &str| {
            let how = crate::tokenizer::Encode { add_special: false, parse_special: true };
            tokenizer.encode(text, how).unwrap()
        };
        let mut reply = Reply::new(&tokenizer, &ids(&text));
        let mut parts = Vec::new();
        for id in ids("four, é</think>4") {
            parts.extend(reply.push(id).unwrap());
        }
        parts.extend(reply.finish());
        let (mut thought, mut said) = (String::new(), String::new());
        for part in parts {
            match part {
                Part::Thought(text) => thought.push_str(&text),
                Part::Text(text) => said.push_str(&text),
            }
        }
        assert_eq!((thought.as_str(), said.as_str()), ("four, é", "4"));
        assert!(tokenizer.is_end(1));
    }
}

#[test]
fn the_real_template_of_gemma_4_is_the_built_in_one() {
    let Some(path) = crate::models::find_file("ggml-vocab-gemma-4.gguf") else {
        eprintln!("skipped: no vocabulary of Gemma 4 (ggml-vocab-gemma-4.gguf, among llama.cpp's models)");
        return;
    };
    let file = Gguf::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let real = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    assert!(!real.is_built_in());
    let ours = ChatTemplate::from_source("gemma4", &tokenizer).unwrap();
    let turns = [
        Message::new("system", " Be brief. "),
        Message::new("user", "  One?\n"),
        Message::new("assistant", "<|channel>thought\nhm<channel|> 1 "),
        Message::new("user", "Two?"),
    ];
    for turns in [&turns[..], &turns[1..], &turns[1..2]] {
        for think in [false, true] {
            let how = Render { generate: true, think };
            assert_eq!(real.render(turns, how).unwrap(), ours.render(turns, how).unwrap(), "{think}");
        }
    }
}

/// A vocabulary of the marks of thoughts, and letters.
fn marked(open: &str, close: &str, kind: i32) -> Tokenizer {
    let tokens = ["<unk>", open, close, "thought", "\n", "a", "b", "<0xC3>", "<0xA9>"].map(str::to_owned);
    let kinds = [2, kind, kind, 1, 1, 1, 1, 6, 6];
    let mut writer = crate::gguf::Writer::new();
    writer
        .put("tokenizer.ggml.model", "llama")
        .put("tokenizer.ggml.tokens", tokens.to_vec())
        .put("tokenizer.ggml.scores", vec![0.0f32; kinds.len()])
        .put("tokenizer.ggml.token_type", kinds.to_vec());
    Tokenizer::from_gguf(&Gguf::parse(crate::gguf::Bytes::copy_of(&writer.to_bytes().unwrap())).unwrap()).unwrap()
}

/// What a reply of these tokens comes to: (thoughts, text).
fn apart(tokenizer: &Tokenizer, prompt: &[u32], ids: &[u32]) -> (String, String) {
    let mut reply = Reply::new(tokenizer, prompt);
    let mut parts: Vec<Part> = ids.iter().flat_map(|&id| reply.push(id).unwrap()).collect();
    parts.extend(reply.finish());
    let (mut thought, mut text) = (String::new(), String::new());
    for part in parts {
        match part {
            Part::Thought(part) => thought.push_str(&part),
            Part::Text(part) => text.push_str(&part),
        }
    }
    (thought, text)
}

#[test]
fn thoughts_are_kept_apart_from_text() {
    let pair = |thought: &str, text: &str| (thought.to_owned(), text.to_owned());
    for kind in [3, 4] {
        let gemma = marked("<|channel>", "<channel|>", kind);
        // The channel's name is neither.
        assert_eq!(apart(&gemma, &[], &[1, 3, 4, 5, 4, 2, 6]), pair("a\n", "b"));
        assert_eq!(apart(&gemma, &[], &[5, 1, 3, 4, 2, 6, 1, 3, 4, 6, 2, 5]), pair("b", "aba"));
        assert_eq!(apart(&gemma, &[], &[1, 3, 4, 5]), pair("a", ""), "cut off while thinking");
        assert_eq!(apart(&gemma, &[], &[1, 3, 2, 5]), pair("", "a"));
        assert_eq!(apart(&gemma, &[1, 3, 4, 2], &[5]), pair("", "a"), "an empty thought in the prompt");
        // A character cut by a mark is told as cut, on its own side.
        assert_eq!(apart(&gemma, &[], &[7, 8, 7, 1, 3, 4, 7, 8, 2]), pair("é", "é\u{fffd}"));
        let other = marked("<think>", "</think>", kind);
        assert_eq!(apart(&other, &[5, 1], &[3, 4, 2, 6]), pair("thought\n", "b"), "opened by the prompt");
        assert_eq!(apart(&other, &[1, 2], &[3, 4]), pair("", "thought\n"));
    }
    let plain = marked("x", "y", 1);
    assert_eq!(apart(&plain, &[], &[1, 5, 2]), pair("", "xay"));
}

#[test]
fn what_templates_use_is_there() {
    // Python methods, raise_exception, tojson without HTML escapes, block trimming
    assert_eq!(render("{{ messages[0].content.split(' ')[0].upper() }}").unwrap(), "HI");
    assert_eq!(render("{{ messages[0]['role'].startswith('us') }}").unwrap(), "True");
    assert_eq!(render("{{ messages | tojson }}").unwrap(), r#"[{"role": "user", "content": "Hi <there> & \"you\""}]"#);
    assert_eq!(render("{{ [1] | tojson(indent=2) }}").unwrap(), "[\n  1\n]");
    assert_eq!(render("{% if true %}\n  x\n{% endif %}\ny").unwrap(), "  x\ny");
    assert_eq!(render("{{ strftime_now('%Y') | length }}").unwrap(), "4");
    match render("{{ raise_exception('roles must alternate') }}") {
        Err(Error::Template(text)) => assert!(text.contains("roles must alternate"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn broken_and_hostile_templates_end_in_an_error() {
    for source in [
        "{% for x in %}",
        "{{ messages.nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'etc/passwd' %}",
    ] {
        assert!(matches!(render(source), Err(Error::Template(_))), "{source}");
    }
}

#[test]
fn dates_are_written_right() {
    let at = 1_709_210_096; // 29 February 2024, 12:34:56 UTC, a Thursday
    assert_eq!(time::strftime("%d %b %Y, %A %B", at), "29 Feb 2024, Thursday February");
    assert_eq!(time::strftime("%F %T %I %p %% %-d %-m %q %", at), "2024-02-29 12:34:56 12 PM % 29 2 %q %");
    assert_eq!(time::strftime("%F %a", 0), "1970-01-01 Thu");
    assert_eq!(time::strftime("%F", 951_782_400), "2000-02-29");
    assert_eq!(time::strftime("%F", 4_107_542_400), "2100-03-01");
}

/// A template comes with a file that comes from anybody. One that opens a parenthesis too many thousand times ended the process.
#[test]
fn however_deep_a_template_nests_it_is_parsed_or_refused() {
    for (open, middle, close) in
        [("-", "1", ""), ("not ", "a", ""), ("(", "1", ")"), ("2**", "1", ""), ("", "1", "+1"), ("", "a", ".a")]
    {
        let times = (LONGEST - 10) / (open.len() + close.len());
        let source = format!("{{{{ {}{middle}{} }}}}", open.repeat(times), close.repeat(times));
        let _ = template(&source).map(|template| template.render(&[], OPEN));
    }
    let branches = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(5000));
    let _ = template(&branches).map(|template| template.render(&[], OPEN));
    let long = "{{ bos_token }}".repeat(LONGEST / 15 + 1);
    assert!(matches!(template(&long), Err(Error::Template(why)) if why.contains("more than 65536")));
}

/// A misspelt name would be a prompt of that one word.
#[test]
fn a_name_that_no_format_has_is_no_template() {
    let tokenizer = marked("<a>", "</a>", 3);
    let error = ChatTemplate::from_source("chatml", &tokenizer).unwrap_err();
    assert!(error.to_string().contains("gemma4"), "{error}");
    assert!(ChatTemplate::from_source("gemma4", &tokenizer).is_ok());
    assert!(ChatTemplate::from_source("{{ messages[0].content }}", &tokenizer).is_ok());
}
