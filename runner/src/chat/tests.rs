#![allow(clippy::unwrap_used)]

use super::*;

fn template(source: &str) -> Result<ChatTemplate> {
    ChatTemplate::new(source, "<bos>".to_owned(), "<eos>".to_owned(), false)
}

fn render(source: &str) -> Result<String> {
    template(source)?.render(&[Message::new("user", "Hi <there> & \"you\"")], true)
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
        gemma.render(&turns, true).unwrap(),
        "<bos><start_of_turn>user\nBe brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n\
         <start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n"
    );
    assert_eq!(gemma.render(&turns[1..2], false).unwrap(), "<bos><start_of_turn>user\nOne?<end_of_turn>\n");
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
