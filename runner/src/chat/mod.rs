//! Chat templates: the Jinja text of the model file, run by minijinja, or a built-in format where there is none. Replies,
//! with thoughts kept apart.

mod reply;
pub(crate) mod time;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

pub use reply::{Part, Reply};

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;

/// One turn.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
    /// What was thought before. Templates leave it out of most turns.
    #[serde(rename = "reasoning_content", default, skip_serializing_if = "Option::is_none")]
    pub thought: Option<String>,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), thought: None }
    }
}

/// Gemma 3's format: no system turn of its own, the assistant is called `model`.
const GEMMA3: &str = r"{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = ns.system ~ message.content | trim ~ '\n\n' -%}
    {%- else -%}
        {{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' -}}
        {%- if message.role == 'user' -%}
            {{- ns.system -}}
            {%- set ns.system = '' -%}
        {%- endif -%}
        {{- message.content | trim ~ '<end_of_turn>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\n' -}}
{%- endif -%}
";

/// Gemma 4's format: turns of any role, the assistant is called `model`. Thoughts of earlier turns are left out; a
/// model that is not to think gets an empty thought to start from.
const GEMMA4: &str = r"{{ bos_token }}
{%- set ns = namespace(first=0) -%}
{%- if enable_thinking or (messages and messages[0].role == 'system') -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking -%}
        {{- '<|think|>' -}}
    {%- endif -%}
    {%- if messages and messages[0].role == 'system' -%}
        {{- messages[0].content | trim -}}
        {%- set ns.first = 1 -%}
    {%- endif -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
    {{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- for part in message.content.split('<channel|>') -%}
            {{- (part.split('<|channel>')[0]) | trim -}}
        {%- endfor -%}
    {%- else -%}
        {{- message.content | trim -}}
    {%- endif -%}
    {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\n' -}}
    {%- if not enable_thinking -%}
        {{- '<|channel>thought\n<channel|>' -}}
    {%- endif -%}
{%- endif -%}
";

/// DeepSeek V2's format: plain words, no tokens of its own but for the end of a reply.
const DEEPSEEK2: &str = r"{{ bos_token }}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'User: ' ~ message.content ~ '\n\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'Assistant: ' ~ message.content ~ eos_token -}}
    {%- else -%}
        {{- message.content ~ '\n\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant:' -}}
{%- endif -%}
";

/// The turns of DeepSeek V3 and R1: what systems say comes first, thoughts of earlier turns are left out.
macro_rules! deepseek_turns {
    () => {
        r"{{ bos_token }}
{%- for message in messages if message.role == 'system' -%}
    {{- message.content ~ ('' if loop.last else '\n\n') -}}
{%- endfor -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'assistant' -%}
        {{- '<｜Assistant｜>' ~ (message.content.split('</think>') | last) ~ eos_token -}}
    {%- else -%}
        {{- '<｜User｜>' ~ message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<｜Assistant｜>' -}}
"
    };
}

/// DeepSeek V3's format.
const DEEPSEEK3: &str = concat!(deepseek_turns!(), "{%- endif -%}\n");

/// That of R1 and V3.1, which think: a model that is not to think gets the end of a thought to start from.
const DEEPSEEK_R1: &str = concat!(
    deepseek_turns!(),
    r"    {{- '<think>\n' if enable_thinking else '</think>' -}}
{%- endif -%}
"
);

/// The formats that are built in, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("gemma", GEMMA3),
    ("gemma3", GEMMA3),
    ("gemma4", GEMMA4),
    ("deepseek2", DEEPSEEK2),
    ("deepseek3", DEEPSEEK3),
    ("deepseek-r1", DEEPSEEK_R1),
];

/// What a rendered conversation is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Render {
    /// Open the model's turn.
    pub generate: bool,
    /// Let the model think before it speaks, if its template knows of that.
    pub think: bool,
}

/// Steps that a template may take: far more than any real one needs, and a hostile one ends.
const FUEL: u64 = 2_000_000;

/// Bytes of a template at most: several times what real ones have.
const LONGEST: usize = 64 << 10;

/// Stack that a byte of a template may take while it is parsed, if each opens something: a few frames of the parser, and in a build
/// without optimisation they are large. Only what is used becomes memory.
const STACK_A_BYTE: usize = 8 << 10;

/// Turns messages into the text that a model was trained on.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    built_in: bool,
}

impl ChatTemplate {
    /// The template of a model file (`tokenizer.chat_template`), or the one of its architecture.
    ///
    /// # Errors
    /// [`Error::Template`] if it can not be parsed, [`Error::Unsupported`] for a file without one whose format
    /// is not known.
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Self> {
        let text = |id: Option<u32>| id.map_or("", |id| tokenizer.token(id)).to_owned();
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        match file.get_str("tokenizer.chat_template")? {
            Some(source) => Self::new(source, bos, eos, false),
            None => match built_in(format_of(file.architecture()?, tokenizer)) {
                Some(source) => Self::new(source, bos, eos, true),
                None => Err(Error::Unsupported {
                    what: "chatting with a model whose file has no template",
                    found: file.architecture()?.to_owned(),
                    advice: "--chat-template with a template".to_owned(),
                }),
            },
        }
    }

    /// A template given by its text, or by the name of a built-in one (`gemma`, `gemma4`, `deepseek2`, `deepseek3`, `deepseek-r1`).
    ///
    /// # Errors
    /// [`Error::Template`] if it can not be parsed.
    pub fn from_source(source: &str, tokenizer: &Tokenizer) -> Result<Self> {
        let text = |id: Option<u32>| id.map_or("", |id| tokenizer.token(id)).to_owned();
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        match built_in(source) {
            Some(source) => Self::new(source, bos, eos, true),
            // A misspelt name is a template too: one that says nothing but itself, whatever the user said.
            None if !source.contains("{{") && !source.contains("{%") => {
                let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
                Err(Error::argument("--chat-template", format!("Jinja text, or one of {}", names.join(", ")), source))
            }
            None => Self::new(source, bos, eos, false),
        }
    }

    fn new(source: &str, bos: String, eos: String, built_in: bool) -> Result<Self> {
        let mut environment = Environment::new();
        // As Hugging Face sets Jinja up.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| failed(&error))?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| time::strftime(format, time::now()));
        environment.add_filter("tojson", to_json);
        let environment = with_template(environment, source)?;
        Ok(Self { environment, bos, eos, built_in })
    }

    /// Whether this is the built-in format.
    #[must_use]
    pub fn is_built_in(&self) -> bool {
        self.built_in
    }

    /// The text of a conversation. It holds control tokens and the begin token: tokenise it with `parse_special` and
    /// without adding special tokens.
    ///
    /// # Errors
    /// [`Error::Template`] if the template fails or refuses the conversation.
    pub fn render(&self, messages: &[Message], how: Render) -> Result<String> {
        let template = self.environment.get_template("chat").map_err(|error| failed(&error))?;
        template
            .render(context! {
                messages => Value::from(Serde(messages)),
                add_generation_prompt => how.generate,
                enable_thinking => how.think,
                bos_token => &*self.bos,
                eos_token => &*self.eos,
            })
            .map_err(|error| failed(&error))
    }
}

/// Parses a template. That goes as deep as its text nests, and the text may come from anybody: on a stack for the worst.
fn with_template(mut environment: Environment<'static>, source: &str) -> Result<Environment<'static>> {
    if source.len() > LONGEST {
        return Err(Error::Template(format!("{} bytes of template, more than {LONGEST}", source.len())));
    }
    let source = source.to_owned();
    let parse = move || environment.add_template_owned("chat", source).map(|()| environment);
    let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(LONGEST * STACK_A_BYTE);
    let parsed =
        thread.spawn(parse).map_err(|error| Error::Template(format!("no thread to parse it: {error}")))?.join();
    parsed.map_err(|_| Error::Template("its parser gave up".to_owned()))?.map_err(|error| failed(&error))
}

/// The name of the format of models of an architecture, by the tokens that a vocabulary has for it.
fn format_of<'a>(architecture: &'a str, tokenizer: &Tokenizer) -> &'a str {
    match architecture {
        "deepseek2" | "deepseek4" if tokenizer.id("<think>").is_some() => "deepseek-r1",
        "deepseek2" | "deepseek4" if tokenizer.id("<｜User｜>").is_some() => "deepseek3",
        other => other,
    }
}

/// The built-in format of this name.
fn built_in(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, source)| *source)
}

fn failed(error: &minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    Error::Template(format!("{}{detail}{line}", error.kind()))
}

fn raise_exception(message: &str) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// JSON as Python writes it, not escaped for HTML as minijinja's own filter does.
fn to_json(value: &Value, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Python's other options do not matter to a model.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    let _ = options.get::<Option<bool>>("sort_keys")?;
    options.assert_all_used()?;
    let fail = |error: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(fail)?;
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)).map_err(fail)?,
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Python's separators: a space after each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
