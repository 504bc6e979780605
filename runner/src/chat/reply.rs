//! A reply, taken apart as it comes: what the model thinks, and what it says.

use crate::error::Result;
use crate::tokenizer::{TextStream, Tokenizer};

/// The texts of the tokens around a thought: Gemma 4's, and the usual ones.
const MARKS: &[(&str, &str)] = &[("<|channel>", "<channel|>"), ("<think>", "</think>")];

/// A part of a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    /// What the model thinks.
    Thought(String),
    /// What it says.
    Text(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Text,
    /// After the mark of Gemma's channels, whose name goes to the end of the line.
    Name,
    Thought,
}

/// Takes the tokens of a reply one by one and tells thoughts from text, where the vocabulary has tokens for that.
#[derive(Debug)]
pub struct Reply<'t> {
    tokenizer: &'t Tokenizer,
    marks: Option<Marks>,
    state: State,
    stream: TextStream,
}

#[derive(Clone, Copy, Debug)]
struct Marks {
    open: u32,
    close: u32,
    named: bool,
}

impl<'t> Reply<'t> {
    /// A reply to a prompt. A template may have opened a thought already.
    #[must_use]
    pub fn new(tokenizer: &'t Tokenizer, prompt: &[u32]) -> Self {
        let marks = MARKS.iter().enumerate().find_map(|(kind, (open, close))| {
            Some(Marks { open: tokenizer.id(open)?, close: tokenizer.id(close)?, named: kind == 0 })
        });
        let last = marks.and_then(|marks| {
            let open = prompt.iter().rposition(|&id| id == marks.open);
            let close = prompt.iter().rposition(|&id| id == marks.close);
            open.filter(|_| open > close)
        });
        let state = if last.is_some() { State::Thought } else { State::Text };
        Self { tokenizer, marks, state, stream: TextStream::new() }
    }

    /// Takes a token; returns what is whole of it: often nothing, seldom two parts.
    ///
    /// # Errors
    /// [`Error::TokenId`](crate::Error::TokenId) if there is no such token.
    pub fn push(&mut self, id: u32) -> Result<Vec<Part>> {
        let next = match self.marks {
            Some(marks) if id == marks.open => Some(if marks.named { State::Name } else { State::Thought }),
            Some(marks) if id == marks.close => Some(State::Text),
            _ => None,
        };
        if let Some(next) = next {
            let rest = std::mem::take(&mut self.stream).finish();
            let parts = self.part(rest);
            self.state = next;
            return Ok(parts);
        }
        let text = self.stream.push(&self.tokenizer.piece(id, false)?);
        Ok(self.part(text))
    }

    /// Ends the reply.
    #[must_use]
    pub fn finish(mut self) -> Vec<Part> {
        let rest = std::mem::take(&mut self.stream).finish();
        self.part(rest)
    }

    fn part(&mut self, mut text: String) -> Vec<Part> {
        if self.state == State::Name {
            let Some(end) = text.find('\n') else { return Vec::new() };
            text.drain(..=end);
            self.state = State::Thought;
        }
        match self.state {
            _ if text.is_empty() => Vec::new(),
            State::Text => vec![Part::Text(text)],
            _ => vec![Part::Thought(text)],
        }
    }
}
