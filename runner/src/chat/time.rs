//! `strftime_now` for templates: UTC, the fields that templates use.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Writes a point in time by a C format; unknown fields stay as they are.
pub(crate) fn strftime(format: &str, seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let (field, plain) = match chars.next() {
            Some('-') => (chars.next(), true),
            other => (other, false),
        };
        let number = |value: u64| if plain { value.to_string() } else { format!("{value:02}") };
        match field {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&number(year % 100)),
            Some('m') => out.push_str(&number(month)),
            Some('d') => out.push_str(&number(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('H') => out.push_str(&number(hour)),
            Some('I') => out.push_str(&number((hour + 11) % 12 + 1)),
            Some('M') => out.push_str(&number(minute)),
            Some('S') => out.push_str(&number(second)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            other => {
                out.push('%');
                out.extend(plain.then_some('-'));
                out.extend(other);
            }
        }
    }
    out
}

/// Year, month and day of a day number (0 = 1 January 1970), Gregorian. The algorithm is Howard Hinnant's
/// `civil_from_days`.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // from 1 March of year 0
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153; // March is 0
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}
