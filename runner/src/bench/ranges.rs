//! Lists of numbers as llama-bench writes them: `1,2`, `0-128+64`, `1-128*2`.

/// Most values in one list.
const MOST: usize = 1024;

/// Reads numbers and ranges between commas. A range is `first-last` in steps of one, `first-last+step` or `first-last*factor`;
/// only the first number may be negative.
///
/// # Errors
/// A text that says what is wrong.
pub fn parse(text: &str) -> Result<Vec<i64>, String> {
    let mut values = Vec::new();
    // llama-bench lets a list end with a comma.
    for part in text.strip_suffix(',').unwrap_or(text).split(',') {
        extend(&mut values, part.trim())?;
    }
    Ok(values)
}

fn extend(values: &mut Vec<i64>, part: &str) -> Result<(), String> {
    let shape =
        || format!("`{part}` is no number or range; write 128, 0-512+128 or 1-256*2, with commas between several");
    let (sign, digits) = match part.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, part),
    };
    let (first, rest) = digits.split_once('-').map_or((digits, None), |(first, rest)| (first, Some(rest)));
    let first = sign * number(first).ok_or_else(shape)?;
    let Some(rest) = rest else {
        values.push(first);
        return enough(values);
    };
    let (last, multiplies, by) = match rest.find(['+', '*']) {
        Some(at) => (&rest[..at], rest[at..].starts_with('*'), number(&rest[at + 1..]).ok_or_else(shape)?),
        None => (rest, false, 1),
    };
    let last = number(last).ok_or_else(shape)?;
    if first > last {
        return Err(format!("`{part}` goes from {first} down to {last}; write the smaller number first"));
    }
    let mut value = first;
    while value <= last {
        values.push(value);
        enough(values)?;
        let next = if multiplies { value.checked_mul(by) } else { value.checked_add(by) };
        match next {
            Some(next) if next > value => value = next,
            // The next is beyond any number, and so beyond the last.
            None => break,
            Some(next) => {
                let step = if multiplies { "times" } else { "plus" };
                return Err(format!("`{part}` does not go on: {value} {step} {by} is {next}"));
            }
        }
    }
    Ok(())
}

fn enough(values: &[i64]) -> Result<(), String> {
    if values.len() <= MOST { Ok(()) } else { Err(format!("more than {MOST} values; take larger steps")) }
}

/// A number of digits alone.
fn number(text: &str) -> Option<i64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) { None } else { text.parse().ok() }
}

#[cfg(test)]
mod tests;
